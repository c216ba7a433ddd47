"""Encoder-decoders of transformers, tiny and with random weights."""

import pytest
import torch
from torch.nn import functional

import engram
from fitted import assert_close

transformers = pytest.importorskip("transformers")
IDS = torch.randint(1, 50, (5, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[::2, 4:] = 0
LABELS = torch.randint(1, 50, (5, 4), generator=torch.Generator().manual_seed(1))
LABELS[1, 2:] = -100
TOKENS = engram.likelihoods.Tokens(shift=False)


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))
    }
    config = transformers.BartConfig(vocab_size=50, d_model=8, max_position_embeddings=16, **sides)
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_the_losses_are_those_of_training(make, batch_size):
    torch.manual_seed(1)
    model = make().double().eval()
    inputs = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=LABELS),
    }
    data = {**inputs, "labels": LABELS}
    fitted = engram.laplace(
        model, data, likelihood=TOKENS, structure="kronecker", progress=False, prior_precision=1.0
    )
    found = engram.sensitivities(model, data, fitted, progress=False, batch_size=batch_size)
    logits = model(input_ids=IDS, attention_mask=MASK, labels=LABELS).logits
    losses = functional.cross_entropy(logits.mT, LABELS, reduction="none").sum(1)
    assert_close(found.loss, losses.detach(), 1e-9)
    assert set(found.coverage.values()) == {"rule"}


@pytest.mark.parametrize("make", [t5, bart])
def test_without_inputs_of_the_decoder_it_is_told_what_to_add(make):
    data = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    with pytest.raises(engram.errors.DataError, match="prepare_decoder_input_ids_from_labels"):
        engram.laplace(make(), data, likelihood=TOKENS, progress=False)
