"""The kernels of :mod:`morecl.nn.fused` compiled in the background, while images are read and moved to the GPU.

They are some 20 kernels, which one after the other take more than ten seconds in a new process with an empty cache.
"""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from morecl.nn import fused
from morecl.nn.adapter import AdapterWeights

if fused.AVAILABLE:
    from morecl.nn.kernels import sgd
    from morecl.nn.kernels.compiling import compile_all

_background = ThreadPoolExecutor(1, "ahead")
_asked: set[object] = set()
_running: list[Future[None]] = []
_lock = threading.Lock()  # of the list


def start(shape: tuple[int, int, int], bottleneck: int, frozen: Sequence[fused.BlockWeights], heads: int) -> None:
    """Compile what :func:`morecl.nn.fused.trunk` and SGD need for tokens of ``shape`` (B, L, D), if it trains here.

    Returns at once; :func:`wait` waits, and so does the end of the process. Only the shapes, type and device of the
    blocks' weights ``frozen`` matter.
    """
    like = frozen[0]["attn.qkv.weight"]
    asked = (shape, bottleneck, heads, like.dtype, like.device, len(frozen) > 1)
    adapters = AdapterWeights(*(torch.empty(0, bottleneck, 0) for _ in AdapterWeights._fields))
    if asked in _asked or not fused.supports_batch(like.new_empty(1, 1, 1), adapters):
        return
    if not fused.trains_faster(shape[2], bottleneck):
        return
    _asked.add(asked)
    blocks = [frozen[0], frozen[-1]] if len(frozen) > 1 else frozen  # all but the last are alike

    def compile_here() -> None:
        with torch.cuda.device(like.device):
            compile_all(lambda: train_without_products(shape, bottleneck, blocks, heads))

    _running.append(_background.submit(contextvars.copy_context().run, compile_here))


def wait() -> None:
    """Wait until all that was started is done. What could not be compiled is told, and left to the launches."""
    for running in list(_running):
        error = running.exception()
        with _lock:
            is_first = running in _running  # no other thread was faster
            if is_first:
                _running.remove(running)
        if is_first and error is not None:
            warnings.warn(f"kernels could not be compiled ahead, which takes longer: {error!r}", stacklevel=2)


def train_without_products(
    shape: tuple[int, int, int], bottleneck: int, frozen: Sequence[fused.BlockWeights], heads: int
) -> None:
    """Run :func:`morecl.nn.fused.trunk` forward and backward on the CPU, without and with masks, and a step of SGD that
    also has masks and a head, all on numbers that do not matter."""
    dim, count = shape[2], 2 * len(frozen)
    blocks = [{name: torch.empty(w.shape, dtype=w.dtype) for name, w in block.items()} for block in frozen]
    norms = torch.empty(count + 1, dim), torch.empty(count + 1, dim)
    sizes = ((bottleneck, dim), (bottleneck,), (dim, bottleneck), (dim,))
    adapters = AdapterWeights(*(torch.empty(count, *size) for size in sizes))
    trained = [part.requires_grad_() for part in (*norms, *adapters)]
    tokens = torch.empty(shape, dtype=frozen[0]["attn.qkv.weight"].dtype)
    masks = torch.empty(count, bottleneck + dim, requires_grad=True)
    for given in (None, masks):
        with torch.enable_grad(), _NoProducts():
            features = fused.trunk(tokens, norms, adapters, blocks, heads, (0.0, 0.0), masks=given)
            torch.autograd.grad(features.sum(), trained)
    every = [part.detach() for part in (*trained, masks, torch.empty(2, dim), torch.empty(2))]
    gates = every[: len(adapters)]
    sgd.step(every, every, every, gates, sgd.sizes_of(every), lr=0.0, momentum=0.0, weight_decay=0.0, nesterov=False)


class _NoProducts(TorchDispatchMode):
    """Matrix products are not computed; what follows needs their shapes alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, to tell it so

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return func(*args, **(kwargs or {}))
        left, right = args[-2:]
        return left.new_empty(left.shape[0], right.shape[1])
