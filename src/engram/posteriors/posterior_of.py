r"""The posterior that an optimizer already holds: its preconditioner is a precision.

Every optimizer of the Bayesian-learning-rule family steps by :math:`S_t^{-1} \nabla`, so its own
state gives S_t, with no pass over the data. Which state, and how, is in
:mod:`engram.posteriors.optimizer_state`: a new optimizer is one function and one line there.

The prior precision delta comes from the weight decay. A *coupled* decay w adds w theta to the
gradient of the batch's loss: delta is N w for a mean over the batch and (N / batch size) w for a
sum. A *decoupled* one shrinks the weights whatever the scale of the loss, so that delta is N w for
either. IVON has its own N, the effective sample size; our own optimizers take delta itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO, is_auto, one_of, whole
from engram.core.parameters import check_module, count, trainable
from engram.core.state.sharded import gathered
from engram.curvature.kinds import Curvature
from engram.errors import ArgumentError, ModelMismatchError
from engram.likelihoods import Likelihood, resolve
from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.structures import FullMatrix
from engram.posteriors.gaussian import SAME_PRIOR, Posterior, check_prior_precision
from engram.posteriors.optimizer_state import Source, blocks_of, kind_of
from engram.posteriors.tolerance import chosen_tolerance
from engram.training.metrics import takes_mean_loss, unwrapped
from engram.training.step_rules import weight_decay_of

SECOND_MOMENTS = ("batch", "example", "paper")  # readings of an average of squared gradients


def posterior_of(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    num_data: int,
    likelihood: str | Likelihood = AUTO,
    prior_precision: float | str = AUTO,
    reduction: str = "mean",
    training_batch_size: int | None = None,
    second_moment: str = "batch",
    tolerance: float | str = AUTO,
) -> Posterior:
    r"""The Gaussian posterior in an optimizer's state, at the model's present weights.

    Of a model that FSDP2 has sharded every process has the whole posterior: call it on all of them.

    Args:
        optimizer: after at least one step.
        model: whose parameters it trains.
        num_data: N, the number of training examples.
        likelihood: of the data, a name or an object; ``"auto"`` is that of the optimizer's own
            curvature where it has one, as :class:`engram.optimizers.GaussNewton`, else
            ``categorical``.
        prior_precision: delta; ``"auto"`` is what the optimizer's weight decay means, for each
            group of parameters: N times it for a loss averaged over the batch, N / B times it for
            a sum over B examples.
        reduction: of the training loss over a batch, ``mean`` or ``sum``.
        training_batch_size: B, needed for ``sum`` and for ``second_moment="example"``.
        second_moment: what an average s of squared gradients, as Adam keeps, is taken for.
            ``batch``: S = N sqrt(s_hat) + delta, with the start of Adam's average corrected as in
            its step, s_hat = s / (1 - beta2^t). ``example``: scaled to single examples,
            S = N sqrt(B s_hat) + delta; a batch's gradient is a mean of B, so its square is about
            1/B of an example's, and S would depend on B. ``paper``: Table 1 of the paper as its
            authors compute it, S = N sqrt(s) + delta, with s as it is kept; delta may be 0 there.
            See docs/optimizers.md.
        tolerance: how far an average example's sensitivity may change for speed: wide diagonals at
            one position are taken as a short sum of products. ``"auto"`` is 0.03 in single
            precision and 0, everything exact, in double.

    Returns:
        The posterior; ``settings`` has the prior precision that was used and where it came from.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> posterior_of(optimizer, model, num_data=100)
        Posterior(Adam, 3 parameters, N=100, prior_precision=1, ...)

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, Table 1.
    """
    wanted = Wanted(
        num_data,
        likelihood,
        prior_precision,
        reduction,
        training_batch_size,
        second_moment,
        tolerance,
    )
    source, prior = wanted.applied(optimizer, model)
    blocks = blocks_of(source)
    mean = {name: gathered(p.detach()).clone() for name, p in source.parameters.items()}
    settings = _settings(source.optimizer, prior, reduction, training_batch_size)
    covered = {name for block in blocks for name in block.names}
    settings["second_moment"] = second_moment
    settings["tolerance"] = source.tolerance
    settings["not_stepped"] = [name for name in source.parameters if name not in covered]
    return Posterior(
        type(source.optimizer).__name__,
        mean,
        blocks,
        prior.mean(source.parameters),
        num_data,
        settings,
        prior.by_name if prior.differs else {},
        likelihood=likelihood_of(source.optimizer, likelihood),
        **_facts(source.optimizer),
    )


@dataclass(frozen=True)
class Wanted:
    """The settings of :func:`posterior_of`."""

    num_data: int
    likelihood: str | Likelihood
    prior_precision: float | str
    reduction: str
    training_batch_size: int | None
    second_moment: str
    tolerance: float | str = AUTO

    @property
    def as_kept(self) -> bool:
        """Whether running averages are taken as the paper's table has them."""
        return self.second_moment == "paper"

    def applied(self, optimizer: Optimizer, model: nn.Module) -> tuple[Source, Prior]:
        """What is to be read, all checked; works before the first step as well."""
        check_module(model)
        optimizer = unwrapped(optimizer)
        kind = kind_of(optimizer)
        likelihood_of(optimizer, self.likelihood)
        parameters = trainable(model)
        _check_owner(optimizer, parameters)
        scale = loss_scale(optimizer, self.num_data, self.reduction, self.training_batch_size)
        root = _root(optimizer, self.second_moment, self.training_batch_size, self.num_data)
        needed = not (self.as_kept or kind.is_identity)
        given = (self.prior_precision, scale, self.num_data, needed)
        prior = prior_of(optimizer, parameters, *given)
        tolerance = chosen_tolerance(self.tolerance, model)
        read = (scale * root, prior.by_name, tolerance, self.as_kept)
        return Source(optimizer, parameters, *read), prior


