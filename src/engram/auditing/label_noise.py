r"""How many labels are likely to be wrong, and how sure that is: a cut-off, not only a ranking.

A label that a model contradicts is wrong, or the model is, or the example could as well be of
either class. What tells them apart is how contradictions go with the model's confidence: where
classes overlap they die out as it grows, wrong labels stay. So labels are modelled as

.. math:: P(y \mid x) = \sum_k q_k(x) \, M_{ky}, \qquad
    M = \mathrm{diag}(1 - \epsilon) + \mathrm{diag}(\epsilon) \, T, \qquad
    q = \mathrm{softmax}(a \log p + b)

with the model's probabilities p of examples that it was not trained on, made as sure as they
deserve to be by a and b, and a share :math:`\epsilon_k` of the labels of class k replaced by
others, :math:`T_k`. All of it is fitted to the labels as they were given, by maximum a posteriori.
A label is then wrong with chance

.. math:: \frac{\sum_k q_k \, \epsilon_k \, T_{ky}}{P(y \mid x)}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.auditing.called import Called

MORE_LIKELY = 0.5  # chance of being wrong from which a label counts as an issue
SMALLEST = 1e-6  # probability below which none is told from none
EXPECTED = (1.0, 9.0)  # wrong and right labels that are taken for seen: little, and no rate is 0
RATES_DIFFER = 2.0  # between classes, standard deviation of their log odds
SWAPS_DIFFER = 2.0  # between pairs of classes, of their log odds
OFFSET = 1.0  # of b, nats
MOST_ENTRIES = 3_000_000  # probabilities that are fitted to; of more a sample
SHARP = (
    2.0  # a of the second start: a model that has learned from noise is less sure than it may be
)
STEPS = 200  # of L-BFGS; tens are usual


@dataclass(frozen=True, eq=False)
class LabelNoise:
    """Which labels are likely wrong.

    Args:
        chance: that each label is wrong, [N].
        is_issue: where it is more likely than not, [N].
        rate: estimated share of all labels that are wrong.
    """

    chance: Tensor
    is_issue: Tensor
    rate: float

    @classmethod
    def of(cls, chance: Tensor, rate: float) -> LabelNoise:
        """With the labels that are more likely wrong than right."""
        return cls(chance, chance > MORE_LIKELY, rate)

    @property
    def count(self) -> int:
        """Labels that are likely wrong."""
        return int(self.is_issue.sum())

    @property
    def called(self) -> Called:
        """How many of those are wrong, as far as one can know."""
        return Called.by(self.chance[self.is_issue])


def blended(left_out: Tensor, heard: Tensor | None) -> Tensor:
    r"""Probabilities without the example, from both of what is known of them, [N, C].

    .. math:: q \propto \sqrt{p_{\setminus i} \cdot \bar p_i}

    Leave-one-out probabilities overshoot where an example was learned by heart, and those at the
    example's visits lag behind, as it was learned from meanwhile: the geometric mean does neither.

    Args:
        left_out: by leave-one-out.
        heard: mean over the visits of the example in training; None where none were recorded.
    """
    p = left_out.double().clamp(min=SMALLEST)
    if heard is not None:
        q = heard.double().clamp(min=SMALLEST)
        p = torch.where(q.isfinite(), (p * q).sqrt(), p)
    return p / p.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """How labels come about, by a model's probabilities.

    Args:
        log_scale: log a, [].
        offset: b, [C].
        base: log odds of a wrong label, of all classes together, [].
        rates: what those of each class add, [C].
        swaps: log odds of which label stands in place of which, [C, C].
    """

    log_scale: Tensor
    offset: Tensor
    base: Tensor
    rates: Tensor
    swaps: Tensor

    @classmethod
    def fitted(cls, probabilities: Tensor, labels: Tensor) -> NoiseModel:
        """To labels as they were given.

        Args:
            probabilities: of examples that their model was not trained on, [N, C].
            labels: [N].
        """
        classes = probabilities.shape[1]
        zeros = torch.zeros(classes, dtype=torch.float64)
        usual = torch.tensor(math.log(EXPECTED[0] / EXPECTED[1]), dtype=torch.float64)
        first = cls(zeros.sum(), zeros, usual, zeros, torch.zeros(classes, classes).double())
        # A model that has learned the noise explains it without any: that is a minimum of its own.
        # So wrong labels are also fitted by first holding how many there are
        sharp = replace(first, log_scale=torch.tensor(SHARP, dtype=torch.float64).log())
        held = sharp.refitted(probabilities, labels, ("log_scale", "offset", "swaps"))
        everything = tuple(vars(first))
        found = [one.refitted(probabilities, labels, everything) for one in (first, held)]
        return min(found, key=lambda one: float(one.loss(_logs(probabilities), labels)))

    def refitted(self, probabilities: Tensor, labels: Tensor, names: tuple[str, ...]) -> NoiseModel:
        """The same with some of its parts fitted."""
        most = max(1, MOST_ENTRIES // probabilities.shape[1])
        some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:most]
        logs, given = _logs(probabilities[some]), labels[some]
        parts = {name: getattr(self, name).clone().requires_grad_() for name in names}
        optimizer = torch.optim.LBFGS(
            list(parts.values()), max_iter=STEPS, line_search_fn="strong_wolfe"
        )
        present = replace(self, **parts)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = present.loss(logs, given)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return replace(self, **{name: part.detach() for name, part in parts.items()})

    def loss(self, logs: Tensor, labels: Tensor) -> Tensor:
        """What is minimised: minus the log of the posterior, up to a constant."""
        wrong, right = self.joint(logs, labels)
        return self.penalty() - (wrong + right).clamp(min=1e-12).log().sum()

    def penalty(self) -> Tensor:
        """Minus the log of the prior."""
        log_odds = torch.nn.functional.logsigmoid
        wrong, right = EXPECTED
        spread = (self.rates / RATES_DIFFER).square().sum()
        spread = spread + (self.offset / OFFSET).square().sum()
        spread = spread + (self.swaps / SWAPS_DIFFER).square().sum()
        return spread / 2 - wrong * log_odds(self.base) - right * log_odds(-self.base)

    def clean(self, logs: Tensor) -> Tensor:
        """q, the probabilities of right labels, [N, C]."""
        return (self.log_scale.exp() * logs + self.offset).softmax(1)

    def joint(self, logs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of each label and its being wrong, and of its being right, [N] each."""
        q, rate = self.clean(logs), torch.sigmoid(self.base + self.rates)
        itself = torch.eye(len(rate), dtype=torch.bool)
        swaps = self.swaps.masked_fill(itself, -math.inf).softmax(1)
        wrong = (q * rate * swaps[:, labels].T).sum(1)
        return wrong, q.gather(1, labels[:, None])[:, 0] * (1 - rate)[labels]

    def noise(self, probabilities: Tensor, labels: Tensor) -> LabelNoise:
        """What comes of it for labels with these probabilities."""
        logs = _logs(probabilities)
        wrong, right = self.joint(logs, labels)
        rate = (self.clean(logs) * torch.sigmoid(self.base + self.rates)).sum(1).mean()
        return LabelNoise.of(wrong / (wrong + right).clamp(min=1e-12), float(rate))


def label_noise(probabilities: Tensor, labels: Tensor) -> LabelNoise:
    """Wrong labels of a classifier, from probabilities without each example.

    Args:
        probabilities: of the classes, [N, C], of a model that has not seen the labels.
        labels: as they were given, [N].

    Example:
        >>> p = torch.tensor([[0.98, 0.02]] * 50 + [[0.02, 0.98]] * 50)
        >>> y = torch.tensor([0] * 50 + [1] * 48 + [0] * 2)
        >>> label_noise(p, y).is_issue.nonzero()[:, 0]
        tensor([98, 99])
    """
    return NoiseModel.fitted(probabilities, labels).noise(probabilities, labels)


def _logs(probabilities: Tensor) -> Tensor:
    return probabilities.double().clamp(min=SMALLEST).log()


def rising(places: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """The rising function of places [M] that is nearest to values [M], at others [N]."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(out_of_bounds="clip").fit(places.numpy(), values.numpy())
    return torch.from_numpy(fitted.predict(at.numpy())).double()
