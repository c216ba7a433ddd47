r"""A posterior scaled so that its sensitivities have the right size, not only the right order.

It is scaled by traces of the exact inverse curvature, which random probes of the data's own
gradients give. With random signs :math:`s_i` the probe :math:`g = \sum_i s_i \nabla \ell_i` has the
covariance :math:`F = \sum_i \nabla \ell_i \nabla \ell_i'`, so that

.. math:: \mathbb{E}\, g' S^{-1} g = \mathrm{tr}(S^{-1} F) = \sum_i e_i' V_i e_i

To first order this is the sum of all leave-one-out loss increases. With a root of
:math:`\Lambda_i` and a sign for each of its columns in place of :math:`e_i` it is the sum of the
leverages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, fraction, one_of, seed_number, whole
from engram.core.data.batches import Data, call
from engram.core.dtypes import wide
from engram.core.memory import backing_off
from engram.core.parameters import Layout, trainable
from engram.curvature.batched_gradients import many_gradients
from engram.curvature.operators import CurvatureOperator, exact_curvature
from engram.engine.session import Observed, Session, session
from engram.errors import NonFiniteError, PosteriorError
from engram.likelihoods import Likelihood
from engram.linalg.cg import Limits, conjugate_gradients
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior

# Products with the exact curvature, a pass over the data each; unsolved systems are told by their
# residual
LARGEST_ITERATION = 500


@backing_off
def calibrate(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    match: str = "errors",
    curvature: str = "hessian",
    probes: int = 10,
    relative_residual: float = 0.05,
    batch_size: int | str = AUTO,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    r"""Scale a posterior's precision so that it agrees with the exact curvature in one trace.

    .. math:: S \leftarrow c\, S, \qquad
        c = \frac{\mathrm{tr}(S^{-1} F)}{\mathrm{tr}((H + \delta)^{-1} F)}, \qquad
        F = \sum_i \nabla \ell_i \nabla \ell_i'

    :math:`\mathrm{tr}(S^{-1} F) = \sum_i e_i' V_i e_i` is to first order the sum of all
    leave-one-out loss increases, so that after the call their mean has the size that the exact
    curvature H gives it. Use the scaled posterior with ``estimator="corrected"``.

    Args:
        model: trained to a minimum; it is not changed.
        data: the training data.
        posterior: of any structure, also one read off an optimizer.
        match: ``errors`` for the trace above; ``leverages`` for the sum of the leverages, with the
            Gauss-Newton matrix in place of F.
        curvature: ``hessian`` or ``ggn``, taken as exact. The Hessian is what decides where
            training again ends; the Gauss-Newton matrix is positive definite anywhere.
        probes: random vectors; the standard error falls with their root.
        relative_residual: of the solves.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        seed: of the probes.
        progress: show a bar when it takes longer than a few seconds.

    Returns:
        The scaled posterior. Its ``settings["calibration"]`` has the scale, the trace, their
        standard errors and the products with the exact curvature that it took, each of them as
        dear as a gradient and a half over all data.

    Example:
        The full Gauss-Newton posterior of a linear model is exact already:

        >>> import torch
        >>> from engram import laplace
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        >>> posterior = laplace(model, data, structure="full", prior_precision=1.0)
        >>> exact = calibrate(model, data, posterior, relative_residual=1e-4)
        >>> round(exact.settings["calibration"]["scale"], 3)
        1.0

    Reference:
        K. Takeuchi's information criterion has the same trace as its penalty.
    """
    check_match(match)
    probes = whole("number of probes", probes, 2, MANY, "use probes=10")
    wanted = fraction("relative_residual", relative_residual, "use relative_residual=0.05")
    seed = seed_number(seed)
    posterior = as_posterior(posterior, model)
    if posterior.stopped:
        raise PosteriorError(
            "a posterior as at a minimum, which the exact curvature can be compared with",
            f"that of a training that was stopped, {posterior!r}",
            "use it as it is: its size is that of the training time",
        )
    layout = posterior.layout
    with session(model, data, posterior.known_likelihood, batch_size, progress) as opened:
        prior = posterior.prior_vector
        exact = exact_curvature(curvature, opened, layout, prior)
        vectors = probe_vectors(opened, layout, match, probes, seed)
        if not vectors.isfinite().all():
            raise NonFiniteError(
                "finite gradients", "an overflow in their sum", "scale the inputs of the model"
            )
        if not (vectors != 0).any(1).all():
            raise PosteriorError(
                "gradients that are not all zero",
                "a model without errors on this data, or outputs that no parameter moves",
                "check the data and the trainable parameters",
            )
        exact_forms, fitted_forms, residual = quadratic_forms(exact, posterior, vectors, wanted)
        total = fitted_trace(opened, posterior, match)
        traces = Traces(exact_forms, fitted_forms, total, exact.products, residual)
    return scaled(posterior, traces.scale[0], _record(traces, match, curvature, probes, seed))


def scaled(posterior: Posterior, scale: float, record: dict[str, Any]) -> Posterior:
    """The posterior with precision scale times S; the prior that the model was trained with stays.

    A posterior that was scaled before carries the product of the scales. No example's own Hessian
    is in a scaled precision as it stands.
    """
    total = scale * posterior.scale
    settings = {**posterior.settings, "calibration": {**record, "total_scale": total}}
    blocks = tuple(block.scaled(scale) for block in posterior.blocks)
    return replace(posterior, blocks=blocks, settings=settings, scale=total, exact=False)


def _record(traces: Traces, match: str, curvature: str, probes: int, seed: int) -> dict[str, Any]:
    scale, scale_error = traces.scale
    trace, trace_error = traces.trace
    return {
        "match": match,
        "curvature": curvature,
        "scale": scale,
        "scale_error": scale_error,
        "trace": trace,
        "trace_error": trace_error,
        "probes": probes,
        "products": traces.products,
        "residual": traces.residual,
        "seed": seed,
    }


@dataclass(frozen=True)
class Traces:
    """g' S^-1 g of every probe, with the exact precision and with the fitted one.

    Args:
        exact, fitted: [M].
        fitted_total: the fitted precision's trace itself, which needs no probes.
        products: products with the exact curvature that it took.
        residual: the largest relative residual of the solves.
    """

    exact: Tensor
    fitted: Tensor
    fitted_total: float
    products: int
    residual: float

    @property
    def trace(self) -> tuple[float, float]:
        """The exact trace and its standard error.

        Either the probes' mean, or the fitted trace times the probes' ratio of exact to fitted, in
        which their noise cancels as far as the two precisions agree: whichever errs less.
        """
        ratio = float(self.exact.sum() / self.fitted.sum())
        shared = ratio * self.fitted_total
        plain_error = _standard_error(self.exact)
        shared_error = _standard_error(self.exact - ratio * self.fitted)
        if shared_error < plain_error:
            return shared, shared_error
        return float(self.exact.mean()), plain_error

    @property
    def scale(self) -> tuple[float, float]:
        """Fitted over exact trace, and its standard error."""
        trace, error = self.trace
        if not (0 < trace < math.inf and 0 < self.fitted_total < math.inf):
            raise NonFiniteError(
                "positive finite traces to match",
                f"{trace:.3g} of the exact curvature and {self.fitted_total:.3g} of the fitted one",
                "scale the inputs of the model, or fit the posterior on this data",
            )
        scale = self.fitted_total / trace
        return scale, scale * error / trace


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def probe_vectors(opened: Session, layout: Layout, match: str, count: int, seed: int) -> Tensor:
    """Random sums of the examples' gradients, [count, P].

    Args:
        match: ``errors`` or ``leverages``.
        seed: of the signs, which do not depend on the batch size.
    """
    parameters = [trainable(opened.model)[name] for name in layout.names]
    total = torch.zeros(count, layout.num_params).to(parameters[0])
    generator = torch.Generator().manual_seed(seed)
    signs: Tensor | None = None
    for observed in opened.passes("probes"):
        roots = MATCHED[match](observed, opened.likelihood)
        if signs is None:
            shape = (opened.batches.num_data, roots.shape[2], count)
            signs = torch.randint(2, shape, generator=generator, dtype=torch.int8) * 2 - 1
        own = signs[observed.batch.indices].to(roots)
        with torch.enable_grad():
            outputs = call(opened.model, observed.batch.inputs)
        seeds = (roots @ own).permute(2, 0, 1).contiguous()
        found = many_gradients([outputs], parameters, [seeds], count)
        total += layout.flatten(dict(zip(layout.names, found, strict=True)))
    return total


def fitted_trace(opened: Session, posterior: Posterior, match: str) -> float:
    """tr(S^-1 F) or tr(S^-1 GGN) of the fitted precision, by a pass for every root."""
    total = 0.0
    for observed in opened.passes("fitted trace"):
        roots = MATCHED[match](observed, opened.likelihood)
        for r in range(roots.shape[2]):
            root = roots[:, :, r].contiguous()
            deviation = observed.trace.deviation(root, posterior)
            total += float((wide(root) * wide(deviation)).sum())
    return total


def _errors(observed: Observed, likelihood: Likelihood) -> Tensor:
    """e_i, the root of e_i e_i', [B, K, 1]."""
    return observed.residual[:, :, None]


