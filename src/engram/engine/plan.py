"""How each use of a parameter is handled; decided once, before the pass, on two or three examples.

Two runs of the model with different numbers of examples tell which dimension of every tensor
counts examples. Then each operation that a parameter enters is one of:

- ``rule``: the operation has a rule;
- ``copies``: it has none, and is run with one copy of the parameter per example;
- ``derived``: no data enters (a reshaped or normalised weight); its result is followed instead;
- ``constant``: no data enters but numbers that are the same for every example (positions that are
  looked up); the rule is for them laid out once per example;
- ``expand``: the parameter is laid out once per example (a class token).

What fits none of these makes the smallest module that owns the parameters a *unit*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engram.engine.rules.base import Function
from engram.engine.units import Unit

Scaling = tuple[int, int]  # (dimension that counts examples, entries per example)


@dataclass(frozen=True)
class ParameterUse:
    """One operation that a parameter enters, and how to handle it.

    Args:
        function: the operation.
        kind: ``rule``, ``copies``, ``derived``, ``constant`` or ``expand``.
        inputs: for each tensor among its arguments, which dimension counts examples.
        output: the same for its result.
        names: of the parameters that enter, also by way of what was derived from them without a
            rule.
    """

    function: Function
    kind: str
    inputs: tuple[Scaling | None, ...]
    output: Scaling | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The uses in the order in which the model makes them, and its units.

    ``own_kernels`` says whether quicker kernels of ours may stand in for the model's operations,
    ``twice`` whether its backward pass can itself be differentiated.
    """

    uses: tuple[ParameterUse, ...]
    units: dict[str, Unit] = field(default_factory=dict)
    own_kernels: bool = True
    twice: bool = True

    def ways(self) -> dict[str, str]:
        """For each parameter that is used: rule, copies or unit."""
        ways: dict[str, str] = {}
        said = {"expand": "rule", "constant": "rule", "derived": "copies"}
        rank = {"rule": 0, "expand": 0, "constant": 0, "derived": 1, "copies": 1, "unit": 2}
        found = [(name, use.kind) for use in self.uses for name in use.names]
        found += [(name, "unit") for unit in self.units.values() for name in unit.names]
        for name, kind in found:
            if rank[kind] >= rank.get(ways.get(name, "rule"), 0):
                ways[name] = said.get(kind, kind)
        return ways