def likelihood_of(optimizer: Optimizer, given: str | Likelihood) -> Likelihood:
    """The likelihood that is given, which must be that of the optimizer where it has one."""
    curvature = getattr(unwrapped(optimizer), "curvature", None)
    own = getattr(curvature, "likelihood", None)
    if is_auto(given):
        return own if isinstance(own, Likelihood) else resolve("categorical")
    chosen = resolve(given)
    if isinstance(own, Likelihood) and own.identity != chosen.identity:
        raise ModelMismatchError(
            f"the likelihood that the optimizer's curvature was made with, {own}",
            repr(chosen),
            "leave likelihood out",
        )
    return chosen


def loss_scale(
    optimizer: Optimizer, num_data: int, reduction: str, batch_size: int | None
) -> float:
    """N for a loss averaged over the batch, N / batch size for a sum."""
    num_data = whole("num_data", num_data, remedy="count the training examples")
    own = {group["num_data"] for group in optimizer.param_groups if "num_data" in group}
    if own and own != {num_data}:
        raise ArgumentError(
            f"the num_data that the optimizer was made with, {own.pop():,}",
            f"{num_data:,}",
            "pass the same number to both",
        )
    one_of("reduction", reduction, ("mean", "sum"), "see your loss function")
    if reduction == "mean":
        return float(num_data)
    if takes_mean_loss(optimizer):
        raise ArgumentError(
            f'reduction="mean" with {type(optimizer).__name__}, whose equations are those of the '
            "mean loss",
            '"sum"',
            "train with the mean loss of a batch",
        )
    return num_data / _checked_batch_size(batch_size, num_data, 'reduction="sum"')


def _root(optimizer: Optimizer, second_moment: str, batch_size: int | None, num_data: int) -> float:
    """The square root of B where averages of squared gradients are scaled to single examples."""
    check_second_moment(second_moment)
    if second_moment == "batch":
        return 1.0
    kind = kind_of(optimizer)
    if not (kind.in_paper if second_moment == "paper" else kind.squares):
        raise ArgumentError(
            'second_moment="batch" with an optimizer that keeps no average of squared gradients',
            f'{type(optimizer).__name__} with "{second_moment}"',
            "leave second_moment out",
        )
    if second_moment == "paper":
        return 1.0
    return math.sqrt(_checked_batch_size(batch_size, num_data, 'second_moment="example"'))


def check_second_moment(second_moment: str) -> None:
    """ArgumentError for an unknown ``second_moment``."""
    one_of("second_moment", second_moment, SECOND_MOMENTS, 'use "batch"')


def _checked_batch_size(batch_size: int | None, num_data: int, purpose: str) -> int:
    remedy = f"pass training_batch_size with {purpose}"
    return whole("training_batch_size", batch_size, 1, num_data, remedy)


