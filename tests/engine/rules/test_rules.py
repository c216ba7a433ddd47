"""Every rule against torch.func, one example at a time: one table of calls."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn import functional

import engram
from engram.core.parameters import Layout
from engram.engine.rules import RULES, bind
from engram.engine.rules.base import Call, Function
from engram.engine.rules.copies import Copies
from engram.engine.rules.experts import routed_linear
from engram.linalg.kronecker_factors import Factors

B = 3


@dataclass(frozen=True)
class Row:
    """One call: shapes of the input of an example and of the parameters, and other arguments.

    ``tokens`` is the number of rows of a table, for inputs that are positions in it; ``experts``
    that of the layers which the last column of an input chooses from; ``names`` are those of the
    call's arguments where they are not those of the rule.
    """

    function: Function
    input: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]
    others: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    experts: int = 0
    names: dict[str, str] = field(default_factory=dict)

    def called(self, data: Tensor, parameters: dict[str, Tensor], others: dict[str, Any]) -> Tensor:
        """The operation itself."""
        given = {self.names.get(role, role): value for role, value in parameters.items()}
        if "input" in self.names:
            given[self.names["input"]] = data
        first = () if "input" in self.names else (data,)
        result: Tensor = self.function(*first, **given, **others)
        return result

    @property
    def name(self) -> str:
        given = "-".join([*self.parameters, *(f"{k}={v}" for k, v in self.others.items())])
        shape = "x".join(map(str, self.input))
        return f"{self.function.__name__}-{shape}-{given}"


STATISTICS = {
    "running_mean": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64),
    "running_var": torch.tensor([1.5, 0.3, 0.8], dtype=torch.float64),
}
CONV2 = {"weight": (4, 3, 2, 3), "bias": (4,)}
GROUPED = {"weight": (4, 1, 2, 2), "bias": (4,)}
DOWN = {"weight": (3, 2, 3, 2), "bias": (2,)}
ADDMM, OTHER = {"input": "mat1", "weight": "mat2", "bias": "input"}, {"weight": "other"}
TABLE = [
    Row(functional.linear, (4,), {"weight": (2, 4), "bias": (2,)}),
    Row(functional.linear, (5, 3, 4), {"weight": (2, 4)}),
    Row(functional.linear, (5, 4), {"bias": (2,)}),
    Row(torch.conv1d, (2, 7), {"weight": (4, 2, 3), "bias": (4,)}, {"stride": 2, "padding": 1}),
    Row(torch.conv2d, (3, 5, 6), CONV2),
    Row(torch.conv2d, (3, 5, 6), CONV2, {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    Row(torch.conv2d, (3, 5, 6), CONV2, {"padding": "same"}),
    Row(torch.conv2d, (3, 5, 6), {"bias": (4,)}, {"padding": "valid"}),
    Row(torch.conv2d, (2, 5, 4), GROUPED, {"groups": 2, "dilation": 2}),
    Row(torch.conv2d, (3, 2, 3), CONV2),
    Row(torch.conv3d, (2, 3, 4, 3), {"weight": (3, 2, 2, 2, 2), "bias": (3,)}, {"padding": 1}),
    Row(torch.conv_transpose2d, (3, 3, 2), DOWN),
    Row(torch.conv_transpose2d, (3, 3, 2), DOWN, {"stride": 2, "padding": 1, "output_padding": 1}),
    Row(torch.conv_transpose2d, (4, 3, 2), {"weight": (4, 1, 2, 2)}, {"groups": 2, "dilation": 2}),
    Row(functional.layer_norm, (5, 4), {"weight": (4,), "bias": (4,)}, {"normalized_shape": (4,)}),
    Row(functional.layer_norm, (2, 3, 4), {"bias": (3, 4)}, {"normalized_shape": (3, 4)}),
    Row(functional.rms_norm, (5, 4), {"weight": (4,)}, {"normalized_shape": (4,), "eps": 0.1}),
    Row(functional.group_norm, (4, 3, 2), {"weight": (4,), "bias": (4,)}, {"num_groups": 2}),
    Row(functional.batch_norm, (3,), {"weight": (3,), "bias": (3,)}, STATISTICS),
    Row(functional.batch_norm, (3, 2, 2), {"weight": (3,), "bias": (3,)}, STATISTICS),
    Row(torch.addmm, (4,), {"bias": (2,), "weight": (4, 2)}, names=ADDMM),
    Row(torch.matmul, (5, 4), {"weight": (4, 2)}, names=OTHER),
    Row(torch.Tensor.matmul, (4,), {"weight": (4, 2)}, names=OTHER),
    Row(torch.Tensor.__matmul__, (3, 2, 4), {"weight": (4, 2)}, names={"weight": "other"}),
    Row(torch.mul, (5, 4), {"weight": (4,)}, names=OTHER),
    Row(torch.Tensor.mul, (2, 3, 4), {"weight": (3, 4)}, names=OTHER),
    Row(torch.add, (5, 4), {"shift": (1, 5, 4)}, names={"shift": "other"}),
    Row(torch.Tensor.add, (2, 3, 4), {"shift": (4,)}, names={"shift": "other"}),
    Row(routed_linear, (5,), {"weight": (3, 2, 4), "bias": (3, 2)}, experts=3),
    Row(functional.embedding, (6,), {"weight": (5, 3)}, tokens=5),
    Row(functional.embedding, (2, 3), {"weight": (5, 3)}, {"padding_idx": -4}, tokens=5),
]
FIXED = {functional.linear: (2, 4), torch.conv2d: (4, 3, 2, 3)}  # of a bias that trains alone


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(row: Row, multiplicity: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """The input of B examples, the parameters, and all else that the call is given."""
    shape = (B * multiplicity, *row.input)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(row.tokens, shape, generator=generator) if row.tokens else drawn(shape)
    if row.experts:
        data[..., -1] = torch.randint(row.experts, shape[:-1], generator=generator).double()
    parameters = {
        role: drawn(size, number) for number, (role, size) in enumerate(row.parameters.items())
    }
    others = dict(row.others)
    if row.function in FIXED and "weight" not in parameters:
        others["weight"] = drawn(FIXED[row.function], 9)
    return data, parameters, others


def recorded(row: Row, data: Tensor, parameters: dict[str, Tensor], others: Any) -> Call:
    named = {"input": data, **{role: nn.Parameter(value) for role, value in parameters.items()}}
    given = {row.names.get(role, role): value for role, value in named.items()}
    bound = bind(row.function, (), {**given, **others})
    assert bound is not None
    shapes = {role: value.shape for role, value in parameters.items()}
    return Call(bound.input, shapes, bound.options, len(data) // B)


@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_both_maps_are_those_of_each_example_by_itself(row: Row, multiplicity: int) -> None:
    data, parameters, others = arguments(row, multiplicity)
    call, rule = recorded(row, data, parameters, others), RULES[row.function]
    directions = {role: drawn((B, *value.shape), 5) for role, value in parameters.items()}
    if "padding_idx" in others:  # that row does not train, but torch's tangent moves it
        directions["weight"][:, others["padding_idx"]] = 0
    outputs = row.called(data, parameters, others)
    seed = drawn(tuple(outputs.shape), 7)
    found, moved = rule.gradient(call, seed), rule.tangent(call, directions)
    assert moved.shape == outputs.shape
    for i in range(B):
        rows = slice(i * multiplicity, (i + 1) * multiplicity)

        def one(values: dict[str, Tensor], rows: slice = rows) -> Tensor:
            return row.called(data[rows], values, others)

        (expected,) = vjp(one, parameters)[1](seed[rows])
        for role, gradient in expected.items():
            torch.testing.assert_close(found[role][i], gradient, rtol=1e-11, atol=1e-12)
        own = {role: value[i] for role, value in directions.items()}
        tangent = jvp(one, (parameters,), (own,))[1]
        torch.testing.assert_close(moved[rows], tangent, rtol=1e-11, atol=1e-12)


def test_every_rule_is_in_the_table() -> None:
    assert {row.function for row in TABLE} == set(RULES)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_narrowed_call_is_the_call_of_its_examples(row: Row) -> None:
    data, parameters, others = arguments(row, 2)
    call, rule = recorded(row, data, parameters, others), RULES[row.function]
    seed = drawn(tuple(row.called(data, parameters, others).shape), 7)
    whole, part = rule.gradient(call, seed), rule.gradient(call.narrow(1, 3), seed[2:6])
    for role, value in whole.items():
        torch.testing.assert_close(part[role], value[1:3], rtol=1e-12, atol=1e-13)
    assert rule.bytes_per_example(call) > 0


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.function is torch.conv2d], ids=lambda row: row.name
)
def test_a_cheaper_convolution_has_the_same_derivatives(row: Row) -> None:
    data, parameters, others = arguments(row, 1)
    bound = bind(row.function, (), {"input": data.requires_grad_(), **parameters, **others})
    assert bound is not None
    cheaper = RULES[row.function].cheaper_call(bound)
    if isinstance(others.get("padding"), str):
        assert cheaper is None
        return
    assert cheaper is not None
    plain = row.called(data, parameters, others)
    torch.testing.assert_close(cheaper, plain)
    seed = drawn(tuple(plain.shape), 3).requires_grad_()
    twice = []
    for outputs in (cheaper, plain):
        (gradient,) = torch.autograd.grad(outputs, data, seed, create_graph=True)
        (second,) = torch.autograd.grad(gradient, seed, drawn(tuple(data.shape), 4))
        twice.append((gradient.detach(), second))
    torch.testing.assert_close(twice[0], twice[1], rtol=1e-11, atol=1e-12)


def test_copies_hand_on_what_they_get() -> None:
    call = Call(drawn((B, 2, 3)), {"value": torch.Size((2, 3))}, {})
    seed = drawn((B, 2, 3), 1)
    torch.testing.assert_close(Copies().gradient(call, seed)["value"], seed)
    torch.testing.assert_close(Copies().tangent(call, {"value": seed}), seed)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (torch.conv2d, {"input": drawn((3, 5, 6)), "weight": drawn((4, 3, 2, 3))}),
        (torch.conv_transpose2d, {"input": drawn((3, 5, 6)), "weight": drawn((3, 4, 2, 3))}),
        (functional.linear, {"input": drawn((3, 4)), "weight": drawn((4,))}),
        (functional.layer_norm, {"input": drawn((3, 4)), "normalized_shape": (4,)}),
        (
            functional.batch_norm,
            {"input": drawn((3, 3)), "weight": drawn((3,)), "training": True, **STATISTICS},
        ),
        (functional.embedding, {"input": torch.arange(3), "weight": drawn((5, 3)), "max_norm": 1}),
        (torch.tanh, {"input": drawn((3, 4))}),
    ],
)
def test_calls_that_no_rule_holds_for(function: Function, given: dict[str, Any]) -> None:
    """No batch, no parameters, statistics of the batch, a table that changes, no rule at all."""
    assert bind(function, (), given) is None


def test_tokens_of_padding_do_not_move() -> None:
    """Their row gets no gradient, so the map forwards must not see it either."""
    row = TABLE[-1]
    data, parameters, others = arguments(row, 1)
    call = recorded(row, data, parameters, others)
    moved = RULES[row.function].tangent(call, {"weight": torch.ones(B, 5, 3).double()})
    assert torch.equal(moved != 0, (data != 1)[..., None].expand_as(moved))


# one position: a single product of a row and a column, or one token
FACTORISED = [
    Row(functional.linear, (4,), {"weight": (3, 4), "bias": (3,)}),
    Row(torch.conv2d, (2, 3, 2), {"weight": (4, 2, 3, 2), "bias": (4,)}),
    Row(torch.conv1d, (2, 3), {"weight": (4, 2, 3)}),
    Row(torch.conv_transpose2d, (3, 1, 1), DOWN),
    Row(functional.embedding, (1,), {"weight": (5, 3)}, tokens=5),
]


@pytest.mark.parametrize("row", FACTORISED, ids=lambda row: row.name)
def test_the_kronecker_factors_of_one_example_at_one_position_are_exact(row: Row) -> None:
    data, parameters, others = arguments(row, 1)
    call, rule = recorded(row, data, parameters, others).narrow(0, 1), RULES[row.function]
    seed = drawn(tuple(row.function(data[:1], **parameters, **others).shape), 7)
    roles = [role for role in rule.kronecker_roles if role in parameters]
    layout = Layout(tuple(roles), tuple(parameters[role].shape for role in roles))
    factors = Factors(layout)
    rule.add_inputs(call, factors)
    rule.add_gradients(call, seed, factors)
    assert factors.complete
    gradient = layout.flatten(rule.gradient(call, seed))[0]
    vector = drawn((layout.num_params,), 3)
    found = layout.flatten(factors.block(0.5, torch.float64).multiply(layout.unflatten(vector)))
    expected = gradient * (gradient @ vector) + 0.5 * vector
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_kronecker_factors_are_sums_over_examples(row: Row) -> None:
    data, parameters, others = arguments(row, 2)
    call, rule = recorded(row, data, parameters, others), RULES[row.function]
    roles = [role for role in rule.kronecker_roles if role in parameters]
    if "weight" not in roles:
        return
    seed = drawn(tuple(row.called(data, parameters, others).shape), 7)
    layout = Layout(tuple(roles), tuple(parameters[role].shape for role in roles))
    whole, parts = Factors(layout), Factors(layout)
    rule.add_inputs(call, whole)
    rule.add_gradients(call, seed, whole)
    for i in range(B):
        rule.add_inputs(call.narrow(i, i + 1), parts)
        rule.add_gradients(call.narrow(i, i + 1), seed[2 * i : 2 * i + 2], parts)
    assert torch.equal(torch.as_tensor(whole.positions), torch.as_tensor(parts.positions))
    for side in ("rows", "columns"):
        one, other = getattr(whole, side).matrix, getattr(parts, side).matrix
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for sums in ("column_sum", "counts"):
        torch.testing.assert_close(getattr(whole, sums), getattr(parts, sums))


def test_nobody_asks_what_kind_a_rule_is() -> None:
    """A layer is added by a file and an import: outside of rules/ they are asked what they can."""
    kinds = {base.__name__ for rule in RULES.values() for base in type(rule).__mro__[:-2]}
    kinds -= {"Rule"}
    for path in Path(engram.__file__).parent.rglob("*.py"):
        if path.parent.name == "rules":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not named & kinds, path
