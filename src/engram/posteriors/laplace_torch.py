"""The posterior that a caller passes: one of engram's own, or a fitted laplace-torch object.

Of the latter diagonal, Kronecker and full ones are read, over all weights or the last layer.
Nothing is imported from that library: its object is read. There the precision is the curvature of
the sum of losses plus the prior, as here; a bias has a block of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engram.core.parameters import Layout, trainable
from engram.curvature.kinds import Curvature
from engram.errors import PosteriorError
from engram.likelihoods import Categorical, Gaussian, Likelihood
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.posteriors.gaussian import Posterior

BACKENDS = {"GGN": Curvature.GGN, "EF": Curvature.EMPIRICAL, "Hessian": Curvature.HESSIAN}


def is_laplace_torch(candidate: Any) -> bool:
    """Whether this is an object of that library, without importing it."""
    return any(base.__module__.split(".")[0] == "laplace" for base in type(candidate).__mro__)


def from_laplace_torch(fitted: Any, model: nn.Module) -> Posterior:
    """Read mean and precision off a fitted object.

    Args:
        fitted: after its ``fit``; a ``diag``, ``kron`` or ``full`` Hessian structure over ``all``
            weights or the ``last_layer``.
        model: the model it was fitted on; parameters are matched by name.
    """
    weights, structure = getattr(fitted, "_key", (None, None))
    if weights not in ("all", "last_layer") or structure not in ("diag", "kron", "full"):
        raise PosteriorError(
            "a laplace-torch object with diag, kron or full over all weights or the last layer",
            type(fitted).__name__,
            "fit one of those, or use engram.laplace",
        )
    if not getattr(fitted, "n_data", 0):
        raise PosteriorError(
            "a fitted laplace-torch object", "one without data", "call its fit(loader) first"
        )
    if float(getattr(fitted, "temperature", 1.0)) != 1.0:
        raise PosteriorError(
            "temperature 1", f"temperature {fitted.temperature}", "temper the likelihood instead"
        )
    names = _names(fitted, weights)
    mean = {name: p.detach().clone() for name, p in trainable(model).items()}
    _check_mean(fitted, mean, names)
    layout = Layout.of({name: mean[name] for name in names})
    blocks = _blocks(fitted.posterior_precision, structure, layout)
    return Posterior(
        {"diag": "diagonal", "kron": "kronecker", "full": "full"}[structure]
        if weights == "all"
        else "last_layer",
        mean,
        blocks,
        float(torch.as_tensor(fitted.prior_precision).float().mean()),
        int(fitted.n_data),
        {"method": "laplace-torch", "class": type(fitted).__name__},
        **_facts(fitted, structure),
    )


def _facts(fitted: Any, structure: str) -> dict[str, Any]:
    """What the precision is made of, by the name of the library's backend, and the likelihood."""
    backend = getattr(fitted, "_backend_cls", type(None)).__name__
    kinds = [kind for ending, kind in BACKENDS.items() if backend.endswith(ending)]
    curvature = kinds[0] if kinds else Curvature.GGN
    exact = curvature is Curvature.HESSIAN and structure == "full"
    return {"curvature": curvature, "exact": exact, "likelihood": _likelihood(fitted)}


def _likelihood(fitted: Any) -> Likelihood:
    """Its own: softmax for a classification, Gaussian noise of its size for a regression."""
    if fitted.likelihood == "classification":
        return Categorical()
    if fitted.likelihood == "regression":
        return Gaussian(float(fitted.sigma_noise) ** 2)
    raise PosteriorError(
        "a laplace-torch object for classification or regression",
        f"one for {fitted.likelihood}",
        "use engram.laplace with likelihood=",
    )


def _names(fitted: Any, weights: str) -> list[str]:
    if weights == "all":
        return [n for n, p in fitted.model.named_parameters() if p.requires_grad]
    prefix = fitted.model._last_layer_name
    local = fitted.model.last_layer.named_parameters()
    return [f"{prefix}.{n}" if prefix else n for n, _ in local]


def _check_mean(fitted: Any, mean: dict[str, Tensor], names: list[str]) -> None:
    missing = [name for name in names if name not in mean]
    if not missing:
        flat = torch.cat([mean[name].flatten() for name in names])
        theirs = fitted.mean.detach().to(flat)
        if theirs.shape == flat.shape and torch.allclose(theirs, flat):
            return
    raise PosteriorError(
        "a laplace-torch object fitted on this model at its present weights",
        f"other parameters ({missing[0]!r} is missing)" if missing else "other weights",
        "fit it again on the model that you pass",
    )


def _blocks(precision: Any, structure: str, layout: Layout) -> tuple[Block, ...]:
    if structure == "full":
        return (DenseBlock.factorise(layout, precision.detach()),)
    if structure == "diag":
        parts = layout.unflatten(precision.detach())
        return tuple(DiagonalBlock.of(name, part) for name, part in parts.items())
    blocks: list[Block] = []
    for name, shape, vectors, values, delta in zip(
        layout.names,
        layout.shapes,
        precision.eigenvectors,
        precision.eigenvalues,
        precision.deltas,
        strict=True,
    ):
        blocks.append(_kronecker_block(name, shape, vectors, values, delta))
    return tuple(blocks)


def _kronecker_block(
    name: str, shape: torch.Size, vectors: Any, values: Any, delta: Tensor
) -> KroneckerBlock:
    """Two factors for a weight; one, over the rows, for a bias."""
    layout = Layout((name,), (shape,))
    rows = vectors[0].detach()[None]
    if len(vectors) == 1:
        eigenvalues = values[0].detach().reshape(1, -1, 1) + delta
        return KroneckerBlock(layout, eigenvalues, rows, None)
    eigenvalues = torch.outer(values[0].detach(), values[1].detach())[None] + delta
    return KroneckerBlock(layout, eigenvalues, rows, vectors[1].detach()[None])


def as_posterior(posterior: Any, model: nn.Module) -> Posterior:
    """The posterior itself, or one read off a fitted laplace-torch object, at these weights."""
    if is_laplace_torch(posterior):
        posterior = from_laplace_torch(posterior, model)
    if isinstance(posterior, Posterior):
        posterior.check_model(model)
        return posterior
    raise PosteriorError(
        "a Posterior, or a fitted laplace-torch object",
        type(posterior).__name__,
        "fit one with engram.laplace(model, data, ...)",
    )
