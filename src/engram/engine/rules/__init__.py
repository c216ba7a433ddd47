"""One file for each kind of layer: how it differentiates by its parameters, and its arguments.

A rule is a class in a file of its own with the signatures of the operations that it is for;
``@register`` puts it into :data:`~engram.engine.rules.base.RULES`. Layers that are one call of many
operations (attention, recurrence) have no rule: ``@writes_out`` has them run as plain ones, which
have. To add a layer: add a file, and its name to the imports below.
"""

from engram.engine.rules import (  # noqa: F401 (imported to be registered)
    attention,
    convolution,
    copies,
    embedding,
    experts,
    linear,
    matrix_product,
    norms,
    recurrent,
    scaling,
    shift,
    transposed_convolution,
)
from engram.engine.rules.base import RULES, bind, plain_form

__all__ = ["RULES", "bind", "plain_form"]
