"""A posterior scaled so that its sensitivities have the right size, not only the right order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from engram.core.arguments import AUTO, MANY, fraction, seed_number, whole
from engram.core.data.batches import Data
from engram.core.errors import NonFiniteError, PosteriorError
from engram.core.memory import backing_off
from engram.curvature.operators import exact_curvature
from engram.engine.session import session
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.posteriors.trace_estimation import (
    Traces,
    check_match,
    fitted_trace,
    probe_vectors,
    quadratic_forms,
)


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
        >>> posterior = laplace(model, data, structure="full")
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
