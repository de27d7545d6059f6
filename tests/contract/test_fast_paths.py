"""Compiled blocks and captured steps give the same results as plain code, with every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from morecl import training
from morecl.bench import speed
from morecl.methods import METHODS, Learner, base
from morecl.methods.prototypes import PrototypeLearner
from morecl.nn import capture, fused, gelu, network
from morecl.nn.adapter import AdapterWeights
from morecl.nn.backbone import load_backbone
from morecl.nn.linear import torchs_own
from morecl.random import generator
from morecl.training import Batch

COUNT = 13  # per class, of two classes: three full batches and a remainder
TASKS = [tiny.task(kinds, kinds, COUNT) for kinds in ([0, 1], [2, 3], [4, 5])]
TEST = np.concatenate([tiny.pictures(kind, 4, draw=1) for kind in range(6)])
WITHOUT_ADAPTERS = {name for name, cls in METHODS.items() if issubclass(cls, PrototypeLearner)}


def taught(method: str, captured: bool | None = None, **changes: Any) -> Learner:
    epochs = {"epochs": 2} if METHODS[method].Config().trains else {}
    learner = tiny.create(method, **epochs, **changes)
    if captured is not None:
        learner.captured = captured
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    return learner


class Rehearsal:
    """A stand-in for a CUDA graph on any device: the step runs on its own buffers, after warm-up steps on the first
    batch whose effects are undone for the tensors in ``changed`` only."""

    made = 0

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, changed: Sequence[Tensor]):
        type(self).made += 1
        self.shapes = [part.shape for part in batch]
        self.step = step
        self.inputs = tuple(part.clone() for part in batch)
        before = [tensor.clone() for tensor in changed]
        for _ in range(capture.WARM_UP_STEPS):
            step(self.inputs)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    def __call__(self, batch: Batch) -> Tensor:
        for buffer, part in zip(self.inputs, batch, strict=True):
            buffer.copy_(part)
        return self.step(self.inputs)


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if method.Config().trains))
def test_a_step_can_be_captured_and_depends_only_on_its_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step changes only what the optimiser changes; anything else would still be there after the warm-up.

    Tolerance: a last batch padded with images of weight 0 is summed in another order.
    """
    plain = taught(method)
    monkeypatch.setattr(training, "CapturedStep", Rehearsal)
    monkeypatch.setattr(Rehearsal, "made", 0)
    captured = taught(method, captured=True)
    assert Rehearsal.made >= (1 if method == "ranpac" else len(TASKS))  # which trains in the first task only
    np.testing.assert_allclose(captured.scores(TEST), plain.scores(TEST), rtol=1e-4, atol=1e-5)
    assert captured.memory.labels == plain.memory.labels


def test_hals_anchors_are_found_by_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = taught("hal", anchor_steps=4)
    monkeypatch.setattr(training, "CapturedStep", Rehearsal)
    monkeypatch.setattr(Rehearsal, "made", 0)
    counts = []
    for steps in (1, 4):  # a single step is not captured
        before = Rehearsal.made
        captured = taught("hal", captured=True, anchor_steps=steps)
        counts.append(Rehearsal.made - before)
    assert counts[1] == counts[0] + len(TASKS)
    anchors = [learner.state()["model.anchors.images"] for learner in (plain, captured)]
    torch.testing.assert_close(*anchors, rtol=1e-4, atol=1e-4)


