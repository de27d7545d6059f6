"""Kernels compiled ahead: for a GPU that need not be there, and then found by the launches."""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from morecl.methods import create
from morecl.methods.base import Learner
from morecl.nn import ahead, fused
from morecl.nn.backbone import load_backbone
from morecl.nn.network import AdaptedViT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

SHAPE, NARROW, WIDE = (2, 70, 64), 64, 256  # 70 tokens: a whole tile and a smaller one
KERNELS = {
    "_norm", "_norm_backward", "_attend", "_attend_backward", "_attend_once", "_attend_once_backward",
    "_adapter_gradients", "_mlp_forward", "_mlp_backward", "_under_masks", "_norm_totals", "_adapter_totals", "_steps",
}  # fmt: skip
OF_NARROW, OF_WIDE = {"_adapt", "_adapt_backward"}, {"_adapt_wide", "_adapt_wide_backward", "_attend_sums"}


def blocks(dim: int, count: int = 2) -> list[fused.BlockWeights]:
    shapes = {"attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim), "mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
    weights = {f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    biases = {f"{name}.bias": torch.empty(shape[0], dtype=torch.bfloat16) for name, shape in shapes.items()}
    return [weights | biases for _ in range(count)]


class FakeDriver:
    """An H200 that launches nothing, and tells what it would launch."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.launched: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        self.built.append(src.name)
        return lambda *args: self.launched.append(src.name)

    @property
    def utils(self) -> Any:
        limits = {"max_shared_mem": 227 * 1024}
        return SimpleNamespace(
            get_device_properties=lambda device: limits,
            load_binary=lambda *args: (object(), 1, 100, 0, 1024),
            unload_module=lambda module: None,
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """Meanwhile Triton has this driver and empty caches."""
    from triton import runtime

    from morecl.nn.kernels import adapter, attention, class_token, mlp, norm, sgd, weights, wide

    fake = FakeDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime.driver, "_active", fake)
    for module in (adapter, attention, class_token, mlp, norm, sgd, weights, wide):
        for kernel in vars(module).values():
            if type(kernel) is runtime.jit.JITFunction:
                monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    yield fake


def compile_all(dim: int) -> None:
    from morecl.nn.kernels.compiling import compile_all

    shape = (*SHAPE[:2], dim)
    launches = lambda: ahead.train_without_products(shape, 64, blocks(dim), dim // 32)  # noqa: E731
    contextvars.copy_context().run(compile_all, launches)


def in_turn(dim: int) -> None:
    """The same kernels as launches compile them, one after the other."""
    ahead.train_without_products((*SHAPE[:2], dim), 64, blocks(dim), dim // 32)


@pytest.mark.parametrize(("dim", "own"), [(NARROW, OF_NARROW), (WIDE, OF_WIDE)])
def test_launches_find_what_was_compiled_ahead(
    driver: FakeDriver, dim: int, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    compile_all(dim)
    assert set(driver.built) == KERNELS | own and not driver.launched
    built = len(driver.built)
    missed: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: missed.append(fn.name))
    in_turn(dim)
    assert set(driver.launched) == KERNELS | own and not missed
    assert len(driver.built) == 2 * built  # each once more, from the cache: nothing was compiled for no use
    launched = len(driver.launched)
    compile_all(dim)  # nothing to do, and nothing is launched, least of all with pointers to the CPU
    assert len(driver.built) == 2 * built and len(driver.launched) == launched


@pytest.mark.parametrize("dim", [NARROW, WIDE])
def test_every_launch_asks_for_fused_multiplication_and_addition(
    driver: FakeDriver, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is Triton's default until 3.9, with a warning there, and not later."""
    from triton import knobs

    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)
    compile_all(dim)
    asked = {path.stem: json.loads(path.read_text())["enable_fp_fusion"] for path in tmp_path.rglob("_[a-z]*.json")}
    assert asked.keys() >= KERNELS and all(asked.values())


def test_triton_parses_one_function_at_a_time(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's parser fails by chance if threads use it at once."""
    from triton import JITFunction

    parse, at_once, most = JITFunction.parse, [], []

    def watched(function: Any) -> Any:
        at_once.append(function)
        most.append(len(at_once))
        time.sleep(0.001)  # others may come
        try:
            return parse(function)
        finally:
            at_once.remove(function)

    monkeypatch.setattr(JITFunction, "parse", watched)
    compile_all(NARROW)
    assert len(most) > 20 and max(most) == 1
    assert JITFunction.parse is watched


def test_a_kernel_compiled_ahead_is_that_of_a_launch(driver: FakeDriver, tmp_path: Path) -> None:
    def binaries(compiled: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
        from morecl.nn.kernels import adapter

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        monkeypatch.setattr(
            adapter._adapt, "device_caches", type(adapter._adapt.device_caches)(adapter._adapt.create_binder)
        )
        compiled(NARROW)
        return {path.parent.name + path.name: path.read_bytes() for path in (tmp_path / folder).rglob("_adapt.cubin")}

    with pytest.MonkeyPatch.context() as patch:
        ours = binaries(compile_all, "ahead", patch)
    with pytest.MonkeyPatch.context() as patch:
        theirs = binaries(in_turn, "launch", patch)
    assert len(ours) == 2 and ours == theirs


def test_other_threads_launch_meanwhile(driver: FakeDriver) -> None:
    from morecl.nn.kernels import norm
    from morecl.nn.kernels.compiling import compile_all

    x = torch.empty(4, 64, dtype=torch.bfloat16)

    def launch() -> None:
        norm.forward(x, torch.ones(64), torch.zeros(64), 0.0)

    def launches() -> None:
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()

    contextvars.copy_context().run(compile_all, launches)
    assert driver.launched == ["_norm"]
    launch()
    assert driver.launched == ["_norm", "_norm"]


def test_no_matrix_product_is_computed(driver: FakeDriver) -> None:
    seen = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    with Seen():
        in_turn(NARROW)
    assert "empty" in seen and not {"mm", "addmm", "bmm", "matmul", "baddbmm", "linear"} & seen


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What :func:`ahead.start` compiles, which here is nothing."""
    found: list[Any] = []
    monkeypatch.setattr(ahead, "_asked", set())
    monkeypatch.setattr(fused, "supports_batch", lambda tokens, adapters: adapters.w1.shape[1] <= 128)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(ahead, "compile_all", found.append)
    return found


def test_the_same_shape_is_compiled_once(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, bottleneck in ((SHAPE, 64), (SHAPE, 64), ((4, 70, 64), 64), (SHAPE, 20), (SHAPE, 129)):
        ahead.start(shape, bottleneck, blocks(64), 2)
    ahead.wait()
    assert len(started) == 3
    monkeypatch.setattr(fused, "trains_faster", lambda dim, bottleneck: False)  # torch's compiler trains instead
    ahead.start((8, 70, 64), 64, blocks(64), 2)
    ahead.wait()
    assert len(started) == 3 and not ahead._running


def test_an_error_is_told_where_it_is_waited_for(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launches: object) -> None:
        raise RuntimeError("ptxas is missing")

    monkeypatch.setattr(ahead, "compile_all", fail)
    ahead.start(SHAPE, 64, blocks(64), 2)
    with pytest.warns(UserWarning, match="ahead.*ptxas is missing"):
        ahead.wait()
    ahead.wait()


@pytest.mark.parametrize("name", ["AsyncCompileMode", "JITFunction"])
def test_a_triton_that_lacks_what_is_needed_is_told(
    driver: FakeDriver, started: list[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be imported, and what is not compiled ahead is left to the launches."""
    import triton

    from morecl.nn.kernels import compiling

    monkeypatch.setattr(ahead, "compile_all", compiling.compile_all)
    monkeypatch.delattr(triton, name)
    importlib.reload(compiling)
    ahead.start(SHAPE, 64, blocks(64), 2)
    with pytest.warns(UserWarning, match=f"could not be compiled ahead.*{name}"):
        ahead.wait()
    assert not driver.built and not driver.launched


def test_a_compiler_that_fails_is_an_error(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(src: Any, metadata: Any) -> None:
        raise OSError("no C compiler")

    monkeypatch.setattr(driver, "launcher_cls", refuse)
    for _ in range(2):  # the first failure leaves nothing behind
        with pytest.raises(OSError, match="no C compiler"):
            compile_all(NARROW)


def test_a_task_asks_for_the_kernels_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(AdaptedViT, "compile_ahead", lambda network, *what: asked.append(what))
    data = torch.zeros(4, 8, 8, 3, dtype=torch.uint8).numpy()

    def learned(method: str, **settings: Any) -> Learner:
        learner = create(method, image_size=8, device="cpu", **settings)
        learner.learn_task(data, [0, 1, 0, 1])
        return learner

    learned("more", epochs=1, batch_size=2, bottleneck=4)
    assert asked == [(2, 4)]
    learned("ncm")  # trains nothing
    learned("more", epochs=1, batch_size=2, bottleneck=4, freeze_backbone=False)
    assert asked == [(2, 4)]


@pytest.mark.gpu
def test_on_a_gpu_training_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a bottleneck that no other test uses with these images, so that its kernels are new here."""
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    data = torch.zeros(32, 36, 36, 3, dtype=torch.uint8).numpy()
    learner = create("more", image_size=36, epochs=1, batch_size=32, bottleneck=100, device="cuda", precision="bf16")
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, fn, is_manual_warmup, **_: compiled.append(
        f"{fn.name} {'ahead' if is_manual_warmup else 'late'}"
    ))  # fmt: skip
    learner.learn_task(data, [0, 1] * 16)
    assert compiled and all(name.endswith("ahead") for name in compiled)


def test_several_threads_may_wait_and_a_failure_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_threads = threading.Barrier(4)

    class Failed(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException:
            waiting_threads.wait(60)  # all have seen it in the list
            return RuntimeError("no ptxas")

    monkeypatch.setattr(ahead, "_running", [Failed()])
    told: list[object] = []
    monkeypatch.setattr(ahead.warnings, "warn", lambda text, **_: told.append(text))
    with ThreadPoolExecutor(4) as pool:
        assert [waiting.result() for waiting in [pool.submit(ahead.wait) for _ in range(4)]] == [None] * 4
    assert not ahead._running and len(told) == 1 and "no ptxas" in str(told[0])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A CPU that passes for a GPU; what is asked of the kernels and of their compilation."""
    asked: list[Any] = []
    monkeypatch.setattr(fused, "supports_batch", lambda *_: True)
    monkeypatch.setattr(
        ahead, "start", lambda shape, bottleneck, frozen, heads: asked.append((shape, bottleneck, heads))
    )
    monkeypatch.setattr(ahead, "wait", lambda: asked.append("wait"))
    monkeypatch.setattr(fused, "trunk", lambda tokens, *_: asked.append(tuple(tokens.shape)) or tokens[:, 0])
    return asked


def test_training_compiles_for_its_tokens_and_the_trunk_waits(on_a_gpu: list[Any]) -> None:
    vit = AdaptedViT(load_backbone("vit_mini_patch4_32", image_size=8).vit, kernels=True)
    vit.compile_ahead(3, 16)
    tokens = torch.zeros(3, 5, 192)  # a class token and four patches
    vit.trunk(tokens, vit.new_norms(), vit.new_adapters(16).weights())
    assert on_a_gpu == [((3, 5, 192), 16, 3), "wait", (3, 5, 192)]


def test_where_kernels_are_interpreted_none_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from morecl.nn.kernels import compiling

    monkeypatch.setattr(compiling.triton, "JITFunction", type("Other", (), {}))
    with pytest.raises(RuntimeError, match="interprets the kernels"):
        compiling.compile_all(lambda: pytest.fail("launched"))
