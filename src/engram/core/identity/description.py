"""Any value as a digest that is equal in another process only for an equal value.

Functions are described by their code and everything it refers to, objects by what copying them
would copy, classes of the user's by their code, and what comes from an installed library by its
name and version. Nothing depends on addresses, on the order of sets, or on whether two equal values
are one object. What has no such description is counted among the unseen.
"""

from __future__ import annotations

import copyreg
import functools
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram.core.identity.digests import bytes_of, joined
from engram.core.identity.references import (
    NotImported,
    Undefined,
    content,
    library_version,
    referred,
)

# types whose values are known by their repr
ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
# entries of a class's namespace that Python or a decorator puts there
NOT_OF_A_CLASS = (
    *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl"),
    *("__orig_bases__", "__parameters__", "__type_params__", "__annotate__"),
    *("__annotations_cache__", "__conditional_annotations__"),
)
# modes are told apart from settings; the rest says how a module is run, not what it computes
NOT_OF_A_MODULE = (
    *("training", "_compiled_call_impl", "_flat_weights", "_flat_weight_refs"),
    "_is_full_backward_hook",
)
BY_NAME = (exec, eval, compile, globals, __import__)  # no code shows what they are given
OF_THE_PROCESS = ("_original_object_hash",)  # transformers keeps Python's own hash of strings
# attributes of code that decide what it does; line numbers and file names do not
CODE = (
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_varnames"),
    *("co_names", "co_freevars", "co_cellvars", "co_exceptiontable", "co_consts"),
)


