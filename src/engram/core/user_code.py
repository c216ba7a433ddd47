"""The user's own functions by name, and weights from files that hold numbers alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.near_names import near
from engram.errors import ArgumentError, DataError, ModelMismatchError, brief

FORM = "package.module:function"


def imported(name: str) -> Any:
    """What ``package.module:function`` names; modules of the working folder are found too.

    An error in the module itself is passed on as it is: it is the user's to see.

    Example:
        >>> imported("math:floor")(2.5)
        2
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ArgumentError(f"a function as {FORM}", repr(name), f"name it as {FORM}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module asks for one that is not there
        raise ArgumentError(
            f"a module {module_name!r} in {here} or installed", brief(error), "check its name"
        ) from error
    finally:
        sys.path.remove(here)
    if not hasattr(module, attribute):
        raise ArgumentError(
            f"{attribute!r} in the module {module_name!r}",
            "none",
            near(attribute, dir(module)) or "define it there",
        )
    return getattr(module, attribute)


def model_of(made: Any, name: str) -> nn.Module:
    """What a user's function gave, which must be a model."""
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"{name} to give a torch.nn.Module", type(made).__name__, "return the model"
        )
    return made


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors file, or one of ``torch.save`` with tensors alone."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever library reads it
        raise DataError(
            f"weights in {path}, as safetensors or as a state_dict of torch.save",
            brief(error),
            "save model.state_dict()",
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]  # as Lightning keeps it
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise DataError(f"tensors by name in {path}", type(found).__name__, "save a state_dict")
    return dict(found)


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a file; ModelMismatchError that names what does not fit."""
    given, own = read_weights(path), model.state_dict()
    for name in own.keys() | given.keys():
        shapes = [tuple(part[name].shape) if name in part else "none" for part in (own, given)]
        if shapes[0] != shapes[1]:
            raise ModelMismatchError(
                f"weights of this model: {name!r} {shapes[0]}",
                f"{shapes[1]} in {path}",
                near(name, given.keys() - own.keys()) or "pass the weights of the same model",
            )
    model.load_state_dict(given)
    return model
