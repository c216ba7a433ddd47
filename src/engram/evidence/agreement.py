r"""How far the objective of the remaining data agrees with the quadratic that a step came from.

With :math:`R_i` the objective without example i, less what further training of the whole model
would bring, the step :math:`\Delta\theta_i` promises :math:`-\frac12 \nabla\ell_i' \Delta\theta_i`:

.. math:: \frac{R_i(\theta + \Delta\theta_i) - R_i(\theta) - \nabla L' \Delta\theta_i}
    {-\frac12 \nabla\ell_i' \Delta\theta_i}

is 1 where the promise is kept. Where the curvature nearly vanishes in some direction the step is
far too long, and the ratio small or negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.model import device_of
from engram.engine.session import Session
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import prior_vector
from engram.sensitivity.effects import outputs_at


class Agreement:
    """The objective at the model's weights, to compare steps with."""

    def __init__(self, opened: Session, posterior: Posterior, layout: Layout) -> None:
        self.opened, self.layout = opened, layout
        parameters = {name: trainable(opened.model)[name] for name in layout.names}
        self.start = layout.flatten({n: p.detach() for n, p in parameters.items()})
        self.prior = prior_vector(posterior, layout).to(self.start.device)
        self.gradient = wide(torch.zeros_like(self.start))
        losses = []
        for observed in opened.passes("objective"):
            pulled = opened.pull_back(observed.batch, observed.residual, parameters)
            self.gradient += wide(layout.flatten(pulled))
            losses.append(wide(observed.loss))
        self.losses = torch.cat(losses)

    def of_steps(self, chosen: Tensor, steps: Tensor, promised: Tensor) -> Tensor:
        """The ratio for every step, [M].

        Args:
            chosen: the left-out example of each, [M].
            steps: changes of the parameters, [M, P].
            promised: half of <grad loss_i, step>, [M].
        """
        ratios = []
        for i, step, half in zip(chosen.tolist(), steps, promised, strict=True):
            change = self._losses_at(self.layout.unflatten(self.start + step)) - self.losses
            change[i] = 0.0
            widened = wide(step)
            found = change.sum() + 0.5 * (self.prior * widened**2).sum() - self.gradient @ widened
            ratios.append(found / -half if half > 0 else torch.ones_like(found))
        return torch.stack(ratios)

    def _losses_at(self, parameters: Named) -> Tensor:
        model, likelihood = self.opened.model, self.opened.likelihood
        losses = []
        for batch in self.opened.batches:
            on_device = batch.to(device_of(model))
            outputs = outputs_at(model, parameters, on_device)
            targets = likelihood.prepare(outputs, on_device.targets)
            losses.append(wide(likelihood.loss(outputs, targets)))
        return torch.cat(losses)
