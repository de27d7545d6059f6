"""Kernels compiled ahead, many at once. Left alone, Triton compiles a kernel when it is first launched, and all wait.

A function that launches the kernels is run once with nothing being launched: Triton then compiles what it would launch,
for the same types, constants and alignments, which is what a launch looks for later. Its passes do not hold Python's
lock, and ptxas and the C compiler (for the function that launches) are processes of their own, so threads help.

What of Triton is used here is not all documented; it is looked up late, so that a version without it fails in
:func:`compile_all`, not when this module is imported.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

from morecl.cores import usable_cores

# for every launch: a product and a sum in one instruction, which Triton 3.10 will no longer do unless it is asked to
FUSED = {"enable_fp_fusion": True}

_launching: ContextVar[bool] = ContextVar("launching", default=True)


def compile_all(launches: Callable[[], object]) -> None:
    """Compile every kernel of this package that ``launches`` launches, for the current device. Nothing is launched.

    Other threads may launch kernels meanwhile. Must run in a context of its own (:mod:`contextvars`), not twice at the
    same time. Raises what the compiler raises.
    """
    pool = ThreadPoolExecutor(usable_cores(), "compile")
    with _only_compiled(), _one_parser(), pool, triton.AsyncCompileMode(_WithLaunchers(pool)):
        launches()


class _WithLaunchers:
    """What Triton needs of an executor; also builds what launches each kernel."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._compile, compile_kernel)

    @staticmethod
    def _compile(compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        # stays in Triton's cache, where the launch finds it
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


@contextmanager
def _one_parser() -> Iterator[None]:
    """Triton parses one function at a time: two threads at once make Python 3.11's parser fail ("AST constructor
    recursion depth mismatch")."""
    turn, parse = threading.Lock(), triton.JITFunction.parse

    def in_turn(function: Any) -> Any:
        with turn:
            return parse(function)

    triton.JITFunction.parse = in_turn
    try:
        yield
    finally:
        triton.JITFunction.parse = parse


@contextmanager
def _only_compiled() -> Iterator[None]:
    """In this context, launches of our kernels compile them and return."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
    values = (value for module in modules for value in vars(module).values())
    kernels = {id(value): value for value in values if type(value) is triton.JITFunction}
    if not kernels:
        raise RuntimeError("Triton interprets the kernels, or has changed what it makes of them")
    for kernel in kernels.values():
        kernel.run = functools.partial(_run, kernel)  # the method of this one kernel
    _launching.set(False)
    try:
        yield
    finally:
        _launching.set(True)
        for kernel in kernels.values():
            del kernel.run


def _run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
    return triton.JITFunction.run(kernel, *args, warmup=warmup or not _launching.get(), **options)
