"""Heads trained by the kernel, an epoch at a time: against float64 in NumPy, against torch, and within MORE."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

import tiny
from morecl import training
from morecl.methods import Learner
from morecl.nn import fused, head_steps, network
from morecl.progress import EpochDone
from morecl.random import generator
from morecl.training import Batch, ProtectedSGD, equal_batches
from preloaded import preloaded

HERE = Path(__file__).parent
EPOCHS = 3
LR = 0.02
# Float32 rounds by 6e-8; tens of steps, each with sums of hundreds of products, leave this much, relative to the norm
ERROR = 3e-6
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@dataclass(frozen=True)
class Case:
    widths: tuple[int, ...]  # outputs of each head
    dim: int
    momentum: float = 0.0
    batch_size: int = 16
    count: int = 75  # images: several batches, the last one not full
    fill: bool = True


CASES = [
    Case((3, 2), 24),
    Case((2, 3, 3), 192, 0.9),
    Case((41, 17, 5), 192),
    Case((5, 41), 24, 0.9),
    Case((4,), 40, 0.9, batch_size=5, fill=False),  # one chunk and a part of one; a batch smaller than a product
    Case((3, 4), 72, batch_size=20),
    Case((16,), 64, count=7, fill=False),  # a single step
    Case((2, 17), 33, count=32, batch_size=16),  # two steps, an odd width
]
GPU_CASES = [
    *CASES,
    *(Case((11,) * 9, dim, momentum, count=1000) for dim in (192, 384, 768) for momentum in (0.0, 0.9)),
    Case((6,) * 19, 192, count=1000),
    Case((41, 11, 33), 384, 0.9, count=500),
    Case((101, 101), 192, 0.9, count=500),
    Case((11, 5), 1024, count=500),
    Case((11, 5), 192, batch_size=64, count=500),
]


@dataclass
class Problem:
    X: Tensor  # (J, n, D)
    y: Tensor  # (J, n)
    share: Tensor  # (J, n)
    weight: Tensor  # (J, widest, D)
    bias: Tensor  # (J, widest)
    epochs: list[list[Batch]]


def problem(case: Case, device: str = "cpu") -> Problem:
    """As MORE makes it: narrow heads are padded by outputs with probability 0."""
    draw = generator(0, "heads", case.dim, *case.widths)
    heads, widest = len(case.widths), max(case.widths)
    X = torch.randn(heads, case.count, case.dim, generator=draw)
    weight = torch.zeros(heads, widest, case.dim)
    bias = torch.full((heads, widest), torch.finfo().min)
    y = torch.zeros(heads, case.count, dtype=torch.int64)
    for j, width in enumerate(case.widths):
        weight[j, :width] = 0.1 * torch.randn(width, case.dim, generator=draw)
        bias[j, :width] = torch.randn(width, generator=draw)
        y[j] = torch.randint(width, (case.count,), generator=draw)
    share = 0.5 + torch.rand(heads, case.count, generator=draw)
    where = torch.device(device)
    epochs = [equal_batches(case.count, case.batch_size, draw, where, fill=case.fill) for _ in range(EPOCHS)]
    return Problem(*(part.to(where) for part in (X, y, share, weight, bias)), [list(each) for each in epochs])


def losses_and(events: Sequence[EpochDone], state: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
    arrays = [part.detach().cpu().double().numpy() for part in state]
    names = ("weight", "bias", "weight velocity", "bias velocity")
    return {"losses": np.array([event.loss for event in events])} | dict(zip(names, arrays, strict=True))


def by_fit(case: Case, device: str = "cpu", *, kernel: bool) -> dict[str, NDArray[Any]]:
    """What the training loop leaves, with the kernel or with MORE's loss in torch."""
    p = problem(case, device)
    weight, bias = p.weight.requires_grad_(), p.bias.requires_grad_()
    optimizer = ProtectedSGD([weight, bias], LR, case.momentum)

    def loss(index: Tensor, w: Tensor) -> Tensor:
        assert not kernel
        logits = torch.baddbmm(bias[:, None], p.X[:, index], weight.mT)
        errors = F.cross_entropy(logits.flatten(0, 1), p.y[:, index].flatten(), reduction="none")
        return (errors.view(len(p.X), -1) * p.share[:, index] * w).sum() / w.sum()

    def whole(batches: Any) -> tuple[Tensor, int]:
        return head_steps.run_epoch(p.X, p.y, p.share, optimizer.tensors(), LR, case.momentum, batches)

    events: list[EpochDone] = []
    training.fit(
        loss,
        lambda epoch: p.epochs[epoch],
        optimizer,
        epochs=EPOCHS,
        task=4,
        images=None,
        listener=events.append,
        stage="heads",
        whole=whole if kernel else None,
    )
    assert [(e.task, e.epoch, e.epochs, e.stage) for e in events] == [
        (4, k + 1, EPOCHS, "heads") for k in range(EPOCHS)
    ]
    return losses_and(events, optimizer.tensors())


