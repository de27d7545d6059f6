"""timm imported without torch's compiler, which then is imported when something is compiled, or never.

timm marks a few functions that the compiler must leave alone, and torchvision, which timm imports, asks in one function
whether it may compile. Both import ``torch._dynamo`` and with it a thousand modules, as many as all the rest: more than
a second, and several on a machine that has not compiled Python's files yet. Training with our own kernels, or on a CPU,
compiles nothing.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

try:  # how torch itself marks its optimisers
    from torch._compile import _disable_dynamo
except ImportError:  # a version of torch without it: then timm imports the compiler
    _disable_dynamo = None  # type: ignore[assignment]

COMPILER = "torch._dynamo"


def import_timm() -> None:
    """Import timm. Meanwhile no garbage is collected: there is none, and each search takes longer than the last."""
    if "timm" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        with compiler_later():
            importlib.import_module("timm")
    finally:
        if collecting:
            gc.enable()


@contextmanager
def compiler_later() -> Iterator[None]:
    """Meanwhile an import of ``torch._dynamo`` gets a stand-in, unless it has been imported or torch is too new.

    What the stand-in gives imports the compiler when it is called; whoever asks for anything else gets the real module.
    """
    if COMPILER in sys.modules or _disable_dynamo is None:
        yield
        return
    compiler = _StandIn(COMPILER, disable=_disable)
    utils = _StandIn(f"{COMPILER}.utils", is_compile_supported=_is_compile_supported)
    sys.modules.update({module.__name__: module for module in (compiler, utils)})
    try:
        yield
    finally:
        _remove_stand_ins()


class _StandIn(ModuleType):
    def __init__(self, name: str, **contents: object):
        super().__init__(name)
        vars(self).update(contents)

    def __getattr__(self, name: str) -> Any:
        is_package_path = name == "__path__" and self.__name__ == COMPILER  # by which other submodules are imported
        if name.startswith("__") and not is_package_path:
            raise AttributeError(name)  # asked of every module in sys.modules, by ``inspect``
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _remove_stand_ins() -> None:
    for name in (COMPILER, f"{COMPILER}.utils"):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_: object) -> Callable[..., Any]:
    """``torch._dynamo.disable``, which here imports the compiler with the first call."""
    if isinstance(fn, type):
        from torch._dynamo import disable

        return disable(fn, recursive)
    return _disable_dynamo(fn, recursive)


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return is_compile_supported(device_type)