def _check_owner(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & {id(p) for p in parameters.values()}:
        raise ModelMismatchError(
            "an optimizer of this model's parameters",
            f"a {type(optimizer).__name__} that trains none of them",
            "pass the optimizer that was made with model.parameters()",
        )


def _settings(
    optimizer: Optimizer, prior: Prior, reduction: str, batch_size: int | None
) -> dict[str, Any]:
    """The settings that go into the provenance of every result."""
    settings: dict[str, Any] = {
        "method": "optimizer",
        "optimizer": type(optimizer).__name__,
        "prior_precision": dict(prior.by_name) if prior.differs else prior.mean({}),
        "prior_from": prior.source,
        "reduction": reduction,
        "training_batch_size": batch_size,
    }
    if isinstance(optimizer, BayesianOptimizer):
        settings["curvature"] = repr(optimizer.curvature)
    return settings


def _facts(optimizer: Optimizer) -> dict[str, Any]:
    """What the precision is made of.

    Every example's own Hessian is in it where nothing of earlier steps is left and nothing was
    sampled, as after a step of Newton's method on all data.
    """
    if not isinstance(optimizer, BayesianOptimizer):
        return {"curvature": Curvature.OPTIMIZER}
    kind: Curvature = getattr(optimizer.curvature, "kind", Curvature.OPTIMIZER)
    fresh = all(group["precision_lr"] == 1 for group in optimizer.param_groups)
    whole = fresh and not optimizer.num_samples and isinstance(optimizer.structure, FullMatrix)
    return {
        "curvature": kind,
        "exact": kind is Curvature.HESSIAN and whole,
    }


@dataclass(frozen=True)
class Prior:
    """delta of every parameter that the optimizer trains, and where it comes from."""

    by_name: Mapping[str, float]
    source: str

    @property
    def differs(self) -> bool:
        """Whether parameters have different ones."""
        return len(set(self.by_name.values())) > 1

    def mean(self, parameters: Mapping[str, Tensor]) -> float:
        """delta; where it differs, its mean over the parameters' entries."""
        if not self.differs:
            return next(iter(self.by_name.values()))
        total = sum(value * parameters[name].numel() for name, value in self.by_name.items())
        return total / count(parameters[name] for name in self.by_name)


def prior_of(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    given: float | str,
    scale: float,
    num_data: int,
    needed: bool = True,
) -> Prior:
    """The prior that is given, or else the one that the groups' weight decays stand for.

    Args:
        optimizer: whose groups are read.
        parameters: the model's trainable ones.
        given: delta for all of them, or ``"auto"``.
        scale: N for a loss averaged over the batch, N / batch size for a sum.
        num_data: N.
        needed: whether the precision would be nothing without one.
    """
    names = {id(p): name for name, p in parameters.items()}
    found: dict[str, float] = {}
    kinds: set[str] = set()
    for group in optimizer.param_groups:
        value, kind = _of_group(optimizer, group, scale, num_data)
        mine = [names[id(p)] for p in group["params"] if id(p) in names]
        found |= dict.fromkeys(mine, value)
        kinds |= {kind} if mine else set()
    source = " and ".join(sorted(kinds))
    if not is_auto(given):
        return _replaced(found, source, check_prior_precision(given))
    if (needed and not max(found.values()) > 0) or min(found.values()) < 0:
        raise ArgumentError(
            "a prior_precision, or a positive weight decay to take it from",
            f"prior precisions {sorted(set(found.values()))} from the weight decays",
            "pass prior_precision (num_data times the weight decay of the mean loss)",
        )
    return Prior(found, source)


def _of_group(
    optimizer: Optimizer, group: Mapping[str, Any], scale: float, num_data: int
) -> tuple[float, str]:
    if "prior_precision" in group:
        return float(group["prior_precision"]), "optimizer"
    decay = weight_decay_of(optimizer, group)
    if "ess" in group:
        return float(group["ess"]) * decay, "ess times weight decay"
    own = group.get("decoupled_weight_decay") or group.get("weight_decouple")
    if kind_of(optimizer).decoupled or own:
        return num_data * decay, "decoupled weight decay"
    return scale * decay, "weight decay"


def _replaced(found: Mapping[str, float], source: str, given: float) -> Prior:
    """The prior of the argument; our own optimizers have theirs in the precision already."""
    values = found.values()
    same = all(math.isclose(value, given, rel_tol=SAME_PRIOR) for value in values)
    if source == "optimizer" and not same:
        raise ArgumentError(
            f"the prior_precision that the optimizer was made with, {sorted(set(values))}",
            repr(given),
            "leave prior_precision out: the precision in the state contains it",
        )
    return Prior(dict.fromkeys(found, given), "argument")