def by_numpy(case: Case) -> dict[str, NDArray[Any]]:
    """Head by head, image by image, without padding, in float64."""
    p = problem(case)
    found = losses_and([], [p.weight, p.bias, torch.zeros_like(p.weight), torch.zeros_like(p.bias)])
    found["losses"] = np.zeros(EPOCHS)
    X, y, share = p.X.double().numpy(), p.y.numpy(), p.share.double().numpy()
    for j, width in enumerate(case.widths):
        W, b, V, u = (found[name][j, :width] for name in list(found)[1:])
        for epoch, batches in enumerate(p.epochs):
            for index, w in batches:
                dW, db = np.zeros_like(W), np.zeros_like(b)
                for i, w_i in zip(index.tolist(), w.tolist(), strict=True):
                    z = W @ X[j, i] + b
                    q = np.exp(z - z.max())
                    q /= q.sum()
                    factor = share[j, i] * w_i / float(w.sum())
                    found["losses"][epoch] -= factor * np.log(q[y[j, i]]) / len(batches)
                    q[y[j, i]] -= 1
                    dW += factor * np.outer(q, X[j, i])
                    db += factor * q
                V[:] = case.momentum * V + dW
                u[:] = case.momentum * u + db
                W -= LR * V
                b -= LR * u
    return found


def check(ours: dict[str, NDArray[Any]], exact: dict[str, NDArray[Any]], case: Case, error: float = ERROR) -> None:
    lowest = torch.finfo().min
    for name, want in exact.items():
        got = ours[name]
        if name.endswith("velocity") and not case.momentum:
            continue  # it has no effect
        if name == "bias":  # outputs that are not there stay where they were
            assert np.array_equal(got == lowest, want == lowest)
            got, want = np.where(want == lowest, 0, got), np.where(want == lowest, 0, want)
        elif name != "losses":
            for j, width in enumerate(case.widths):
                assert not got[j, width:].any(), (case, name)
        wrong = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        assert wrong < error, (case, name, wrong)
    before = problem(case).weight.numpy()
    assert np.linalg.norm(exact["weight"] - before) > 0.01 * np.linalg.norm(before)  # much more than the error


TASKS = [tiny.task(kinds, kinds, 13) for kinds in ([0, 1], [2, 3, 4], [5])]
TEST = np.concatenate([tiny.pictures(kind, 4, draw=1) for kind in range(6)])


def taught(how: Callable[[Learner], None] = lambda learner: None, **settings: Any) -> tuple[Learner, list[EpochDone]]:
    """MORE after three tasks and further images of known classes, and what its listener was told of its heads."""
    learner = tiny.create("more", back_update_lr=0.05, back_update_epochs=3, **settings)
    how(learner)
    events: list[EpochDone] = []
    for images, labels in TASKS:
        learner.learn_task(images, labels, events.append)
    learner.add_examples(*tiny.task([0, 1], [0, 1], 5, draw=2), events.append)
    return learner, [event for event in events if event.stage]


