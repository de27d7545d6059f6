"""Linear layers by oneDNN: as exact as torch's, with the same gradients, and only where they are faster."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tiny
from morecl.nn import linear, signal_stack

here = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="needs oneDNN")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


@pytest.fixture()
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN is used, whatever the CPU. The shapes of the inputs it was used for."""
    shapes: list[tuple[int, ...]] = []
    product = linear._product

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(linear, "is_faster", lambda: True)
    monkeypatch.setattr(linear, "_product", noted)
    return shapes


def parameters(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    return weight.requires_grad_(), bias.requires_grad_()


@here
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 17, 24), (5, 24), (1, 1, 24), (2, 3, 4, 24)])
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], with_bias: bool, used: list[tuple[int, ...]]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, bias = parameters(40, 24)
    given = [x, weight, bias] if with_bias else [x, weight]
    exact = [part.detach().double().requires_grad_() for part in given]
    y, expected = linear.linear(*given), F.linear(*exact)
    assert used == [shape] and y.dtype == torch.float32 and y.shape == expected.shape
    assert torch.allclose(y.double(), expected, atol=1e-5)
    found = torch.autograd.grad(y.sin().sum(), given)
    for mine, true in zip(found, torch.autograd.grad(expected.sin().sum(), exact), strict=True):
        assert torch.allclose(mine.double(), true, atol=1e-4)
    assert len(used) == 3  # the gradients of x and of the weights, too


@here
def test_gradients_have_gradients(used: list[tuple[int, ...]]) -> None:
    """A second gradient of the input, through the first one of the weights."""

    def second(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = linear.linear(x, weight, bias) if x.dtype == torch.float32 else F.linear(x, weight, bias)
        first = torch.autograd.grad(y.sin().sum(), [weight, bias], create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), x)[0]  # type: ignore[arg-type]

    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = [x, *parameters(4, 5)]
    expected = second(*(part.detach().double().requires_grad_() for part in given))
    assert torch.allclose(second(*given).double(), expected, rtol=1e-4, atol=1e-4)


@here
def test_of_a_frozen_layer_only_the_input_has_a_gradient(used: list[tuple[int, ...]]) -> None:
    weight, bias = (part.detach() for part in parameters(4, 5))
    x = torch.randn(6, 5).requires_grad_()
    linear.linear(x, weight, bias).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.sum(0).expand(6, 5), atol=1e-5)
    assert len(used) == 2
    assert not linear.linear(x.detach(), weight, bias).requires_grad


@here
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's, of its own switch
@pytest.mark.parametrize("case", ["float64", "empty", "elsewhere", "off", "inside"])
def test_torch_computes_what_onednn_cannot_or_may_not(case: str, used: list[tuple[int, ...]]) -> None:
    weight, bias = (part.detach() for part in parameters(4, 5))
    x = torch.randn(6, 5)
    if case == "float64":
        x, weight, bias = x.double(), weight.double(), bias.double()
    if case == "empty":
        x = x[:0]
    if case == "elsewhere":
        x, weight, bias = x.to("meta"), weight.to("meta"), bias.to("meta")
    expected = F.linear(x, weight, bias)
    with torch.backends.mkldnn.flags(enabled=case != "off"), linear.torchs_own(case == "inside"):  # type: ignore[no-untyped-call]
        found = linear.linear(x, weight, bias)
    assert found.shape == expected.shape and not used
    assert case == "elsewhere" or torch.equal(found, expected)


@here
def test_it_is_turned_off_in_one_thread_and_for_a_while(used: list[tuple[int, ...]]) -> None:
    weight, x = parameters(4, 5)[0].detach(), torch.randn(6, 5)
    with linear.torchs_own(), linear.torchs_own(False):
        other = threading.Thread(target=linear.linear, args=(x, weight))
        other.start()
        other.join()
        assert len(used) == 1
        linear.linear(x, weight)
        assert len(used) == 1
    linear.linear(x, weight)
    assert len(used) == 2


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", None])
def test_who_made_the_cpu(vendor: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD")
    if vendor:
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert linear.is_amd(file) == (vendor != "GenuineIntel")


@pytest.mark.parametrize("missing", ["AVX512", "AMD", "MKL"])
def test_it_is_faster_only_where_mkl_leaves_avx512_unused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2" if missing == "AVX512" else "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: missing != "MKL")
    monkeypatch.setattr(linear, "is_amd", lambda: missing != "AMD")
    assert not linear.is_faster.__wrapped__()


