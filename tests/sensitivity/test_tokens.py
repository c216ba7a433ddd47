"""Sensitivities of sequences against explicit Jacobians, and what a result has of them."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader

import engram
from engram.errors import DataError, LikelihoodError
from engram.likelihoods import Tokens
from fitted import assert_close

N, T, V = 6, 5, 7
IDS = torch.randint(0, V, (N, T), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone()
LABELS[::2, 3:] = -100


class Causal(nn.Module):
    """A small language model: the mean of the tokens so far, and a head that is tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.mixed = nn.Embedding(V, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids):
        tokens = self.embedding(input_ids)
        before = tokens.cumsum(1) / torch.arange(1, T + 1, dtype=tokens.dtype)[:, None]
        return self.head(torch.tanh(self.mixed(before)))


def model(tied=False):
    torch.manual_seed(1)
    return Causal(tied).double()


def dense(net, likelihood, posterior):
    """V e of every sequence, from its Jacobian and the posterior's matrix."""
    values = {name: p.detach() for name, p in net.named_parameters()}
    layout, found = posterior.layout, []
    for i in range(N):
        jacobian = jacrev(lambda p, i=i: functional_call(net, p, (IDS[i : i + 1],)).flatten())(
            values
        )
        rows = layout.flatten({n: jacobian[n] for n in layout.names})
        outputs = net(IDS[i : i + 1]).flatten(1).detach()
        error = likelihood.residual(outputs, LABELS[i : i + 1])[0]
        step = posterior.solve(layout.unflatten(error @ rows))
        found.append(rows @ layout.flatten({n: step[n][None] for n in layout.names})[0])
    return torch.stack(found)


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_losses_without_are_those_of_explicit_jacobians(structure, tied):
    net = model(tied)
    likelihood = Tokens().for_outputs(torch.Size((T, V)))
    posterior = engram.laplace(
        net, (IDS, LABELS), likelihood="tokens", structure=structure, prior_precision=2.0
    )
    result = engram.sensitivities(net, (IDS, LABELS), posterior, estimator="linear")
    outputs = net(IDS).flatten(1).detach()
    moved = outputs + dense(net, likelihood, posterior)
    assert_close(result.loss, likelihood.loss(outputs, LABELS), 1e-10)
    assert_close(result.loo_loss, likelihood.loss(moved, LABELS), 1e-9)
    change = likelihood.mean(moved) - likelihood.mean(outputs)
    assert_close(result.score, change.abs().sum(1), 1e-9)
    assert_close(result.outputs + result.deviation, likelihood.kept(moved, LABELS), 1e-9)


def fitted(net, data, **settings):
    return engram.laplace(net, data, likelihood="tokens", prior_precision=2.0, **settings)


def test_curvature_is_sampled_unless_another_is_asked_for():
    net = model()
    assert fitted(net, (IDS, LABELS), structure="kronecker").curvature == "fisher"
    assert fitted(net, (IDS, LABELS), structure="kronecker", curvature="ggn").curvature == "ggn"


def test_losses_of_tokens_and_perplexities():
    net = model()
    result = engram.sensitivities(net, (IDS, LABELS), fitted(net, (IDS, LABELS)))
    tokens = result.tokens
    assert torch.equal(tokens.loss.isnan(), tokens.loo_loss.isnan())
    assert tokens.loss.isnan().sum(1).tolist() == [3, 1] * 3  # one by the shift, two have no label
    assert_close(tokens.loo_loss.nansum(1), result.loo_loss, 1e-10)
    mean = float(result.loss.sum() / (~tokens.loss.isnan()).sum())
    frame = result.metrics()
    assert math.isclose(frame.loc["perplexity", "training"], math.exp(mean), rel_tol=1e-9)
    assert frame.loc["perplexity", "leave_one_out"] == tokens.loo_perplexity > tokens.perplexity
    assert "predicted" not in result.to_frame()


def test_a_saved_result_has_its_tokens(tmp_path):
    net = model()
    result = engram.sensitivities(net, (IDS, LABELS), fitted(net, (IDS, LABELS)))
    found = engram.load(result.save(tmp_path / "run"))
    assert_close(found.tokens.loo_loss.nansum(1), result.tokens.loo_loss.nansum(1), 1e-12)


