"""The Bayesian learning rule: families against torch's, conjugate models exact, a binary net."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, distributions
from torch.nn import functional

from engram import families
from engram.errors import ArgumentError, PosteriorError
from engram.families import exponential
from engram.families.learning_rule import ExactLosses, LearningRule, MeanLosses, SampledLosses

torch_of = {
    "gaussian": lambda n: distributions.MultivariateNormal(
        torch.linalg.solve(-2 * n["quadratic"], n["linear"]), precision_matrix=-2 * n["quadratic"]
    ),
    "categorical": lambda n: distributions.Categorical(
        logits=torch.cat([n["logits"], torch.zeros(1).double()])
    ),
    "beta": lambda n: distributions.Beta(n["log"] + 1, n["log_rest"] + 1),
    "gamma": lambda n: distributions.Gamma(n["log"] + 1, -n["linear"]),
    "wishart": lambda n: distributions.Wishart(
        2 * n["log_det"] + 3, precision_matrix=-2 * n["linear"]
    ),
}


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


MATRIX = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
CASES = {
    "gaussian": (
        exponential.Gaussian(2),
        {"linear": torch.tensor([0.3, -1.0]).double(), "quadratic": -0.5 * MATRIX},
    ),
    "bernoulli": (exponential.Bernoulli(), {"signs": torch.tensor([0.2, -1.0, 0.0]).double()}),
    "categorical": (exponential.Categorical(3), {"logits": torch.tensor([0.4, -0.3]).double()}),
    "beta": (exponential.Beta(), {"log": number(1.5), "log_rest": number(0.3)}),
    "gamma": (exponential.Gamma(), {"log": number(2.0), "linear": number(-1.7)}),
    "wishart": (exponential.Wishart(2), {"log_det": number(1.2), "linear": -0.5 * MATRIX}),
}


@pytest.mark.parametrize("name", CASES)
def test_densities_and_entropies_are_torchs(name: str) -> None:
    family, natural = CASES[name]
    if name == "bernoulli":
        chance = torch.sigmoid(2 * natural["signs"])
        assert family.entropy(natural) == pytest.approx(
            float(distributions.Bernoulli(chance).entropy().sum())
        )
        return
    other = torch_of[name](natural)
    assert family.entropy(natural) == pytest.approx(float(other.entropy()), rel=1e-9)
    values = family.sample(natural, 5, torch.Generator().manual_seed(0))
    statistics = family.statistics(values)
    along = sum((natural[n] * t).flatten(1).sum(1) for n, t in _flat(statistics).items())
    density = along - family.log_partition(natural)
    torch.testing.assert_close(density, other.log_prob(values).double())


def _flat(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t if t.dim() > 1 else t[:, None] for name, t in statistics.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_parameter_is_the_expected_statistic(name: str) -> None:
    family, natural = CASES[name]
    values = family.sample(natural, 40_000, torch.Generator().manual_seed(1))
    expected = family.mean_parameter(natural)
    for component, statistic in family.statistics(values).items():
        error = statistic.double().std(0) / 200
        assert bool(((statistic.mean(0) - expected[component]).abs() < 5 * error + 1e-12).all())


def conjugate(name: str) -> tuple[object, dict[str, Tensor], object, dict[str, Tensor]]:
    """Family, prior, losses of draws, and minus the natural parameters of the likelihoods."""
    generator = torch.Generator().manual_seed(4)
    if name == "beta":
        y = torch.tensor([1.0, 0.0, 1.0, 1.0]).double()

        def losses(theta: Tensor) -> Tensor:
            return -(y * theta[:, None].log() + (1 - y) * torch.log1p(-theta[:, None]))

        return (
            exponential.Beta(),
            {"log": number(0.5), "log_rest": number(1.0)},
            losses,
            {
                "log": -y,
                "log_rest": -(1 - y),
            },
        )
    if name == "gamma":
        y = torch.tensor([3.0, 1.0, 0.0, 2.0]).double()

        def losses(theta: Tensor) -> Tensor:
            return theta[:, None] - y * theta[:, None].log() + torch.lgamma(y + 1)

        return (
            exponential.Gamma(),
            {"log": number(1.0), "linear": number(-2.0)},
            losses,
            {
                "log": -y,
                "linear": torch.ones(4).double(),
            },
        )
    if name == "wishart":
        x = torch.randn(4, 2, generator=generator).double()
        outer = x[:, :, None] * x[:, None, :]

        def losses(theta: Tensor) -> Tensor:
            quadratic = torch.einsum("ni,sij,nj->sn", x, theta, x)
            constant = math.log(2 * math.pi)
            return 0.5 * quadratic - 0.5 * torch.logdet(theta)[:, None] + constant

        prior = {"log_det": number(1.0), "linear": -0.5 * MATRIX}
        gradients = {"log_det": -0.5 * torch.ones(4).double(), "linear": 0.5 * outer}
        return exponential.Wishart(2), prior, losses, gradients
    if name == "gaussian":
        x = torch.randn(4, 2, generator=generator).double()
        y = torch.randn(4, generator=generator).double()

        def losses(theta: Tensor) -> Tensor:
            return 0.5 * (theta @ x.T - y).square() + 0.5 * math.log(2 * math.pi)

        prior = {"linear": torch.zeros(2).double(), "quadratic": -0.5 * torch.eye(2).double()}
        gradients = {"linear": -x * y[:, None], "quadratic": 0.5 * x[:, :, None] * x[:, None, :]}
        return exponential.Gaussian(2), prior, losses, gradients
    y = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]).double()  # class evidence of two examples

    def of_class(theta: Tensor) -> Tensor:
        return -y[:, theta].log().T

    ratios = -(y[:, :-1] / y[:, -1:]).log()
    return (
        exponential.Categorical(3),
        {"logits": torch.zeros(2).double()},
        of_class,
        {"logits": ratios},
    )


@pytest.mark.parametrize("name", ["beta", "gamma", "wishart", "gaussian", "categorical"])
def test_one_step_is_bayes_rule_for_conjugate_models(name: str) -> None:
    family, prior, losses, gradients = conjugate(name)
    rule = LearningRule(family, prior, SampledLosses(losses, samples=200))
    found = rule.natural_gradients(prior)
    for component, rows in gradients.items():
        torch.testing.assert_close(found[component], rows, atol=1e-8, rtol=1e-8)
    posterior = rule.step(prior, 1.0)
    without = rule.remove(posterior, [1])
    for component, rows in gradients.items():
        whole = prior[component] - rows.sum(0)
        torch.testing.assert_close(posterior[component], whole, atol=1e-7, rtol=1e-7)
        left = whole + rows[1]
        torch.testing.assert_close(without[component], left, atol=1e-7, rtol=1e-7)
    again = rule.fit(step_size=0.5, steps=40)
    for component, value in posterior.items():
        torch.testing.assert_close(again[component], value, atol=1e-6, rtol=1e-6)


def test_the_bound_is_the_evidence_at_the_exact_posterior() -> None:
    """Beta-Bernoulli: the product of predictive probabilities."""
    family, prior, _, _ = conjugate("beta")
    a, b = float(prior["log"]) + 1, float(prior["log_rest"]) + 1

    def expected(natural: dict[str, Tensor]) -> Tensor:
        a, b = natural["log"] + 1, natural["log_rest"] + 1
        y = torch.tensor([1.0, 0.0, 1.0, 1.0]).double()
        first = torch.digamma(a) - torch.digamma(a + b)
        second = torch.digamma(b) - torch.digamma(a + b)
        return -(y * first + (1 - y) * second)

    rule = LearningRule(family, prior, ExactLosses(expected))
    posterior = rule.step(prior, 1.0)
    evidence = 0.0
    for y in (1, 0, 1, 1):
        evidence += math.log((a if y else b) / (a + b))
        a, b = a + y, b + 1 - y
    assert rule.elbo(posterior) == pytest.approx(evidence, rel=1e-10)
    assert rule.elbo(prior) < evidence
    told = families.BetaBernoulli(1.5, 2.0).fit([1, 0, 1, 1]).remove([1]).standard()
    without = rule.remove(posterior, [1])
    assert float(without["log"]) + 1 == pytest.approx(float(told["a"]))
    assert float(without["log_rest"]) + 1 == pytest.approx(float(told["b"]))


def test_a_gaussian_has_the_papers_natural_gradient() -> None:
    """(g - H m, H/2) with expected gradient and Hessian of a logistic loss, by quadrature."""
    from numpy.polynomial.hermite_e import hermegauss

    x, y = torch.tensor([[1.0], [-0.5], [2.0]]).double(), torch.tensor([1.0, 0.0, 0.0]).double()
    nodes, weights = (torch.tensor(part) for part in hermegauss(60))
    weights = weights / math.sqrt(2 * math.pi)

    def expected(natural: dict[str, Tensor]) -> Tensor:
        variance = -0.5 / natural["quadratic"][0, 0]
        theta = variance * natural["linear"][0] + variance.sqrt() * nodes
        f = x * theta
        return ((functional.softplus(f) - y[:, None] * f) * weights).sum(1)

    natural = {"linear": torch.tensor([0.8]).double(), "quadratic": torch.tensor([[-1.0]]).double()}
    family = exponential.Gaussian(1)
    rule = LearningRule(family, natural, ExactLosses(expected))
    found = rule.natural_gradients(natural)
    mean, variance = 0.4, 0.5
    p = torch.sigmoid(x * (mean + variance**0.5 * nodes))
    gradient = ((p - y[:, None]) * x * weights).sum(1)
    hessian = (p * (1 - p) * x.square() * weights).sum(1)
    torch.testing.assert_close(found["linear"][:, 0], gradient - hessian * mean)
    torch.testing.assert_close(found["quadratic"][:, 0, 0], 0.5 * hessian)

    def of_mean(mu: dict[str, Tensor]) -> Tensor:
        first = mu["linear"][0]
        theta = first + (mu["quadratic"][0, 0] - first**2).sqrt() * nodes
        f = x * theta
        return ((functional.softplus(f) - y[:, None] * f) * weights).sum(1)

    by_mean = LearningRule(family, natural, MeanLosses(of_mean))
    for component, rows in by_mean.natural_gradients(natural).items():
        torch.testing.assert_close(rows, found[component])
    assert by_mean.elbo(natural) == pytest.approx(rule.elbo(natural))


def binary_net(weights: Tensor, x: Tensor) -> Tensor:
    """Logits [S, N] of nets 2-2-1 with weights of -1 and 1 [S, 6]."""
    hidden = torch.tanh(torch.einsum("nd,shd->snh", x, weights[:, :4].reshape(-1, 2, 2)))
    return torch.einsum("snh,sh->sn", hidden, weights[:, 4:])


def test_binary_weights_of_a_net() -> None:
    """The rule at every state of the weights; leaving an example out against running it again."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator).double()
    truth = torch.tensor([[1.0, 1.0, 1.0, -1.0, 1.0, 1.0]]).double()
    y = (binary_net(truth, x)[0] > 0).double()
    y[0] = 1 - y[0]
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6))).double()
    logits = binary_net(states, x)
    table = functional.softplus(logits) - y * logits  # losses of every state, [64, N]

    def expected(natural: dict[str, Tensor]) -> Tensor:
        share = torch.softmax(states @ natural["signs"], 0)
        return share @ table

    prior = {"signs": 0.5 * truth[0]}  # of no sign alike: swapping the hidden units matters
    family = exponential.Bernoulli()
    rule = LearningRule(family, prior, ExactLosses(expected))
    posterior = rule.fit(step_size=0.5, steps=50)
    gradients = rule.natural_gradients(posterior)["signs"]
    stationary = prior["signs"] - gradients.sum(0)
    torch.testing.assert_close(posterior["signs"], stationary, atol=1e-5, rtol=1e-5)
    estimates, truths, losses = [], [], []
    for index in range(12):
        kept = [i for i in range(12) if i != index]
        other = ExactLosses(lambda n, kept=kept: expected(n)[kept])
        again = LearningRule(family, prior, other).fit(posterior, step_size=0.5, steps=30)
        without = rule.remove(posterior, [index])
        estimates.append(without["signs"] - posterior["signs"])
        truths.append(again["signs"] - posterior["signs"])
        losses.append([float(expected(q)[index]) for q in (without, again)])
    found, true = torch.stack(estimates).flatten(), torch.stack(truths).flatten()
    assert torch.corrcoef(torch.stack([found, true]))[0, 1] > 0.8
    rises = torch.tensor(losses).double() - expected(posterior)[:, None]
    assert torch.corrcoef(rises.T)[0, 1] > 0.95
    sampled = SampledLosses(lambda w: _losses(w, x, y), samples=4000)
    by_draws = LearningRule(family, prior, sampled).natural_gradients(posterior)["signs"]
    together = torch.stack([by_draws.flatten(), gradients.flatten()])
    assert torch.corrcoef(together)[0, 1] > 0.9


def _losses(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    logits = binary_net(weights, x)
    return functional.softplus(logits) - y * logits


def test_what_is_no_distribution_is_refused() -> None:
    family, prior, losses, _ = conjugate("beta")
    rule = LearningRule(family, prior, SampledLosses(losses, samples=50))
    with pytest.raises(PosteriorError, match="a proper Beta"):
        rule.remove(prior, [0, 2, 3], weights=[3.0, 3.0, 3.0])
    with pytest.raises(ArgumentError, match="more samples than the 2 entries"):
        LearningRule(family, prior, SampledLosses(losses, samples=2)).step(prior, 1.0)
    with pytest.raises(ArgumentError, match=r"shape \[50, N\]"):
        LearningRule(family, prior, SampledLosses(lambda t: t, samples=50)).step(prior, 1.0)
    for name, natural in {
        "gaussian": {"linear": torch.zeros(2).double(), "quadratic": MATRIX},
        "gamma": {"log": number(-2.0), "linear": number(-1.0)},
        "wishart": {"log_det": number(-3.0), "linear": -MATRIX},
    }.items():
        with pytest.raises(PosteriorError, match="a proper"):
            CASES[name][0].check(natural)