@here
def test_a_network_with_adapters_uses_it_in_all_its_layers(
    used: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = tiny.create("more")
    x, y = tiny.pictures(0, 8), [0, 1] * 4
    learner.learn_task(x, y)
    network, net = learner.network, learner.tasks[0]  # type: ignore[attr-defined]
    tokens = learner.prepare(x).range(0, 8)
    adapters = learner.adapters.weights()  # type: ignore[attr-defined]
    used.clear()
    with torch.no_grad():
        features = network.trunk(tokens, net.norms, adapters)
        # a block: qkv or q and k with v, proj, fc1, fc2, and two layers in each of two adapters; the last divides qkv
        assert len(used) == 8 * network.depth + 1
        plain = network.trunk(tokens, net.norms, adapters, plain=True)
    assert len(used) == 8 * network.depth + 1
    assert torch.allclose(features, plain, atol=1e-5)
    linears = [module for module in network.block.modules() if isinstance(module, nn.Linear)]
    assert linears and all(type(module) is linear.Linear for module in linears)


STORM = """
import signal, torch
from morecl.nn import linear
linear.is_faster = lambda: True
generator = torch.Generator().manual_seed(0)
pairs = [[torch.randn(size, 192, generator=generator) for size in sizes] for sizes in ((33, 10), (1000, 768))]
pairs += [[part.t().contiguous().t() for part in pair] for pair in pairs]
expected = [linear.linear(*pair) for pair in pairs]
arrived = []
signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
while len(arrived) < 1000:
    assert all(torch.equal(linear.linear(*pair), y) for pair, y in zip(pairs, expected))
signal.setitimer(signal.ITIMER_REAL, 0)
print("the heap is whole")
"""


@here
@on_linux
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other products have no such stack")
def test_a_signal_during_a_product_leaves_the_heap_as_it_is() -> None:
    """Without a stack for signal handlers the process is aborted: oneDNN's own stack is on the heap then."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, "-c", STORM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "the heap is whole\n", done.stderr


@here
@on_linux
def test_every_thread_that_multiplies_has_a_stack_for_signal_handlers(used: list[tuple[int, ...]]) -> None:
    found: list[bool] = []

    def work() -> None:
        found.append(signal_stack.present())
        linear.linear(torch.ones(2, 3), torch.ones(4, 3))
        found.append(signal_stack.present())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [False, True, False, True] and len(used) == 2


@on_linux
def test_the_stack_of_a_thread_is_given_back_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread itself, in its last moments, unless somebody else has put another stack in its place."""
    found: list[tuple[int, bool]] = []

    class Watched(signal_stack._Own):
        def __del__(self) -> None:
            super().__del__()
            found.append((threading.get_ident(), signal_stack.present()))

    monkeypatch.setattr(signal_stack, "_Own", Watched)
    others = ctypes.create_string_buffer(signal_stack.SIZE)

    def work(replaced: bool) -> None:
        signal_stack.ensure()
        if replaced:
            signal_stack._call(signal_stack._Stack(ctypes.addressof(others), 0, signal_stack.SIZE), None)

    for replaced in (False, True):
        thread = threading.Thread(target=work, args=(replaced,))
        thread.start()
        thread.join()
        assert found.pop() == (thread.ident, replaced) and not found


@on_linux
def test_a_process_ends_without_a_word_of_its_stack() -> None:
    code = "from morecl.nn.linear import signal_stack as s; s.ensure(); assert s.present()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
