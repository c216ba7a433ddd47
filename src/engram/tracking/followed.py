r"""Where training would be without an example, followed along the path of the training itself.

A model in training is not at a minimum, and what it has learnt by heart leaves no trace there:
the residual of a memorised example vanishes, and its curvature with it. What was done to the
weights on the way is still in them. With the learning rate as time and the pace
of the optimizer (:mod:`engram.posteriors.pace`), the weights without example i are away from those
with it by :math:`\Delta_i`, to first order

.. math:: \dot\Delta_i = -\Big( M^{-1} \tfrac{1}{N} (C + N u) + w \Big) \Delta_i
    + M^{-1} \tfrac{1}{N} \nabla \ell_i, \qquad \Delta_i(0) = 0

with C the Gauss-Newton matrix of all data: every step of the example pushes the weights, the other
examples pull them back. It is the memory-perturbation equation of every single step, with what
came of it since. Started at the beginning and held at a minimum for long it becomes
:math:`(C + \delta)^{-1} \nabla \ell_i`, the deviation of a Laplace posterior.

Between two updates C, M and the gradient are taken as constant, C by its Kronecker factors and M by
its diagonal in their eigenbases; the equation is then solved in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.batches import Batches, Data
from engram.curvature.seeds import check_curvature
from engram.engine.prepare import device_of
from engram.engine.session import Observed, Session, available_bytes, session
from engram.errors import ArgumentError, DataError, NonFiniteError, PosteriorError
from engram.likelihoods import Likelihood
from engram.parameters import Named, trainable
from engram.posteriors.blocks import EigenBlock
from engram.posteriors.laplace import Fit, kronecker_blocks, kronecker_sums
from engram.posteriors.optimizers import unwrapped
from engram.posteriors.pace import Pace, check_moving, pace_of
from engram.sensitivity.estimators import displaced
from engram.tracking.clock import Clock
from engram.tracking.history import Record
from engram.tracking.sources import training_lost

NO_PRIOR = 1e-30  # in place of delta: the curvature alone, still positive in single precision
MEMORY_SHARE = 0.25
SEED = 0  # of the choice of examples, and of the labels sampled for the curvature


@dataclass(frozen=True)
class Advance:
    """The equation's coefficients in one block's eigenbasis, each [G, O, I].

    Args:
        block: its eigenbasis.
        kept: what is left of a deviation after the time since the last update.
        taken: what a gradient adds to it in that time.
    """

    block: EigenBlock
    kept: Tensor
    taken: Tensor

    def of(self, deviation: Named, gradient: Named) -> Named:
        """The deviations [B, *shape] by name after the time."""
        before = self.block.to_basis(self.block.matrix(deviation))
        push = self.block.to_basis(self.block.matrix(gradient))
        return self.block.named(self.block.from_basis(self.kept * before + self.taken * push))


def advance_of(block: EigenBlock, pace: Pace, times: Mapping[str, float], scale: float) -> Advance:
    r"""Solve the equation over the time since the last update.

    .. math:: \Delta \leftarrow e^{-a\tau} \Delta + \frac{1 - e^{-a\tau}}{a}\, \frac{g}{N m}, \qquad
        a = \frac{c + N u}{N m} + w

    Args:
        block: the curvature C of some parameters, c in its eigenbasis.
        pace: of the optimizer; a parameter without one stays where it is.
        times: tau by name.
        scale: N for a loss averaged over the batch, N / batch size for a sum.
    """
    shapes = dict(zip(block.names, block.layout.shapes, strict=True))
    dtype, device = block.precision.dtype, block.precision.device

    def in_basis(values: Mapping[str, float | Tensor], default: float) -> Tensor:
        filled = {
            name: torch.as_tensor(values.get(name, default), dtype=torch.float64, device=device)
            for name in block.names
        }
        return _diagonal_in_basis(block, {n: v.expand(shapes[n]) for n, v in filled.items()})

    stepped = {name: times.get(name, 0.0) for name in block.names if name in pace.preconditioner}
    mass = scale * in_basis(pace.preconditioner, 1.0)
    coupled, decoupled = in_basis(pace.coupled, 0.0), in_basis(pace.decoupled, 0.0)
    time = in_basis(stepped, 0.0)
    rate = (block.precision.double() + scale * coupled) / mass + decoupled
    faded = -torch.expm1(-rate * time)
    return Advance(block, (1 - faded).to(dtype), (faded / rate / mass).to(dtype))


def _diagonal_in_basis(block: EigenBlock, diagonal: Named) -> Tensor:
    """The diagonal of Q' D Q for a diagonal D, [G, O, I]: an average with squares as weights."""
    matrix = block.matrix(diagonal)
    if block.columns is not None:
        matrix = matrix @ block.columns.double().square()
    return matrix if block.rows is None else block.rows.double().square().mT @ matrix


