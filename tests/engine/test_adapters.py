"""Adapters of peft beside frozen weights, against plain autograd."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import engram
from autograd_deviation import expected_deviation
from engram.errors import EngineError
from fitted import assert_close

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
IDS = torch.randint(1, 20, (5, 6), generator=torch.Generator().manual_seed(0))
Y = torch.arange(5) % 3
SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 3,
    "pad_token_id": 0,
}
ADAPTERS = {
    "lora": peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
    "dora": peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", use_dora=True),
    "ia3": peft.IA3Config(
        target_modules=["key", "output.dense"],
        feedforward_modules=["output.dense"],
        task_type="SEQ_CLS",
    ),
}


def adapted(kind):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    net = peft.get_peft_model(
        transformers.BertForSequenceClassification(config).double(), ADAPTERS[kind]
    )
    for parameter in net.parameters():
        if parameter.requires_grad:  # one of the two factors begins as zeros
            torch.nn.init.normal_(parameter, std=0.3)
    return net.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_deviations_are_those_of_the_adapter(kind):
    net, inputs = adapted(kind), {"input_ids": IDS}
    posterior = engram.laplace(net, (inputs, Y), structure="kronecker", prior_precision=1.0)
    found = engram.sensitivities(net, (inputs, Y), posterior, estimator="linear")
    assert_close(found.deviation, expected_deviation(net, inputs, Y, posterior), 1e-9)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert set(posterior.mean) == trained  # nothing is kept of the frozen base
    assert {n for n, way in found.coverage.items() if way == "frozen"}.isdisjoint(trained)


def test_adapters_that_were_merged_are_refused():
    net = adapted("lora")
    net.merge_adapter()
    with pytest.raises(EngineError, match=r"merged into its weights.*unmerge_adapter"):
        engram.laplace(net, ({"input_ids": IDS}, Y), prior_precision=1.0)
    net.unmerge_adapter()
    engram.laplace(net, ({"input_ids": IDS}, Y), structure="kronecker", prior_precision=1.0)


def test_a_base_that_is_quantised_by_a_tensor_of_its_own_is_refused():
    net = adapted("lora")
    layer = net.base_model.model.bert.pooler.dense
    own = TwoTensor(layer.weight.detach(), layer.weight.detach())
    layer.weight = torch.nn.Parameter(own, requires_grad=False)
    with pytest.raises(EngineError, match=r"pooler.*as a TwoTensor.*BitsAndBytesConfig"):
        engram.laplace(net, ({"input_ids": IDS}, Y), prior_precision=1.0)
