"""Models that cannot be handled, refused by the true cause and with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batch, call, check_output_rows
from engram.core.data.inputs import tensors_of
from engram.core.memory import is_out_of_memory
from engram.core.parameters import check_one_type, trainable, uncompiled
from engram.core.state.modes_and_buffers import Buffers
from engram.core.state.sharded import is_sharded
from engram.engine.interception import FunctionMode, tensors
from engram.engine.rules.base import Function
from engram.errors import DataError, EngineError, EngramError, brief, interruption

# How far apart rounding may bring outputs that must be equal. Two runs of one batch differ by the
# order of sums at most; batches of other sizes take other kernels, and far coarser ones below
# double precision.
SAME_BATCH = (1e-3, 1e-6)  # relative to an output, and absolute
OTHER_BATCH_DOUBLE, OTHER_BATCH = 1e-8, 2e-2  # relative, also to the largest output

# words of an error, what was expected, what came, what to do
CAUSES = (
    (
        "more than 1 value per channel",
        "a model that treats the examples of a batch independently",
        "batch normalisation with the statistics of the batch, also in eval mode",
        "give it running statistics, and let eval() reach it",
    ),
    (
        "modified by an inplace operation",
        "a model that autograd can differentiate",
        "a tensor that was changed in place after an operation that needs it for its derivative",
        "write that operation out of place (x = x + y instead of x += y)",
    ),
    (
        "positional argument",
        "a forward that takes each part of the inputs as an argument of its own",
        "other arguments than it has",
        "((a, b), y) is given as model(a, b) and ({...}, y) as model(**inputs): for a model that "
        "takes them as one, write a module whose forward puts them together",
    ),
    (
        "unexpected keyword argument",
        "a forward with an argument for every key of the inputs",
        "a key that it does not know",
        "leave it out of the data, or write a module whose forward takes it",
    ),
    (
        "index out of range in self",
        "numbers that have a row in the table that they are looked up in",
        "a token or position beyond an embedding",
        "check that tokenizer and model have one vocabulary (model.resize_token_embeddings), and "
        "that no sequence is longer than the model has positions",
    ),
    (
        "is not implemented",
        "operations that can be differentiated twice",
        "",
        "write that operation out in ones that have a second derivative",
    ),
)


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """What a model raises while it runs, as an EngineError; a lack of memory stays what it is."""
    try:
        yield
    except EngramError:
        raise
    except Exception as error:
        pass_on(error)
        raise refusal(error, where) from error


def pass_on(error: Exception) -> None:
    """Raise what is none of the model's doing: a lack of memory, Ctrl-C behind another error."""
    came = interruption(error)
    if came is not None:
        raise came
    if is_out_of_memory(error):
        raise error


def refusal(error: Exception, where: str) -> EngineError:
    """The error of a model that did not run, with its cause by name where that is known."""
    came = brief(error)
    for words, expected, got, remedy in CAUSES:
        if words in str(error):
            return EngineError(expected, f"{got} ({came})" if got else came, remedy)
    return EngineError(
        f"a model that runs {where}",
        came,
        "check shapes and types of the inputs; docs/errors-and-limits.md lists what is covered",
    )


def check_kinds(model: nn.Module) -> None:
    """What cannot be handled whatever the data: found before the model is run."""
    for name, module in model.named_modules():
        _check_module(name, module)
    if not trainable(model):
        quantised = any(".quantized" in type(m).__module__ for m in model.modules())
        raise EngineError(
            "a model with trainable parameters",
            "quantised layers, whose weights are fixed" if quantised else "none with gradients",
            "pass the model as it was before it was quantised" if quantised else "unfreeze some",
        )
    check_one_type(model)
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            _refuse_sharded(f"{name!r} as a {type(parameter).__name__}")
        _check_plain(name, parameter)