def check_learners(one: tuple[Learner, list[EpochDone]], other: tuple[Learner, list[EpochDone]], rtol: float) -> None:
    names = [[(e.task, e.epoch, e.epochs, e.stage, e.images_per_second) for e in events] for _, events in (one, other)]
    assert names[0] == names[1] and {name[3] for name in names[0]} == {"back-update", "refit"}
    losses = [[event.loss for event in events] for _, events in (one, other)]
    np.testing.assert_allclose(*losses, rtol=rtol)
    np.testing.assert_allclose(one[0].scores(TEST), other[0].scores(TEST), rtol=rtol, atol=1e-6)
    for ours, theirs in zip(one[0].tasks, other[0].tasks, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(ours.head.weight, theirs.head.weight, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(ours.head.bias, theirs.head.bias, rtol=rtol, atol=1e-5)


class Plain(training.Capturing):
    """A captured step without a graph, for a CPU."""

    def __call__(self, batch: Batch) -> Tensor:
        return self._step(batch)


def as_on_a_gpu(learner: Learner) -> None:
    """What the settings of a learner are on a GPU, on a CPU."""
    training.Capturing = Plain  # type: ignore[misc]
    network._compiled_block = lambda: network._call  # type: ignore[assignment]
    learner.captured = learner.compiled = True


# Triton 3.6 counts loops by int(array), which NumPy 2.4 refuses for arrays of one number with a dimension
COUNTS = """
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def patch_and_count(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patch_and_count
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    """Runs a program in Triton's interpreter, which must be enabled before the kernel is defined."""
    paths = os.pathsep.join([str(HERE), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with preloaded(tmp_path_factory.mktemp("interpreter"), environment) as commands:

        def run(program: str) -> None:
            whole = ["from test_head_steps import *", COUNTS, program, 'print("checked")']
            command = [commands / "python", "-c", "\n".join(whole)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.stdout.strip() == "checked", done.stderr

        yield run


@needs_triton
def test_an_epoch_in_the_kernel_is_that_of_float64_and_that_of_torch(interpreted: Callable[[str], None]) -> None:
    interpreted("""
for case in CASES:
    ours = by_fit(case, kernel=True)
    check(ours, by_numpy(case), case)
    check(ours, by_fit(case, kernel=False), case)
""")


@needs_triton
def test_more_with_the_kernel_is_more_without_it(interpreted: Callable[[str], None]) -> None:
    """Heads of different widths, batches that are filled up, with and without momentum."""
    interpreted("""
run_epoch, used = head_steps.run_epoch, []
def counted(*rest):
    used.append(rest[0].shape)
    return run_epoch(*rest)
head_steps.run_epoch = counted
for momentum in (0.0, 0.9):
    ways = []
    for able in (False, True):
        head_steps.supports_device = lambda device: able
        ways.append(taught(as_on_a_gpu, back_update_momentum=momentum))
        assert bool(used) == (able or momentum > 0)
    check_learners(*ways, rtol=1e-4)
assert {shape[0] for shape in used} == {1, 2}  # heads at once
""")


@needs_triton
def test_what_diverges_is_told_as_without_the_kernel(interpreted: Callable[[str], None]) -> None:
    interpreted("""
from morecl.errors import DivergedError
from morecl.progress import silent

def told(lr, X, weight, steps, kernel):
    weight, bias = (part.clone().requires_grad_() for part in (weight, p.bias))
    optimizer = ProtectedSGD([weight, bias], lr, 0.0)
    def loss(index, w):
        logits = torch.baddbmm(bias[:, None], X[:, index], weight.mT)
        return F.cross_entropy(logits.flatten(0, 1), p.y[:, index].flatten())
    whole = lambda batches: head_steps.run_epoch(X, p.y, p.share, optimizer.tensors(), lr, 0.0, batches)
    rest = {"epochs": 1, "task": 0, "images": None, "listener": silent, "whole": whole if kernel else None}
    try:
        training.fit(loss, lambda epoch: p.epochs[0][:steps], optimizer, **rest)
    except DivergedError as error:
        return str(error)
    return "nothing"

p = problem(CASES[0])
spoilt = p.X.clone()
spoilt[0, p.epochs[0][1][0][3], 5] = float("nan")
for message, *rest in (
    ("the loss of task 1 is nan in epoch 1 of 1", LR, spoilt, p.weight, 5),
    ("the loss of task 1 is nan in epoch 1 of 1", 1e38, 1e3 * p.X, p.weight, 5),
    ("task 1 left numbers that are not finite", 1e38, 1e3 * p.X, p.weight, 1),  # after a step whose loss is finite
    ("nothing", LR, p.X, p.weight, 5),
):
    assert message in told(*rest, False), told(*rest, False)
    assert told(*rest, True) == told(*rest, False), told(*rest, True)
""")


@needs_triton
def test_sizes_that_fit() -> None:
    for widest in (2, 6, 11, 16):
        assert all(head_steps.fits(widest, dim, 16) for dim in (24, 192, 384, 768, 1024)), widest
    assert head_steps.fits(41, 384, 16) and head_steps.fits(101, 192, 16) and head_steps.fits(11, 192, 64)
    assert not head_steps.fits(41, 768, 16)  # 240 KiB of weights and features
    assert not head_steps.fits(101, 384, 16)
    assert not head_steps.fits(11, 384, 64)  # 96 KiB of features alone are shared


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(CASES[0])
    rest = {"lr": LR, "momentum": 0.0, "batch_size": 16}
    state = [p.weight, p.bias, p.weight, p.bias]
    assert head_steps.in_kernel(p.X, p.y, p.share, state, **rest) is None  # on a CPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    generation = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape=p.X.shape)
    assert (head_steps.in_kernel(on_gpu, p.y, p.share, state, **rest) is not None) == fused.AVAILABLE
    assert head_steps.in_kernel(on_gpu, p.y, p.share, state, **(rest | {"batch_size": 2048})) is None
    generation = (7, 5)
    assert head_steps.in_kernel(on_gpu, p.y, p.share, state, **rest) is None
    generation = (9, 0)
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's
    assert head_steps.in_kernel(on_gpu, p.y, p.share, state, **rest) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(head_steps, "AVAILABLE", False)
    assert head_steps.in_kernel(on_gpu, p.y, p.share, state, **rest) is None


@pytest.mark.parametrize(("captured", "compiled"), [(True, False), (False, True), (True, True)])
def test_learners_use_it_if_they_compile_and_capture(
    captured: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks do not capture, and without a C compiler Triton cannot compile."""
    calls = []

    def run(batches: Any) -> tuple[Tensor, int]:
        calls.append(len(list(batches)))
        return torch.zeros(()), 1

    monkeypatch.setattr("morecl.methods.more.in_kernel", lambda *rest, **more: run)
    monkeypatch.setattr(training, "Capturing", Plain)
    monkeypatch.setattr(network, "_compiled_block", lambda: network._call)
    learner = tiny.create("more", back_update_epochs=2)
    learner.captured, learner.compiled = captured, compiled
    for images, labels in TASKS[:2]:
        learner.learn_task(images, labels)
    assert calls == ([3, 3] if captured and compiled else [])  # 24 images in batches of 8, two epochs


@needs_triton
@pytest.mark.parametrize(
    ("outputs", "dim", "batch_size", "momentum", "capability", "shared"),
    [(11, 384, 16, False, 90, 227), (11, 768, 16, True, 86, 99), (17, 192, 64, False, 86, 99)],
)
def test_the_kernel_compiles_and_fits_into_the_memory_of_small_and_large_cards(
    outputs: int, dim: int, batch_size: int, momentum: bool, capability: int, shared: int
) -> None:
    """``shared``: KiB per thread block. Compiling needs no card. Products in TF32 would be too coarse."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from morecl.nn.kernels import head_steps as kernels

    count, chunk = kernels.chunks(dim, outputs)
    constants = {"D": dim, "CHUNKS": count, "CHUNK": chunk, "OUTPUTS": kernels.padded(outputs), "B": batch_size}
    constants |= {"ROWS": kernels.padded(batch_size), "MOMENTUM": momentum}
    names = kernels._epoch.arg_names
    kinds = dict.fromkeys(("count", "steps", "C"), "i32") | dict.fromkeys(("lr", "momentum"), "fp32")
    kinds |= {"order": "*i32", "targets": "*i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name][0] == "*"}
    options = {"num_warps": kernels.warps(dim, outputs, batch_size)}
    target = GPUTarget("cuda", capability, 32)
    result = compiled(ASTSource(kernels._epoch, signature, values, aligned), target=target, options=options)
    assert result.metadata.shared <= shared * 1024
    assert "tf32" not in result.asm["ptx"] and "mma" not in result.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_a_gpu_an_epoch_in_the_kernel_is_that_of_torch(case: Case) -> None:
    assert head_steps.fits(max(case.widths), case.dim, case.batch_size)
    ours, theirs = (by_fit(case, "cuda", kernel=kernel) for kernel in (True, False))
    check(ours, theirs, case, error=1e-4)
    if case in CASES:
        check(ours, by_numpy(case), case, error=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_repeats_bit_by_bit_and_compiles_once() -> None:
    from morecl.nn.kernels import head_steps as kernels

    case = GPU_CASES[-1]
    once, again = (by_fit(case, "cuda", kernel=True) for _ in range(2))
    assert all(np.array_equal(once[name], again[name]) for name in once)
    versions = kernels._epoch.device_caches[torch.cuda.current_device()][0]
    before = len(versions)
    for widths, count in (((11, 5), 500), ((7,), 64), ((16, 2, 3), 65)):  # other steps, heads and outputs
        by_fit(Case(widths, case.dim, batch_size=64, count=count), "cuda", kernel=True)
    assert len(versions) == before


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_a_gpu_more_with_the_kernel_is_more_without_it(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are trained by the same kernels, so heads alone can differ."""
    settings: dict[str, Any] = {"device": "cuda", "precision": "fp32", "back_update_momentum": momentum}
    run_epoch, used = head_steps.run_epoch, []
    monkeypatch.setattr(head_steps, "run_epoch", lambda *rest: used.append(1) or run_epoch(*rest))
    fast = taught(compile="on", **settings)
    assert len(used) == len(fast[1]) > 0
    monkeypatch.setattr(head_steps, "supports_device", lambda device: False)
    plain = taught(compile="on", **settings)
    assert len(used) == len(fast[1])
    check_learners(fast, plain, rtol=1e-3)