def test_batches_of_different_length():
    """Padded by a collate_fn to the longest of their own batch."""
    lengths = [3, 5, 3, 4, 5, 4]
    rows = [(IDS[i, :n], IDS[i, :n]) for i, n in enumerate(lengths)]

    def collate(items):
        pad = nn.utils.rnn.pad_sequence
        ids = pad([x for x, _ in items], batch_first=True)
        return ids, pad([y for _, y in items], batch_first=True, padding_value=-100)

    class Short(Causal):
        def forward(self, input_ids):
            tokens = self.embedding(input_ids)
            count = torch.arange(1, tokens.shape[1] + 1, dtype=tokens.dtype)
            return self.head(torch.tanh(self.mixed(tokens.cumsum(1) / count[:, None])))

    torch.manual_seed(1)
    net = Short(False).double()
    found = []
    for size in (2, 6):
        loader = DataLoader(rows, batch_size=size, collate_fn=collate)
        posterior = fitted(net, loader, structure="diagonal", curvature="ggn")
        found.append(engram.sensitivities(net, loader, posterior))
    assert found[0].outputs.shape == found[1].outputs.shape == (6, 5)
    assert_close(found[0].loo_loss, found[1].loo_loss, 1e-9)
    assert_close(found[0].tokens.loss.nansum(1), found[1].tokens.loss.nansum(1), 1e-9)


def test_a_removal_and_influence_of_sequences():
    net = model()
    posterior = fitted(net, (IDS, LABELS), structure="full")
    removal = engram.remove(net, (IDS, LABELS), posterior, [0, 2], evaluate_on=(IDS, LABELS))
    assert removal.group.outputs.shape == (2, T)
    assert engram.influence(net, (IDS, LABELS), (IDS[:2], LABELS[:2]), posterior).shape == (N, 2)


def test_what_is_not_for_sequences_says_so():
    net = model()
    posterior = fitted(net, (IDS, LABELS), structure="full")
    result = engram.sensitivities(net, (IDS, LABELS), posterior)
    for asked in (lambda: result.loo_probabilities, lambda: engram.label_issues(result)):
        with pytest.raises(LikelihoodError, match="a classifier"):
            asked()
    with pytest.raises(LikelihoodError, match="all outputs of its examples"):
        engram.refine(net, (IDS, LABELS), result, posterior)
    with pytest.raises(DataError, match=r'shape \(N, 5, 7\).*likelihood="tokens"'):
        engram.laplace(net, (IDS, torch.zeros(N, dtype=torch.long)), prior_precision=1.0)
    plain = (torch.randn(8, 3), torch.arange(8) % 2)
    linear = nn.Linear(3, 2)
    other = engram.sensitivities(linear, plain, engram.laplace(linear, plain, prior_precision=1.0))
    with pytest.raises(LikelihoodError, match="sequences of tokens"):
        _ = other.tokens


@pytest.mark.parametrize("limits", [{"LONGEST_ROWS": V - 1}, {"WIDE_HEAD": V - 1, "WIDER": 1}])
def test_the_head_of_a_large_vocabulary_has_the_diagonal_of_its_rows(monkeypatch, limits):
    """Against the same posterior as one dense matrix for every block."""
    for name, value in limits.items():
        monkeypatch.setattr(f"engram.linalg.kronecker_factors.{name}", value)
    net = model()
    likelihood = Tokens().for_outputs(torch.Size((T, V)))
    posterior = fitted(net, (IDS, LABELS), structure="kronecker", curvature="ggn")
    block = next(b for b in posterior.blocks if "head.weight" in b.names)
    assert block.keeps_rows
    result = engram.sensitivities(net, (IDS, LABELS), posterior, estimator="linear")
    outputs = net(IDS).flatten(1).detach()
    moved = outputs + dense(net, likelihood, posterior)
    assert_close(result.loo_loss, likelihood.loss(moved, LABELS), 1e-9)