def _check_plain(name: str, parameter: Tensor) -> None:
    """Tensors that run operations of their own have not all that are needed."""
    if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise EngineError(
            "weights that are plain tensors, or those of bitsandbytes",
            f"{name!r} as a {type(parameter).__name__}, quantised by a class of its own",
            "pass the model with its base before it was quantised, or loaded with "
            "transformers.BitsAndBytesConfig, and the same adapter",
        )


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise EngineError(
            "modules of Python, whose operations can be seen one by one",
            f"{name or 'the model'!r} compiled by torch.jit",
            "pass the module that was given to torch.jit.script or torch.jit.trace",
        )
    if getattr(module, "merged", False) is True and hasattr(module, "merged_adapters"):
        raise EngineError(
            "adapters beside the weights that they change",
            f"{name!r} merged into its weights, which no gradient reaches",
            "call model.unmerge_adapter() first",
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        _refuse_sharded(f"{name or 'the model'!r} in FullyShardedDataParallel")
    if getattr(module, "max_norm", None) is not None:
        raise EngineError(
            "layers that leave their weights as they are",
            f"{name!r} with max_norm, which rescales them in every forward pass",
            "set max_norm=None after training",
        )


def _refuse_sharded(got: str) -> None:
    raise EngineError(
        "whole parameters in every process",
        f"{got}, sharded over processes",
        "of fully_shard, call it on every process with across_ranks=True; else load the full "
        "state dict into a model that is not sharded: "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict with "
        "StateDictOptions(full_state_dict=True)",
    )


def check_decoder(model: nn.Module, probe: Batch) -> None:
    """DataError where a model would make the inputs of its decoder from something else.

    From labels, in training; they are not among the inputs here. BART then takes its ``input_ids``.
    """
    if hasattr(uncompiled(model), "prepare_decoder_input_ids_from_labels") and (
        isinstance(probe.inputs, dict)
        and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(probe.inputs)
    ):
        raise DataError(
            "decoder_input_ids among the inputs of an encoder-decoder",
            f"{', '.join(probe.inputs)}: labels are not given to the model here",
            "add decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels=labels) to "
            "the data",
        )


def check_independent(model: nn.Module, probe: Batch) -> None:
    """An example's outputs must not depend on which others are in its batch."""
    buffers = Buffers.now(model)
    with torch.no_grad():
        with Precisions():
            together = call(model, probe.inputs)
        changed = buffers.changed(model)
        again = call(model, probe.inputs)
        alone = [call(model, probe.select(slice(i, i + 1)).inputs) for i in range(len(probe))]
    check_output_rows(together, len(probe))
    for rows in alone:
        check_output_rows(rows, 1)
    if not torch.isfinite(together).all():
        return  # reported with the example's index when its batch comes
    if not torch.allclose(together, again, *SAME_BATCH):
        raise _not_the_same(changed)
    double = coarsest(model, probe) == torch.float64
    tolerance = OTHER_BATCH_DOUBLE if double else OTHER_BATCH
    rows = torch.cat(alone)
    if together.shape != rows.shape or not torch.allclose(
        together, rows, rtol=tolerance, atol=tolerance * float(rows.abs().max())
    ):
        raise EngineError(
            "a model that treats the examples of a batch independently",
            "outputs that change with the other examples of the batch",
            "replace what mixes examples: batch normalisation needs running statistics, a branch "
            "must not depend on the whole batch, and where rows are the nodes of one graph there "
            "are no separate examples unless nodes are pooled to graphs",
        )


def coarsest(model: nn.Module, batch: Batch) -> torch.dtype:
    """The type with the largest rounding that a pass goes through, whatever its outputs have."""
    given = [*model.parameters(), *model.buffers(), *tensors_of(batch.inputs)]
    types = {t.dtype for t in given if t.is_floating_point()} or {torch.float64}
    return max(types, key=lambda kind: torch.finfo(kind).eps)


def _not_the_same(changed: list[str]) -> EngineError:
    if changed:
        return EngineError(
            "a model whose outputs are the same each time in eval mode",
            f"a forward that changes its buffer {changed[0]!r}",
            "update buffers in train mode only (observers of quantisation: disable_observer)",
        )
    return EngineError(
        "a model whose outputs are the same each time in eval mode",
        "a random forward",
        "use nn.Dropout, which eval mode switches off, and draw no noise in forward",
    )


class Precisions(FunctionMode):
    """Refuses operations that automatic mixed precision inside of the model takes down."""

    def __torch_function__(
        self,
        function: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return result
        given = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
        made = [t for t in tensors(result) if t.is_floating_point()]
        if _lower(made) and not _lower(given):
            name = getattr(function, "__name__", function)
            raise EngineError(
                "a forward in one precision",
                f"automatic mixed precision inside of the model, at {name!r}",
                "enter it by torch.autocast, which stays off here, or put it around the step",
            )
        return result


def _lower(values: list[Tensor]) -> bool:
    return any(t.dtype in (torch.float16, torch.bfloat16) for t in values)