@torchs_own()
def test_compiled_blocks_are_traced_to_the_same_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward as ``torch.compile`` traces them, without code generation; one graph for all blocks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = network._compiled_block("aot_eager")
    monkeypatch.setattr(network, "_compiled_block", lambda: traced)
    vit = network.AdaptedViT(load_backbone("vit_mini_patch4_32", image_size=8).vit)
    adapters = vit.new_adapters(4)
    adapters.initialise(generator(0, "adapters"))
    torch.nn.init.normal_(adapters.w2, std=0.1, generator=generator(0, "w2"))
    tokens = torch.randn(3, 5, 192, generator=generator(0, "tokens"))
    results = []
    for compiled in (False, True):
        norms = vit.new_norms()
        features = vit.trunk(tokens, norms, adapters.weights(), compiled=compiled)
        gradients = torch.autograd.grad(features.square().sum(), [*norms.parameters(), *adapters.parameters()])
        results.append([features.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    graphs = torch._dynamo.utils.counters["stats"]
    assert graphs["unique_graphs"] == 1
    for batch in (2, 7):
        vit.trunk(torch.randn(batch, 5, 192), vit.new_norms(), adapters.weights(), compiled=True).sum().backward()
    assert graphs["unique_graphs"] == 1  # for all batch sizes
    with torch.no_grad():
        for length in range(6, 16):  # more than torch recompiles by default
            vit.trunk(torch.randn(3, length, 192), vit.new_norms(), adapters.weights(), compiled=True)
    assert graphs["unique_graphs"] == 11


def test_compiled_blocks_use_our_gelu_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: another function stands for our GELU."""
    torch._dynamo.reset()
    traced = network._compiled_block("aot_eager")
    monkeypatch.setattr(network, "_compiled_block", lambda: traced)
    vit = network.AdaptedViT(load_backbone("vit_mini_patch4_32", image_size=8).vit)
    adapters = vit.new_adapters(16)
    tokens = torch.randn(3, 5, 192, generator=generator(0, "tokens"))

    def features(compiled: bool) -> Tensor:
        return vit.trunk(tokens, vit.new_norms(), adapters.weights(), compiled=compiled).detach()

    plain = features(compiled=False)
    torch.testing.assert_close(features(compiled=True), plain)
    torch._dynamo.reset()
    monkeypatch.setattr(gelu, "is_faster", lambda x: True)
    monkeypatch.setattr(gelu, "gelu", lambda x: 2 * x)
    assert features(compiled=False).equal(plain)
    assert not features(compiled=True).allclose(plain, rtol=0.1)


@pytest.mark.parametrize(("compile_", "used"), [("on", True), ("off", False)])
def test_learners_use_kernels_if_they_compile(compile_: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    assert tiny.create("more", compile=compile_).network.kernels is used


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_works_if_the_trunk_is_a_single_operation(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the kernels, nothing inside it can be seen. A second network stands for them and computes the same."""
    plain = taught(method)
    second = network.AdaptedViT(plain.backbone.vit)
    calls = 0

    def trunk(x: Tensor, norms: tuple[Tensor, Tensor], adapters: AdapterWeights, *rest: Any) -> Tensor:
        nonlocal calls
        calls += 1
        *_, observe_last, masks = rest
        return second._plain_trunk(
            x, norms, adapters if masks is None else adapters.under(masks), None, False, observe_last
        )

    monkeypatch.setattr(fused, "supports_batch", lambda x, adapters: adapters.w1.dim() == 3)
    monkeypatch.setattr(fused, "trunk", trunk)
    monkeypatch.setattr(network.ahead, "start", lambda *_: None)  # there is nothing to compile
    monkeypatch.setattr(network.fused, "supports_block", lambda block: True)
    monkeypatch.setattr(base, "resolve_compile", lambda name, device: True)
    monkeypatch.setattr(network, "_compiled_block", lambda: network._call)
    whole = taught(method, compile="on")
    np.testing.assert_allclose(whole.scores(TEST), plain.scores(TEST), rtol=1e-4, atol=1e-5)
    assert (calls > 0) == (method not in WITHOUT_ADAPTERS)


@pytest.mark.parametrize("compile_", ["on", "off"])
@pytest.mark.parametrize("method", ["more", "row", "tpl", "joint"])
def test_the_optimisers_use_our_kernel_if_the_learner_compiles(
    method: str, compile_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(training.ProtectedSGD, "use_kernel", lambda optimizer: asked.append(optimizer))
    monkeypatch.setattr(base, "resolve_compile", lambda name, device: name == "on")
    monkeypatch.setattr(network, "_compiled_block", lambda: network._call)
    taught(method, compile=compile_)
    assert bool(asked) == (compile_ == "on")


def test_arithmetic_is_counted_on_the_plain_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught("more")
    monkeypatch.setattr(fused, "supports_batch", lambda x, adapters: True)
    monkeypatch.setattr(fused, "trunk", lambda *rest: pytest.fail("its operations cannot be counted"))
    before = speed.training_flop(learner)
    learner.network._fused = True
    assert speed.training_flop(learner) == before > 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", sorted(METHODS))
def test_on_a_gpu_fast_and_plain_training_agree(method: str) -> None:
    """Both in float32; compiled kernels round differently, and a few training steps amplify that."""
    settings = {"device": "cuda", "precision": "fp32"}
    plain, fast = taught(method, compile="off", **settings), taught(method, compile="on", **settings)
    assert fast.captured and not plain.captured
    np.testing.assert_allclose(fast.scores(TEST), plain.scores(TEST), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_bfloat16_features_are_close() -> None:
    """8 bits of mantissa: 0.4 % per rounding, dozens of roundings in a row, features of size 1."""
    exact, rounded = (taught("more", device="cuda", precision=precision) for precision in ("fp32", "bf16"))
    rounded.restore(exact.classes, exact.task_sizes, exact.state())
    assert np.abs(exact.features(TEST) - rounded.features(TEST)).mean() < 0.05