class Description:
    """Digests of values, and what could not be seen of them.

    Example:
        >>> rate = 0.1
        >>> described = Description()
        >>> described.of(lambda x: rate * x, "f") == Description().of(lambda x: rate * x, "g")
        True
        >>> _ = described.of({"steps": (n for n in range(3))}, "settings")
        >>> described.unseen
        ["settings['steps'] (builtins.generator: TypeError)"]
    """

    def __init__(self) -> None:
        self.unseen: list[str] = []
        self._known: dict[int, tuple[Any, bytes]] = {}  # the value too, so that its id stays its
        self._around: list[int] = []

    def of(self, value: Any, place: str) -> str:
        """The digest of a value; ``place`` names it where something in it cannot be seen."""
        return self._digest(value, place).hex()

    def _digest(self, value: Any, place: str) -> bytes:
        if type(value) in ATOMS:
            return joined(type(value).__name__, repr(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._around:  # a circle: how many steps back it closes
            return joined("around", str(self._around[::-1].index(id(value))))
        self._around.append(id(value))
        try:
            digest = self._described(value, place)
        except Exception as error:  # whatever an object's own methods raise
            digest = self._not_seen(value, place, error)
        finally:
            self._around.pop()
        self._known[id(value)] = (value, digest)
        return digest

    def _not_seen(self, value: Any, place: str, error: Exception | None = None) -> bytes:
        kind = type(value)
        why = "" if error is None else f": {type(error).__name__}"
        self.unseen.append(f"{place} ({kind.__module__}.{kind.__qualname__}{why})")
        return joined("unseen", kind.__module__, kind.__qualname__)

    def _described(self, value: Any, place: str) -> bytes:
        for kinds, describe in RULES:
            if isinstance(value, kinds):
                return describe(self, value, place)
        return self._object(value, place)

    def _all(self, tag: str, values: Iterable[Any], place: str) -> bytes:
        parts = [self._digest(v, f"{place}[{n}]") for n, v in enumerate(values)]
        return joined(tag, *parts)

    def _named(self, tag: str, values: Mapping[str, Any], place: str) -> bytes:
        """Values by name, whatever the order of the names."""
        names = sorted(values, key=str)
        return joined(
            tag, *(joined(str(n), self._digest(values[n], f"{place}.{n}")) for n in names)
        )

    def _mapping(self, value: Mapping[Any, Any], place: str) -> bytes:
        if type(value) not in (dict, MappingProxyType):
            return self._object(value, place)
        pairs = [
            joined("pair", self._digest(k, f"{place} key"), self._digest(v, f"{place}[{k!r:.40}]"))
            for k, v in value.items()
        ]
        return joined("dict", *pairs)

    def _sequence(self, value: Any, place: str) -> bytes:
        if type(value) not in (list, tuple):
            return self._object(value, place)
        return self._all(type(value).__name__, value, place)

    def _set(self, value: Any, place: str) -> bytes:
        if type(value) not in (set, frozenset):
            return self._object(value, place)
        return joined(type(value).__name__, *sorted(self._digest(v, place) for v in value))

    def _slice(self, value: slice, place: str) -> bytes:
        return self._all("slice", (value.start, value.stop, value.step), place)

    def _tensor(self, value: Tensor, place: str) -> bytes:
        if value.layout is not torch.strided:
            value = value.to_dense()
        about = f"{value.dtype} {tuple(value.shape)} {value.requires_grad and value.is_leaf}"
        return joined("tensor", about, bytes_of(value))

    def _array(self, value: np.ndarray[Any, Any], place: str) -> bytes:
        if value.dtype.hasobject:
            return self._all(f"array {value.shape}", value.ravel().tolist(), place)
        about = f"{value.dtype.descr} {value.shape}"
        return joined("array", about, np.ascontiguousarray(value).view(np.uint8).tobytes())

    def _code(self, value: CodeType, place: str) -> bytes:
        parts = {name: getattr(value, name, None) for name in CODE}
        return joined(platform.python_version(), value.co_code, self._named("code", parts, place))

    def _function(self, value: FunctionType, place: str) -> bytes:
        module = str(value.__globals__.get("__name__"))
        version = library_version(module)
        parts: dict[str, Any] = {"defaults": value.__defaults__, "others": value.__kwdefaults__}
        parts |= vars(value)
        if version is None:
            parts |= {"code": value.__code__} | referred(value)
            return joined("function", self._named(value.__qualname__, parts, place))
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts |= {name: content(cell, name) for name, cell in cells}  # a decorator's function
        about = f"{module}.{value.__code__.co_name} {version}"
        return joined("function", about, self._named("closure", parts, place))

    def _method(self, value: MethodType, place: str) -> bytes:
        return self._all("method", (value.__func__, value.__self__), place)

    def _builtin(self, value: Any, place: str) -> bytes:
        """A function in C: by its name, of a library's version, or of the object it belongs to."""
        if value in BY_NAME:
            return self._not_seen(value, f"{place}, which runs or finds what it is told by name")
        owner, module = getattr(value, "__self__", None), getattr(value, "__module__", None)
        if owner is not None and not isinstance(owner, ModuleType):
            return joined("builtin", value.__qualname__, self._digest(owner, place))
        return self._by_name(value, str(module or "builtins"), value.__qualname__, place)

    def _by_name(self, value: Any, module: str, name: str, place: str) -> bytes:
        """What a library has under a name; nothing is known of it where it is not a library's."""
        version = library_version(module)
        if version is None:
            return self._not_seen(value, place)
        return joined("library", module, name, version)

    def _class(self, value: type, place: str) -> bytes:
        if library_version(value.__module__) is not None:
            return self._by_name(value, value.__module__, value.__qualname__, place)
        own = {k: v for k, v in vars(value).items() if k not in NOT_OF_A_CLASS}
        slots = [name for name in own if type(own[name]).__name__.endswith("_descriptor")]
        own |= {name: None for name in slots}  # places of __slots__, which hold no values
        return joined(
            "class",
            value.__qualname__,
            self._all("bases", value.__bases__, place),
            self._named("body", own, place),
        )

    def _accessor(self, value: Any, place: str) -> bytes:
        names = ("fget", "fset", "fdel", "__func__", "func")
        parts = {name: getattr(value, name, None) for name in names}
        return joined(type(value).__name__, self._named("accessor", parts, place))

    def _module(self, value: ModuleType, place: str) -> bytes:
        """A module of the user's that is used as a whole: all that it holds."""
        if value.__name__ == "importlib":
            return self._not_seen(value, f"{place}, which finds modules by name")
        version = library_version(value.__name__)
        if version is not None:
            return joined("library", value.__name__, version)
        own = {k: v for k, v in vars(value).items() if not k.startswith("__")}
        return self._named(f"module {value.__name__}", own, place)

    def _layer(self, value: nn.Module, place: str) -> bytes:
        inner = getattr(value, "_orig_mod", None)
        if isinstance(inner, nn.Module):  # torch.compile changes how it runs, not what it computes
            return self._digest(inner, place)
        try:
            state = value.__getstate__()  # from Python 3.11 on every object has one
        except (AttributeError, RuntimeError):  # parametrised modules refuse to be pickled
            state = vars(value)
        if not isinstance(state, dict):
            return self._object(value, place)
        own = {
            # hooks are kept under numbers that count those of the whole process
            k: list(v.values()) if "hooks" in k and isinstance(v, dict) else v
            for k, v in state.items()
            if k not in NOT_OF_A_MODULE
        }
        return joined("layer", self._digest(type(value), place), self._named("own", own, place))

    def _reference(self, value: Any, place: str) -> bytes:
        return joined("reference", self._digest(value(), place))

    def _lock(self, value: Any, place: str) -> bytes:
        return joined("lock")  # it says who waits, not what is computed

    def _generator(self, value: torch.Generator, place: str) -> bytes:
        return joined("generator", self._digest(value.get_state(), place))

    def _undefined(self, value: Undefined, place: str) -> bytes:
        return joined("undefined", value.name)

    def _not_imported(self, value: NotImported, place: str) -> bytes:
        version = library_version(value.name)
        if version is not None:
            return joined("library", value.name, version)
        self.unseen.append(f"{place} (module {value.name}, imported only when it runs)")
        return joined("unseen", value.name)

    def _cached(self, value: Any, place: str) -> bytes:
        return joined("cached", self._digest(value.__wrapped__, place))

    def _object(self, value: Any, place: str) -> bytes:
        """What ``copy.copy`` would make it from; a TypeError where it cannot be copied."""
        registered = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):  # one of a kind, known by its name
            return self._by_name(value, _home(value), reduced, place)
        padded: list[Any] = [*reduced, None, None, None]
        maker, arguments, state, items, pairs = padded[:5]
        if isinstance(state, dict):
            lasting = {k: v for k, v in state.items() if k not in OF_THE_PROCESS}
            inside = self._named("state", lasting, place)
        else:
            inside = self._digest(state, place)
        return joined(
            "object",
            self._digest(type(value), place),
            self._digest(maker, place),
            self._all("arguments", arguments, place),
            inside,
            self._all("items", items or (), place),
            self._all("pairs", pairs or (), place),
        )


Rule = tuple[Any, Callable[[Description, Any, str], bytes]]
RULES: tuple[Rule, ...] = (
    (Tensor, Description._tensor),
    (np.ndarray, Description._array),
    (nn.Module, Description._layer),
    (Mapping, Description._mapping),
    ((list, tuple), Description._sequence),
    ((set, frozenset), Description._set),
    (slice, Description._slice),
    (CodeType, Description._code),
    (FunctionType, Description._function),
    (MethodType, Description._method),
    ((BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType), Description._builtin),
    (type, Description._class),
    ((property, staticmethod, classmethod, functools.cached_property), Description._accessor),
    (functools._lru_cache_wrapper, Description._cached),
    (ModuleType, Description._module),
    (weakref.ref, Description._reference),
    ((type(threading.Lock()), type(threading.RLock())), Description._lock),
    (torch.Generator, Description._generator),
    (Undefined, Description._undefined),
    (NotImported, Description._not_imported),
)


def _home(value: Any) -> str:
    """The module of a value that copies as itself."""
    return str(getattr(value, "__module__", None) or type(value).__module__)