class Followed:
    """Leave-one-out weights of some examples, from the start of the training to now.

    Args:
        model, optimizer, data, likelihood: of the training; make it before the first step.
        count: examples that are followed, chosen at random; each needs as much memory as the model.
        scale: N for a loss averaged over the batch, N / batch size for a sum.
        curvature: of C, as in :func:`engram.laplace`; ``fisher`` costs one backward pass.

    Attributes:
        indices: of the followed examples.
        deviation: their leave-one-out weights less the present ones, [count, *shape] by name.

    Example:
        >>> from engram.likelihoods import resolve
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(40, 3), torch.randint(0, 2, (40,)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = Followed(model, optimizer, data, resolve("categorical"), 40, 40.0)
        >>> for _ in range(5):
        ...     nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        ...     _ = optimizer.step()
        >>> loss, left_out = path.update()
        >>> bool(left_out.mean() > loss.mean())
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        likelihood: Likelihood,
        count: int,
        scale: float,
        curvature: str = "fisher",
    ) -> None:
        self.model, self.data, self.likelihood = model, data, likelihood
        self.optimizer, self.scale, self.curvature = unwrapped(optimizer), scale, curvature
        check_curvature(curvature)
        check_moving(self.optimizer)
        num_data = Batches(data, 1).num_data
        _check_count(count, num_data, model)
        generator = torch.Generator().manual_seed(SEED)
        self.indices = torch.randperm(num_data, generator=generator)[:count]
        self.deviation: Named = {
            name: torch.zeros(count, *p.shape, dtype=p.dtype, device=p.device)
            for name, p in trainable(model).items()
        }
        self.clock = Clock(self.optimizer)

    def update(self) -> tuple[Tensor, Tensor]:
        """Follow the examples up to now; their losses and their leave-one-out losses, [count].

        Costs a fit of sampled Kronecker factors, and a pass over the followed examples. Where it
        fails, nothing has changed.
        """
        with session(self.model, self.data, self.likelihood, None, False) as opened:
            advances = self._advances(opened)
            losses, moved, start = [], [], 0
            for observed in opened.passes("leave-one-out weights", self.indices):
                stop = start + len(observed.outputs)
                own = {name: value[start:stop] for name, value in self.deviation.items()}
                moved.append(_advanced(observed, own, advances))
                losses.append(torch.stack([observed.loss, self._left_out(observed, moved[-1])]))
                start = stop
        self.deviation = {name: torch.cat([part[name] for part in moved]) for name in moved[0]}
        self.clock.restart()
        loss, left_out = torch.cat(losses, dim=1).double().cpu()
        return loss, left_out

    def estimated(self, record: Record) -> Record:
        """The record with the estimate along the path."""
        if not math.isfinite(record.train):
            return record
        try:
            loss, left_out = self.update()
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.model, self.optimizer):
                raise
            return replace(record, estimate=math.nan)
        return replace(record, estimate=record.train + expected_at(record.train, loss, left_out))

    def _advances(self, opened: Session) -> list[Advance]:
        fit = Fit(opened, NO_PRIOR, self.curvature, SEED)
        blocks, rest = kronecker_blocks(fit, *kronecker_sums(fit))
        pace = pace_of(self.optimizer, fit.parameters)
        times = self.clock.elapsed(fit.parameters)
        return [advance_of(block, pace, times, self.scale) for block in blocks + rest]

    def _left_out(self, observed: Observed, deviation: Named) -> Tensor:
        """The losses at the outputs of the leave-one-out weights, linearised."""
        pushed = observed.trace.own_tangents(deviation)
        outputs = observed.outputs.detach()
        return displaced(self.likelihood, outputs, observed.targets, pushed)[1]

    def state_dict(self) -> dict[str, Any]:
        """What has to be remembered across a restart."""
        return {
            "indices": self.indices,
            "deviation": dict(self.deviation),
            "times": list(self.clock.times),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        if not state or len(state["indices"]) != len(self.indices):
            raise DataError(
                f"a state with {len(self.indices):,} followed examples",
                f"one with {len(state['indices']) if state else 0:,}",
                "resume with the follow= that the run was started with",
            )
        self.indices = state["indices"].cpu()
        device = device_of(self.model)
        self.deviation = {n: v.to(device, copy=True) for n, v in state["deviation"].items()}
        self.clock.restart(list(state["times"]))


def expected_at(train: float, loss: Tensor, left_out: Tensor) -> float:
    r"""The mean increase over all data, from that of a few examples whose losses are known.

    .. math:: \bar d + \beta\, (\ell - \bar\ell), \qquad
        \beta = \mathrm{cov}(d_i, \ell_i) / \mathrm{var}(\ell_i)

    The regression estimator of survey sampling: increases go with losses, so by how much the few
    happen to be easier than all data, whose mean loss is known, can be taken out.

    Args:
        train: mean loss of all data.
        loss, left_out: of the few, [m].

    Example:
        >>> loss = torch.tensor([0.1, 0.3, 0.5])
        >>> round(expected_at(0.4, loss, 3 * loss), 6)  # increases of twice the loss
        0.8
    """
    increase, centred = left_out - loss, loss - loss.mean()
    spread = float(centred.square().sum())
    slope = float((increase * centred).sum()) / spread if spread > 0 else 0.0
    return float(increase.mean()) + slope * (train - float(loss.mean()))


def _advanced(observed: Observed, deviation: Named, advances: list[Advance]) -> Named:
    """Every block's deviations after the time; what no output depends on has no gradient."""
    with torch.no_grad():
        gradients = observed.trace.own_gradients(observed.residual)
        result = dict(deviation)
        for advance in advances:
            names = advance.block.names
            own = {name: deviation[name] for name in names}
            push = {n: gradients.get(n, torch.zeros_like(own[n])) for n in names}
            result |= advance.of(own, push)
    return result


def _check_count(count: int, num_data: int, model: nn.Module) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= num_data:
        raise ArgumentError(
            f"a whole number of examples to follow, from 1 to {num_data:,}", repr(count), "use 500"
        )
    each = sum(p.numel() * p.element_size() for p in trainable(model).values())
    fitting = int(MEMORY_SHARE * available_bytes(device_of(model)) / max(each, 1))
    if count > fitting:
        raise ArgumentError(
            f"leave-one-out weights that fit in a quarter of the free memory, {fitting:,} examples",
            f"follow={count:,}",
            "follow fewer examples",
        )
