"""Everything before the first batch: a plan that was checked, on a model left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engram.batches import Batch, Batches, call, check_output_rows
from engram.engine.passes import Trace, trace
from engram.engine.plan import Plan, make_plan, outermost
from engram.errors import EngineError, EngramError, brief
from engram.parameters import Named, check_finite_weights, count, frozen, trainable


@dataclass(frozen=True)
class Coverage:
    """Which parameters went which way.

    ``exact`` counts the entries handled by a rule, ``fallback`` those by per-example copies or
    ``torch.func``, ``frozen`` those that are fixed, ``unused`` those that no output depends on.
    """

    ways: dict[str, str]
    exact: int
    fallback: int
    frozen: int
    unused: int

    @property
    def total(self) -> int:
        """Entries of all parameters of the model."""
        return self.exact + self.fallback + self.frozen + self.unused


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode in full precision while this lasts; modes and random state as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with (
            torch.random.fork_rng(devices=list(devices)),
            torch.autocast(device_of(model).type, enabled=False),
            own_forward(model),
        ):
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The modules' own forward, where ``module.compile()`` or accelerate's autocast replaced it."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        attributes = vars(module)
        if attributes.get("_compiled_call_impl") is not None:
            replaced.append((attributes, "_compiled_call_impl", None))
        if "forward" in attributes and "_original_forward" in attributes:
            replaced.append((attributes, "forward", attributes["_original_forward"]))
    before = [attributes[name] for attributes, name, _ in replaced]
    try:
        for attributes, name, own in replaced:
            attributes[name] = own
        yield
    finally:
        for (attributes, name, _), value in zip(replaced, before, strict=True):
            attributes[name] = value


def training_layers(model: nn.Module) -> list[str]:
    """Kinds of layers in train mode that behave otherwise in eval mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    found = (m for m in model.modules() if isinstance(m, kinds) and m.training)
    return sorted({type(module).__name__ for module in found})


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@dataclass(frozen=True)
class Engine:
    """A model with the plan for its passes."""

    model: nn.Module
    plan: Plan
    coverage: Coverage
    parameters: dict[str, nn.Parameter]

    def trace(self, batch: Batch) -> Trace:
        """Forward pass over a batch, recorded."""
        return trace(self.model, self.plan, batch.inputs, len(batch), self.parameters)


def prepare(model: nn.Module, batches: Batches) -> Engine:
    """Plan the passes on the first examples and check the plan against plain autograd.

    Call inside :func:`undisturbed`.
    """
    try:
        return _prepare(model, batches)
    except EngramError:
        raise
    except Exception as error:
        raise EngineError(
            "a model that runs on the first examples of the data and can be differentiated twice",
            brief(error),
            "check shapes and types of the inputs; docs/errors-and-limits.md lists what is covered",
        ) from error


def _prepare(model: nn.Module, batches: Batches) -> Engine:
    parameters = trainable(model)
    if not parameters:
        raise EngineError(
            "a model with trainable parameters", "none that requires gradients", "unfreeze some"
        )
    check_finite_weights(model)
    _check_kinds(model)
    first = batches.take(torch.arange(min(3, batches.num_data)))
    positions = torch.arange(3) % len(first)
    probe = first.select(positions).to(device_of(model))
    _check_independent(model, probe)
    units: set[str] = set()
    while True:
        plan = make_plan(model, probe.select(slice(0, 2)).inputs, probe.inputs, units)
        try:
            wrong, used = _disagreements(model, plan, probe)
        except EngramError:
            raise
        except RuntimeError:
            # a checkpoint runs the model again in its backward pass and wants the same operations
            plan = replace(plan, own_kernels=False)
            wrong, used = _disagreements(model, plan, probe)
        if not wrong:
            return Engine(model, plan, _coverage(model, plan, used), parameters)
        if set(plan.units) == {""}:
            raise EngineError(
                "per-example gradients that agree with autograd",
                f"other gradients of {wrong[0]!r}, even with torch.func over the whole model",
                "report the model; custom autograd functions need a backward that can be mapped",
            )
        units = outermost(set(plan.units) | {_wider(name, set(plan.units)) for name in wrong})


