"""The Gaussian posterior N(m, S^-1): a mean, and a precision in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import positive, usable_device
from engram.core.errors import LikelihoodError, ModelMismatchError, StorageError
from engram.core.identity.digests import joined, of_tensors
from engram.core.parameters import Named, check_finite_weights, trainable
from engram.core.storage.values import as_read, init_fields, taken_apart
from engram.curvature.kinds import Curvature
from engram.likelihoods import Likelihood
from engram.likelihoods.remembered import Remembered
from engram.linalg.block import Block
from engram.linalg.precision import Precision
from engram.posteriors.saving import checked, content_of, read, write

FACTS = ("structure", "curvature", "exact", "scale", "prior_precision", "num_data", "prior_by_name")


def check_prior_precision(value: float) -> float:
    """Delta must be a positive number."""
    return positive(
        "prior_precision (delta of the regulariser delta/2 |theta|^2 added to the sum of the "
        "losses)",
        value,
        "use num_data times the weight decay of the mean loss",
    )


def _check_numbers(posterior: Posterior) -> None:
    """StorageError unless the priors, the scale and the number of examples are possible ones."""
    unknown = [name for name in posterior.prior_by_name if name not in posterior.mean]
    priors = (posterior.prior_precision, *posterior.prior_by_name.values())
    possible = all(0 <= prior < math.inf for prior in priors) and 0 < posterior.scale < math.inf
    if unknown or posterior.num_data < 1 or not possible:
        raise StorageError(
            "prior precisions of the mean's parameters, none negative, a positive scale and a "
            "number of examples",
            f"priors from {min(priors):g}, scale {posterior.scale:g}, {posterior.num_data} examples"
            + "".join(f", a prior of {name!r}" for name in unknown),
            "fit the posterior again, and save it again",
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
        scale: by which calibration has multiplied S; 1 without any.
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

    @cached_property
    def digest(self) -> str:
        """SHA-256 over mean, precision and all facts but the record: the same for the same one."""
        facts = [repr(getattr(self, name)) for name in FACTS]
        plain, tensors = taken_apart([self.mean, self.blocks])
        return joined(of_tensors(tensors), repr(plain), *facts, self.likelihood.identity).hex()

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that the precision covers."""
        return tuple(name for name in self.mean if name in self.block_of)

    def prior_of(self, name: str) -> float:
        """delta of one parameter."""
        return self.prior_by_name.get(name, self.prior_precision)

    @property
    def is_dense(self) -> bool:
        """Whether every block couples everything in it."""
        return all(block.couples_all and not block.is_partial for block in self.blocks)

    @property
    def is_whole_matrix(self) -> bool:
        """Whether one block couples all parameters: there is no richer structure."""
        one = len(self.blocks) == 1 and self.blocks[0].couples_all
        return one and len(self.names) == len(self.mean)

    @property
    def num_params(self) -> int:
        """P, entries of the covered parameters."""
        return sum(self.mean[name].numel() for name in self.names)

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
        content = content_of(init_fields(self))
        _made(as_read(content))
        return write(folder, content)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> Posterior:
        """Read what :meth:`save` wrote; an error where it is damaged, not finite or not positive.

        Args:
            folder: that it was saved in.
            device: of the model that it is used with.
        """
        return _made(read(folder, usable_device(device)))

    def __repr__(self) -> str:
        return (
            f"Posterior({self.structure}, {self.num_params:,} parameters, N={self.num_data:,}, "
            f"prior_precision={self.prior_precision:g})"
        )


def _made(content: Any) -> Posterior:
    found = Posterior(**checked(content, Posterior))
    _check_numbers(found)
    return found
