"""Linear layers in float32 on CPUs on which torch's own are slow: AMD's with AVX-512.

torch leaves products of float32 matrices to Intel's MKL, which uses no AVX-512 on AMD's CPUs. oneDNN, which torch
contains for its compiler, does: twice as fast there and as exact. Everywhere else these are torch's own linear layers.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.nn import signal_stack


class Linear(nn.Linear):
    """``nn.Linear``, computed by :func:`linear`. Made from one, whose weights it shares."""

    @classmethod
    def of(cls, module: nn.Linear) -> Linear:
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W' + b``: x (..., I), weight (O, I), bias (O,) -> (..., O)."""
    if torch.compiler.is_compiling() or not is_supported(x, weight):
        return F.linear(x, weight, bias)
    if is_faster() and torch.backends.mkldnn.enabled and not _turned_off.inside:
        return cast(Tensor, _Linear.apply(x, weight, bias))
    return F.linear(x, weight, bias)


def is_supported(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can compute it."""
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.numel() > 0


@functools.cache
def is_faster() -> bool:
    """Whether this machine is one of those described above and this torch has the operation."""
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and is_amd()
    )


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether AMD made the CPU, as Linux or Python says."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)
    except OSError:
        return "AuthenticAMD" in platform.processor()


class _TurnedOff(threading.local):
    inside = False


_turned_off = _TurnedOff()


@contextmanager
def torchs_own(wanted: bool = True) -> Iterator[None]:
    """Inside, in this thread, :func:`linear` is torch's, so that whoever traces or counts operations knows them."""
    before, _turned_off.inside = _turned_off.inside, wanted or _turned_off.inside
    try:
        yield
    finally:
        _turned_off.inside = before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Made of operations that have gradients themselves, for methods that need second ones."""
        x, weight = ctx.saved_tensors
        d_x = d_weight = d_bias = None
        rows = g.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            d_x = linear(g, weight.t())
        if ctx.needs_input_grad[1]:
            d_weight = linear(rows.t(), x.flatten(0, -2).t())
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        return d_x, d_weight, d_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    signal_stack.ensure()
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