def _check_kinds(model: nn.Module) -> None:
    """What cannot be handled whatever the data: found before the model is run."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:
            raise EngineError(
                "layers that leave their weights as they are",
                f"{name!r} with max_norm, which rescales them in every forward pass",
                "set max_norm=None after training",
            )


def _check_independent(model: nn.Module, probe: Batch) -> None:
    """An example's outputs must not depend on which others are in its batch."""
    with torch.no_grad():
        together, again = call(model, probe.inputs), call(model, probe.inputs)
        check_output_rows(together, len(probe))
        alone = torch.cat(
            [call(model, probe.select(slice(i, i + 1)).inputs) for i in range(len(probe))]
        )
    if not torch.isfinite(together).all():
        return  # reported with the example's index when its batch comes
    if not torch.allclose(together, again, rtol=1e-3, atol=1e-6):
        raise EngineError(
            "a model whose outputs are the same each time in eval mode",
            "a random forward",
            "use nn.Dropout, which eval mode switches off, and draw no noise in forward",
        )
    tolerance = 1e-8 if together.dtype == torch.float64 else 2e-2
    if together.shape != alone.shape or not torch.allclose(
        together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max())
    ):
        raise EngineError(
            "a model that treats the examples of a batch independently",
            "outputs that change with the other examples of the batch",
            "replace what mixes examples; batch normalisation needs running statistics",
        )


def _wider(name: str, units: set[str]) -> str:
    """The module that owns the parameter, or the one around the unit that already holds it."""
    owner = name.rpartition(".")[0]
    holder = next((u for u in units if u == owner or owner.startswith(u + ".")), None)
    return owner if holder is None else holder.rpartition(".")[0]


def _plain_gradients(model: nn.Module, probe: Batch, seed: Tensor) -> list[Named]:
    """Autograd's gradients of each example by itself: the other rows of the seed are zero.

    They come from the same batch as ours, since rounding may differ between batch sizes by more
    than any tolerance in nets that amplify it (normalisation of almost constant features does).
    """
    parameters = trainable(model)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        outputs = call(model, probe.inputs)
        result = []
        for i in range(len(probe)):
            own = torch.zeros_like(seed)
            own[i] = seed[i]
            found = torch.autograd.grad(
                outputs,
                list(parameters.values()),
                own,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            result.append(dict(zip(parameters, found, strict=True)))
    return result


def _disagreements(model: nn.Module, plan: Plan, probe: Batch) -> tuple[list[str], set[str]]:
    """Parameters whose per-example gradients differ from autograd's, and those with any."""
    recorded = trace(model, plan, probe.inputs, len(probe))
    generator = torch.Generator().manual_seed(0)
    seed = torch.randn(recorded.outputs.shape, generator=generator, dtype=torch.float64).to(
        recorded.outputs
    )
    ours = recorded.own_gradients(seed)
    # what has no second derivative shows here, not in the first pass over the data
    recorded.tangent({name: torch.ones_like(p) for name, p in trainable(model).items()})
    if not torch.isfinite(recorded.outputs).all():
        return [], set(ours)  # reported with the example's index when its batch comes
    tolerance = 1e-3 if recorded.outputs.dtype != torch.float64 else 1e-8
    wrong: dict[str, None] = {}
    for i, theirs in enumerate(_plain_gradients(model, probe, seed)):
        scale = max(float(g.norm()) for g in theirs.values())
        for name, expected in theirs.items():
            got = ours[name][i] if name in ours else torch.zeros_like(expected)
            limit = tolerance * (float(expected.norm()) + 1e-3 * scale)
            if not float((got - expected).norm()) <= limit:
                wrong[name] = None
    return list(wrong), set(ours)


def _coverage(model: nn.Module, plan: Plan, used: set[str]) -> Coverage:
    ways = {name: way for name, way in plan.ways().items() if name in used}
    parameters = trainable(model)
    sizes = {"rule": 0, "fallback": 0, "unused": 0}
    for name, parameter in parameters.items():
        way = ways.setdefault(name, "unused")
        sizes[way if way in sizes else "fallback"] += parameter.numel()
    fixed = frozen(model)
    ways |= dict.fromkeys(fixed, "frozen")
    return Coverage(ways, sizes["rule"], sizes["fallback"], count(fixed.values()), sizes["unused"])
