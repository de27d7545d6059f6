"""Work on a GPU recorded once as a CUDA graph and replayed: one launch by the host instead of hundreds."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from morecl.errors import first_line
from morecl.images import ImageArray

Batch = tuple[Tensor, ...]
Result = TypeVar("Result")

WARM_UP_STEPS = 1  # before a step is captured, as CUDA graphs require; the first batch has run before that
SIZES = (1, 2, 4, 8)  # numbers of images that answers are captured for; others are filled up
SHAPES = 8  # of images, for which answers are captured at the same time

_one_at_a_time = threading.Lock()  # captures, of which a process can make one at a time; they share a stream
_failed: list[torch.cuda.CUDAGraph] = []


class CapturedStep(Generic[Result]):
    """``step`` as a CUDA graph: recorded once on its own buffers, then replayed without launching single kernels.

    Nothing in ``step`` may wait for the device or depend on numbers there. All that it reads, except for the batch,
    must live as long as the graph and stay where it is. The result is overwritten by the next replay.
    """

    def __init__(
        self,
        step: Callable[[Batch], Result],
        batch: Batch,
        changed: Sequence[Tensor] = (),
        *,
        beside: CapturedStep[Result] | None = None,
        among_threads: bool = False,
    ):
        """
        Args:
            changed: the tensors that a step changes; they are restored after warming up.
            beside: another step that never runs at the same time, and so may use the same memory.
            among_threads: other threads may use the device during the capture.
        """
        self.shapes = [tensor.shape for tensor in batch]
        self._inputs = tuple(tensor.clone() for tensor in batch)
        self._device = device = batch[0].device
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        mode = "thread_local" if among_threads else "global"
        with _one_at_a_time, torch.cuda.device(device):  # streams belong to the current device, maybe not the batch's
            before, current = [tensor.clone() for tensor in changed], torch.cuda.current_stream()
            side = _side_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    step(self._inputs)
            current.wait_stream(side)
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            try:
                with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode=mode):
                    self._result = step(self._inputs)
            except BaseException:
                torch.cuda.set_stream(current)  # torch leaves its own behind,
                _failed.append(self._graph)  # and asks the graph at every allocation from now on
                raise

    def __call__(self, batch: Batch) -> Result:
        for buffer, tensor in zip(self._inputs, batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that all steps are captured on: cuBLAS keeps some 65 MiB for every stream it has seen."""
    return torch.cuda.Stream(device)


def filled_up(count: int) -> int:
    """The smallest of :data:`SIZES` that takes ``count`` images."""
    return next(size for size in SIZES if size >= count)


class Replayed:
    """Answers for a few images at a time, from the second call with images of the same shape on as a CUDA graph.

    Threads may share it: they take turns. Memory is bounded by the largest shape and :data:`SHAPES`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._turn = threading.Lock()
        # by shape, the one used last at the end; ``None``: seen once
        self._graphs: OrderedDict[tuple[int, ...], _OnHost | None] = OrderedDict()
        self._able = True

    def __len__(self) -> int:
        """How many shapes are captured."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, run: Callable[[Tensor], Tensor], images: ImageArray) -> Tensor:
        """``run`` of the images, uint8 (n, H, W, 3) with n up to the largest of :data:`SIZES`: (n, ...) on the CPU.

        ``run`` gets one of :data:`SIZES` images on the device, the last one repeated. All calls must give the same
        ``run``, which must fulfil what :class:`CapturedStep` asks of a step.
        """
        count = len(images)
        # what a graph reads and writes must be ordinary tensors, or a call outside of inference mode could not use it
        with self._turn, torch.inference_mode(False), torch.no_grad():
            shape = (filled_up(count), *images.shape[1:])
            graph = self._graphs.get(shape)
            if graph is None:
                filled = torch.empty(shape, dtype=torch.uint8)
                _fill(filled, images)
                on_device = filled.to(self._device)
                if shape not in self._graphs:
                    self._graphs[shape] = None
                elif self._able:
                    graph = self._graphs[shape] = self._captured(run, on_device)
            self._graphs.move_to_end(shape)
            while len(self._graphs) > SHAPES:
                self._graphs.popitem(last=False)
            found = run(on_device).cpu() if graph is None else graph(images)
        return found[:count]

    def _captured(self, run: Callable[[Tensor], Tensor], images: Tensor) -> _OnHost | None:
        other = next((graph.step for graph in self._graphs.values() if graph is not None), None)
        try:
            step = CapturedStep(lambda batch: run(*batch), (images,), beside=other, among_threads=True)
        except RuntimeError as error:
            self._able = False
            told = f"answers for few images cannot be captured and take longer: {first_line(error)}"
            warnings.warn(told, stacklevel=4)
            return None
        return _OnHost(step, images)


class _OnHost:
    """A captured step whose input and result are on the host."""

    def __init__(self, step: CapturedStep[Tensor], images: Tensor):
        self.step = step
        self._staged = torch.empty(images.shape, dtype=images.dtype, pin_memory=images.is_cuda)

    def __call__(self, images: ImageArray) -> Tensor:
        _fill(self._staged, images)
        return self.step((self._staged,)).cpu()  # waits, so the next call may write to what was read here


def _fill(room: Tensor, images: ImageArray) -> None:
    """Write ``images`` into the first rows of ``room``, on the CPU, and the last one into all others."""
    rows = room.numpy()
    rows[: len(images)] = images
    rows[len(images) :] = images[-1]
