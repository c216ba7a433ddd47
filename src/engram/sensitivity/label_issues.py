"""Labels that are likely to be wrong: those that the other examples contradict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.sensitivity.result import Result, check_result
from engram.trust.aspects import LEVELS, UNRELIABLE

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 1e4  # nats, in place of an infinite loss: sums with it stay numbers


def suspicion(loo_loss: Tensor, prequential: Tensor) -> Tensor:
    r"""How far the others contradict an example's label, in nats, [N].

    .. math:: -\log \tfrac12 \bigl( e^{-\ell_i(f_i + \hat d_i)} + e^{-\bar\ell_i} \bigr)

    The loss under the mean of two predictions. The first is the leave-one-out one at the end, an
    estimate. The second is what the training itself found, in the mean over its steps with the
    example just before each: measured, but at weights of the past, the later of which had seen the
    example before. Their errors are of different kinds, and where one of them gives a label no
    chance at all the other still has a say (docs/results/wrong-labels.md). Where nothing was
    recorded, it is the first alone.

    Args:
        loo_loss: of every example, [N].
        prequential: the mean loss before its visits, NaN where it is not known, [N].

    Example:
        >>> import torch
        >>> suspicion(torch.tensor([1.0, 3.0]), torch.tensor([1.0, torch.nan]))
        tensor([1., 3.])
    """
    both = math.log(2) - torch.logaddexp(-loo_loss, -prequential)
    return torch.where(prequential.isfinite(), both, loo_loss)


def weighed(losses: Sequence[Tensor], guess: float) -> Tensor:
    r"""The loss under the mean of several predictions, each with the weight of what it knows, [N].

    .. math:: -\log \sum_k w_k e^{-\ell_{ki}}, \qquad w_k \propto 1 - \bar\ell_k / H

    A prediction whose mean loss is no less than that of guessing by the classes' shares, H, has no
    weight: losses before the visits of a net that had hardly begun to learn, say, or estimates
    that are out of all proportion. Where none knows anything all have the same.

    Args:
        losses: of every example, NaN where one is not known, [N] each.
        guess: H.

    Example:
        >>> weighed([torch.tensor([1.0, 1.0]), torch.tensor([0.0, 8.0])], 2.0)
        tensor([1., 1.])
    """
    stacked = torch.stack(list(losses))
    known = ~stacked.isnan()
    means = torch.where(known, stacked, 0.0).sum(1) / known.sum(1).clamp(min=1)
    skill = (1 - means / guess).clamp(min=0) * known.any(1)
    weights = (skill if bool((skill > 0).any()) else torch.ones_like(skill))[:, None] * known
    chances = (weights.log() - torch.where(known, stacked, 0.0)).logsumexp(0)
    return weights.sum(0).log() - chances


def label_issues(result: Result, count: int | None = None) -> pd.DataFrame:
    r"""The examples by how far the others contradict their label, likeliest errors first.

    .. math:: \ell_i(f_i + \hat d_i) = -\log p_{\setminus i}(y_i)

    is an example's loss under the model without it: its own label no longer speaks for itself.
    Where the training was recorded with its visits, this and the loss just before each visit rank
    the examples together (:func:`suspicion`). Where the verdict is "unreliable", the loss with the
    example joins them, and each counts by what it knows (:func:`weighed`).

    Args:
        result: of a classifier.
        count: how many rows; all examples if not given.

    Returns:
        One row per example, indexed by its position in the data and sorted by ``suspicion``:
        ``given``, the label; ``predicted``, the likeliest class under leave-one-out;
        ``loo_probability``, that of the given label; ``contradicted``, whether the two differ;
        ``loss``, ``loo_loss``, and ``prequential`` where it was recorded. With weights of classes
        or examples in the loss, sort by ``loo_probability`` to compare labels of different weight.

    Example:
        >>> import torch
        >>> import engram
        >>> x = torch.tensor([[-2.0], [-1.5], [-1.0], [1.0], [1.5], [2.0]])
        >>> y = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0])  # the last label is wrong
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> torch.nn.init.constant_(model.weight, 0.6).requires_grad
        True
        >>> fitted = engram.laplace(model, (x, y), likelihood="bernoulli", prior_precision=1.0)
        >>> found = label_issues(engram.sensitivities(model, (x, y), fitted), count=1)
        >>> found[["given", "predicted", "contradicted"]]
                 given  predicted  contradicted
        example
        5            0          1          True
    """
    import pandas as pd

    check_result(result)
    labels, left_out = result.labels, result.loo_probabilities
    given = left_out.gather(1, labels[:, None])[:, 0]
    predicted, before = left_out.argmax(1), result.prequential.to(result.loo_loss.dtype)
    frame = pd.DataFrame(
        {
            "given": labels.numpy(),
            "predicted": predicted.numpy(),
            "contradicted": (predicted != labels).numpy(),
            "loo_probability": given.numpy(),
            "loss": result.loss.numpy(),
            "loo_loss": result.loo_loss.numpy(),
            **({"prequential": before.numpy()} if bool(before.isfinite().any()) else {}),
            "suspicion": _suspicion(result, before).numpy(),
        },
        index=pd.Index(result.indices.numpy(), name="example"),
    ).sort_values("suspicion", ascending=False, kind="stable")
    return frame if count is None else frame.head(whole("count", count, remedy="use count=20"))


def _suspicion(result: Result, before: Tensor) -> Tensor:
    """By both losses; by all that is known, weighed, where the estimate is not to be relied on."""
    if result.verdict.level != LEVELS[UNRELIABLE]:
        return suspicion(result.loo_loss, before)
    shares = result.labels.bincount().to(result.loss) / len(result.labels)
    guess = float(-(shares * shares.clamp(min=1e-12).log()).sum())
    if not guess > 0:
        return suspicion(result.loo_loss, before)
    known = result.loo_loss.nan_to_num(nan=math.nan, posinf=LARGEST)
    return weighed([known, before, result.loss], guess)