def _leverages(observed: Observed, likelihood: Likelihood) -> Tensor:
    """The root of Lambda_i, [B, K, R]."""
    return likelihood.hessian_factor(observed.outputs, observed.targets)


MATCHED: dict[str, Callable[[Observed, Likelihood], Tensor]] = {
    "errors": _errors,
    "leverages": _leverages,
}


def quadratic_forms(
    exact: CurvatureOperator, posterior: Posterior, probes: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, float]:
    """g' S^-1 g for every probe, exact and fitted, [M], and the largest relative residual.

    The exact ones by conjugate gradients preconditioned with the posterior.

    Args:
        exact: the curvature, with the prior.
        posterior: gives the other precision.
        probes: g, [M, P].
        tolerance: relative residual of the solves; the forms are accurate to about its square.
    """

    def precondition(vectors: Tensor) -> Tensor:
        return posterior.solve_rows(vectors, exact.layout)

    limits = Limits(tolerance, LARGEST_ITERATION)
    found = conjugate_gradients(lambda v, *_: exact @ v, probes, limits, precondition)
    if found.indefinite.any():
        raise PosteriorError(
            f"a positive-definite {exact.kind} at the model's weights",
            "a direction of negative curvature: the model is not at a minimum",
            'train further, raise the regularisation, or use curvature="ggn"',
        )
    forms = (wide(probes) * wide(found.vectors)).sum(1)
    fitted = (wide(probes) * wide(precondition(probes))).sum(1)
    return forms.cpu(), fitted.cpu(), float(found.residual.max())


def check_match(match: str) -> None:
    """ArgumentError for a name that means nothing."""
    one_of("match", match, MATCHED, 'use "errors"')
