"""The Gaussian posterior N(m, S^-1): a mean, and a precision in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from engram.core.arguments import positive
from engram.core.identity.digests import joined, of_tensors
from engram.core.parameters import Layout, Named, check_finite_weights, inner, trainable
from engram.core.storage.kinds import Kind, check_that, checked, numbers, stored
from engram.core.storage.values import ADDED_LATER, init_fields, taken_apart
from engram.curvature.kinds import Curvature
from engram.errors import LikelihoodError, ModelMismatchError, PosteriorError
from engram.likelihoods import Likelihood, resolve
from engram.likelihoods.remembered import Remembered
from engram.linalg.block import Block
from engram.linalg.precision import Precision
from engram.training.segments import NamedTraining
from engram.training.training import Training

# fields that the digest is taken over, besides the tensors and the likelihood
FACTS = ("structure", "curvature", "exact", "scale", "prior_precision", "num_data", "prior_by_name")

SHORTEST = 1e-30  # training time that is told from none
SAME_PRIOR = 1e-6  # relative difference of two prior precisions that is rounding


def check_prior_precision(value: float | str) -> float:
    """Delta must be a positive number."""
    return positive(
        "prior_precision (delta of the regulariser delta/2 |theta|^2 added to the sum of the "
        "losses)",
        value,
        "use num_data times the weight decay of the mean loss",
    )


@dataclass(frozen=True)
class Posterior(Precision):
    """N(m, S^-1) over the trainable parameters of a model.

    Args:
        structure: name of the precision's structure.
        mean: the parameters it was fitted at, by name.
        blocks: the precision S, block by block; parameters in no block count as fixed.
        prior_precision: delta, which S contains; its mean over the entries where it differs.
        num_data: N, the number of examples that S sums over.
        settings: how it was made, for the record; nothing is decided by it.
        prior_by_name: delta of each parameter, where parameters have different ones.
        curvature: what S is made of besides the prior.
        exact: whether every example's own Hessian is in S as it stands, so that it can be taken
            out of it.
        prior_fitted: whether nobody gave delta, and it is the one that the weights fit best.
        scale: by which calibration has multiplied S; 1 without any.
        stopped: whether S is that of a training that was stopped, with its training time in it, and
            not that of a minimum.
        training: that its training time and prior are from; None where it was fitted as at a
            minimum, or comes from a file: it is saved by itself.
        likelihood: of the data, said once, when it was made; only remembered where it was a
            function's and the posterior comes from a file.
    """

    structure: str
    mean: Mapping[str, Tensor] = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    prior_precision: float
    num_data: int
    settings: Mapping[str, object] = field(default_factory=dict)
    prior_by_name: Mapping[str, float] = field(default_factory=dict, repr=False)
    curvature: Curvature = field(kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    likelihood: Likelihood | Remembered = field(kw_only=True, repr=False)
    prior_fitted: bool = field(default=False, kw_only=True, metadata=ADDED_LATER)
    stopped: bool = field(default=False, kw_only=True, metadata=ADDED_LATER)
    training: NamedTraining | None = field(
        default=None, kw_only=True, repr=False, metadata=ADDED_LATER
    )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over mean, precision and all facts but the record; equal for equal posteriors."""
        facts = [repr(getattr(self, name)) for name in FACTS]
        plain, tensors = taken_apart([self.mean, self.blocks])
        return joined(of_tensors(tensors), repr(plain), *facts, self.likelihood.identity).hex()

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that the precision covers."""
        return tuple(name for name in self.mean if name in self.block_of)

    @property
    def only(self) -> tuple[str, ...] | None:
        """The parameters it covers, where it holds fixed what the training moved; None else.

        What comes before the first of them can then be run without gradients.
        """
        moved = {} if self.training is None else self.training.moved
        held = [n for n in self.mean if n not in self.block_of and moved.get(n, True)]
        return self.names if held and self.names else None

    def prior_of(self, name: str) -> float:
        """delta of one parameter."""
        return self.prior_by_name.get(name, self.prior_precision)

    @property
    def layout(self) -> Layout:
        """Where the parameters that the precision covers stand in a flat vector."""
        if not self.names:
            raise PosteriorError(
                "a posterior that covers some parameters", "one without any", "fit it with laplace"
            )
        return Layout.of({name: self.mean[name] for name in self.names})

    @property
    def prior_vector(self) -> Tensor:
        """delta of every entry of the flat vector of covered parameters, [P]."""
        layout = self.layout
        parts = [
            torch.full((size,), self.prior_of(name), dtype=torch.float64)
            for name, size in zip(layout.names, layout.sizes, strict=True)
        ]
        return torch.cat(parts)

    @property
    def prior_with_time(self) -> Tensor:
        r"""delta + N / C of every entry, with the training time C where there is one, [P].

        What holds the weights of a training that was stopped where they are.
        """
        if self.training is None:
            return self.prior_vector
        times = {name: self.training.time[name] for name in self.layout.names}
        whole = {name: time.expand(self.mean[name].shape) for name, time in times.items()}
        spent = self.layout.flatten(whole).double().cpu().clamp(min=SHORTEST)
        return self.prior_vector + self.num_data / spent

    @property
    def is_dense(self) -> bool:
        """Whether every block couples everything in it."""
        return all(block.couples_all and not block.is_partial for block in self.blocks)

    @property
    def is_whole_matrix(self) -> bool:
        """Whether one block couples all parameters, so that there is no richer structure."""
        one = len(self.blocks) == 1 and self.blocks[0].couples_all
        return one and len(self.names) == len(self.mean)

    @property
    def num_params(self) -> int:
        """P, entries of the covered parameters."""
        return sum(self.mean[name].numel() for name in self.names)

    @property
    def entropy(self) -> float:
        r""":math:`\frac{P}{2} (1 + \log 2\pi) - \frac12 \log|S|`, in nats."""
        return 0.5 * (self.num_params * (1 + math.log(2 * math.pi)) - self.log_det())

    def kl(self, other: Posterior) -> float:
        r"""KL(self || other) in nats, over the parameters that both cover.

        .. math:: \frac12 \Bigl( \mathrm{tr}(S' S^{-1}) - P + \log|S| - \log|S'|
            + (m' - m)^\top S' (m' - m) \Bigr)

        Args:
            other: a posterior over the same parameters with the same blocks, for instance the one
                without some examples.
        """
        self._check_same_blocks(other)
        pairs = [(block, other.block_of[block.names[0]]) for block in self.blocks]
        trace = sum(own.trace_solve(theirs) for own, theirs in pairs)
        step = {name: other.mean[name] - self.mean[name] for name in self.names}
        moved = inner(step, other.multiply(step))
        logs = self.log_det() - other.log_det()
        return max(0.0, 0.5 * (trace - self.num_params + logs + moved))

    def _check_same_blocks(self, other: Posterior) -> None:
        def blocks(posterior: Posterior) -> set[tuple[str, ...]]:
            return {block.names for block in posterior.blocks}

        if not isinstance(other, Posterior) or blocks(self) != blocks(other):
            raise ModelMismatchError(
                f"another posterior over the same blocks of parameters, {self.structure}",
                repr(other),
                "compare posteriors of one model with one structure",
            )

    def sample(self, num: int, generator: torch.Generator | None = None) -> Named:
        """Draws from the posterior, [num, *shape] per name; fixed parameters stay at the mean."""
        draws = {name: m.expand(num, *m.shape).clone() for name, m in self.mean.items()}
        for block in self.blocks:
            noise = {
                name: torch.randn(
                    num,
                    *self.mean[name].shape,
                    generator=generator,
                    dtype=self.mean[name].dtype,
                    device=self.mean[name].device,
                )
                for name in block.names
            }
            for name, step in block.root_solve(noise).items():
                draws[name] = draws[name] + step
        return draws

    def check_model(self, model: nn.Module) -> None:
        """Raise unless this posterior belongs to the model as it is now."""
        check_finite_weights(model)
        parameters = trainable(model)
        expected = {name: tuple(p.shape) for name, p in parameters.items()}
        got = {name: tuple(m.shape) for name, m in self.mean.items()}
        if expected != got:
            name = next(n for n in expected | got if expected.get(n) != got.get(n))
            raise ModelMismatchError(
                f"a posterior over this model's trainable parameters ({name!r} has shape "
                f"{expected.get(name, 'none')})",
                f"one of another model, in which {name!r} has shape {got.get(name, 'none')}",
                "fit the posterior on the model that you pass",
            )
        for name, parameter in parameters.items():
            if parameter.dtype != self.mean[name].dtype:
                raise ModelMismatchError(
                    f"a posterior of type {parameter.dtype}, as the model's parameters",
                    f"{self.mean[name].dtype} for {name!r}",
                    "fit the posterior again after changing the model's type",
                )
            if not torch.equal(parameter.detach(), self.mean[name].to(parameter.device)):
                raise ModelMismatchError(
                    "a posterior fitted at the model's present weights",
                    f"other weights in {name!r} (another model, or trained since)",
                    "fit the posterior again after training, or restore the weights",
                )

    @property
    def known_likelihood(self) -> Likelihood:
        """The likelihood that this was fitted with; LikelihoodError where only its name is left."""
        if isinstance(self.likelihood, Remembered):
            raise LikelihoodError(
                f"the likelihood of the saved posterior, {self.likelihood}",
                "none: a function cannot be saved",
                "pass likelihood= to engram.load, made from the same function as before",
            )
        return self.likelihood

    def check_likelihood(self, given: Likelihood) -> None:
        """ModelMismatchError unless this was fitted with that likelihood."""
        fitted = self.likelihood
        if fitted is given or fitted.identity == given.identity:
            return
        text = repr(given)
        raise ModelMismatchError(
            f"the likelihood that the posterior was fitted with, {fitted}",
            f"another of that name, {text}: its code or what it uses differs"
            if text == repr(fitted)
            else text,
            "use the same one, or fit the posterior again",
        )

    def save(self, folder: str | Path) -> Path:
        """Write ``posterior.json`` and its tensors into a folder, whole; no pickle."""
        return KIND.write(self, folder)

    def with_likelihood(self, given: str | Likelihood) -> Posterior:
        """The same with the likelihood itself, where a file could only name it."""
        likelihood = resolve(given)
        self.check_likelihood(likelihood)
        return replace(self, likelihood=likelihood)

    def with_training(self, training: Training, model: nn.Module) -> Posterior:
        """The same with the record of its training, which is saved by itself.

        A loaded posterior is that of the end of training alone; with its record estimates go along
        the training again, as before it was saved.

        Args:
            training: the record, as ``engram.load`` gives it.
            model: that was trained.
        """
        if not self.stopped:
            raise PosteriorError(
                "a posterior that was fitted with training=",
                repr(self),
                "fit it with engram.laplace(model, data, training=training)",
            )
        self.check_model(model)
        return replace(self, training=training.of(model))

    @property
    def lacks_record(self) -> bool:
        """Whether it was fitted with the record of a training, and comes from a file without it."""
        return self.stopped and self.training is None

    def __repr__(self) -> str:
        facts = [self.structure, f"{self.num_params:,} parameters", f"N={self.num_data:,}"]
        fitted = " (fits the weights)" if self.prior_fitted else ""
        facts += [f"prior_precision={self.prior_precision:g}{fitted}"]
        facts += [f"curvature={self.curvature}"]
        facts += [f"likelihood={self.likelihood!r}"]
        if "training" in self.settings:
            lost = "; its record is not loaded: the end alone" if self.lacks_record else ""
            facts += [f"training={self.settings['training']}{lost}"]
        if "tolerance" in self.settings:
            facts += [f"tolerance={self.settings['tolerance']}"]
        return f"Posterior({', '.join(facts)})"


def _check(found: Posterior) -> None:
    """What must hold before anything is solved with it."""
    check_that(len(found.mean) > 0, "a mean with parameters", "none")
    check_that(len(found.blocks) > 0, "a precision with blocks", "none")
    seen: set[str] = set()
    for number, block in enumerate(found.blocks):
        _check_layout(found, block.layout, f"block {number}", seen)
        block.check(f"block {number}")
    priors = {name: found.prior_of(name) for name in (*found.mean, *found.prior_by_name)}
    unknown = [name for name in priors if name not in found.mean]
    check_that(not unknown, "priors of the mean's parameters", f"a prior of {unknown}")
    lowest, highest = min(priors.values()), max(priors.values())
    possible = 0 <= found.prior_precision < math.inf and lowest >= 0 and highest < math.inf
    check_that(possible, "prior precisions, none negative", f"{lowest:g} to {highest:g}")
    check_that(0 < found.scale < math.inf, "a positive scale", f"{found.scale:g}")
    check_that(found.num_data > 0, "a number of examples", f"{found.num_data} examples")


def _check_layout(found: Posterior, layout: Layout, where: str, seen: set[str]) -> None:
    """The parameters of a block are the mean's, each in one block."""
    same = len(layout.names) == len(layout.shapes) > 0
    check_that(same, f"names and shapes in {where}", repr(layout)[:80])
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        check_that(name in found.mean, f"parameters of the mean in {where}", repr(name))
        check_that(name not in seen, "every parameter in one block", f"{name!r} in two")
        wanted = list(found.mean[name].shape)
        check_that(list(shape) == wanted, f"the shape {wanted} of {name!r}", f"{list(shape)}")
        seen.add(name)


def _without_training(posterior: Posterior) -> dict[str, object]:
    """What is saved: the record of a training has a folder of its own."""
    return {n: value for n, value in init_fields(posterior).items() if n != "training"}


KIND = stored(
    Kind(
        "posterior",
        3,
        checked(Posterior, {"mean": numbers("...")}, _check),
        _without_training,
        completed=Posterior.with_likelihood,
        movable=True,
    )
)
