"""Stock models: what is trained where the user brings no model, by the kind of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engram.auditing.examples import Examples, Inputs, Pictures, Rows, Texts
from engram.auditing.stock.base import Stock
from engram.auditing.stock.minilm import minilm_head
from engram.auditing.stock.pictures import small_cnn
from engram.auditing.stock.rows import small_mlp
from engram.auditing.stock.texts import tfidf_head

STOCK: Mapping[type[Inputs], Callable[[Examples], Stock]] = {
    Rows: small_mlp,
    Pictures: small_cnn,
    Texts: tfidf_head,
}

# Others that are asked for by name: model="minilm"
NAMED: Mapping[str, Callable[[Examples], Stock]] = {"minilm": minilm_head}


def stock_of(examples: Examples) -> Stock:
    """The stock model for these examples, untrained."""
    return STOCK[type(examples.inputs)](examples)
