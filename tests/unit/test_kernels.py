"""What compiled half-precision training computes in its own way, against float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from morecl.nn.adapter import adapter_kernels
from morecl.nn.backbone import load_backbone
from morecl.nn.gelu import Gelu, gelu
from morecl.nn.network import AdaptedViT
from morecl.random import generator

HERE = os.path.dirname(__file__)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SHAPES = [(70, 128, 16), (600, 192, 64)]  # tokens, dimensions, bottleneck: no whole tile; more than one part
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding, and some sums


def adapter_errors(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest relative errors (norm over norm) of an adapter's output and gradients against float64."""
    count, dim, k = shape
    draw = generator(0, "adapter")
    h, g = (torch.randn(2, count // 2, dim, generator=draw).to(device, dtype) for _ in range(2))
    shapes = {"w1": (k, dim), "b1": (k,), "w2": (dim, k), "b2": (dim,)}
    weights = [(0.1 * torch.randn(shape, generator=draw)).to(device, dtype) for shape in shapes.values()]
    results: list[list[Tensor]] = []
    for exact in (False, True):
        leaves = [(t.double() if exact else t).requires_grad_() for t in (h, *weights)]
        x, w1, b1, w2, b2 = leaves
        out = x + F.linear(F.relu(F.linear(x, w1, b1)), w2, b2) if exact else adapter_kernels.adapter(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, g.to(out.dtype))])
    pairs = zip(("out", "h", *shapes), *results, strict=True)
    return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in pairs}


@needs_triton
def test_an_adapter_in_kernels_is_that_of_float64() -> None:
    """By Triton's interpreter, which must be asked for before the kernels are made, and knows no bfloat16."""
    program = f"""
import sys, torch; sys.path[:0] = [{HERE!r}, {os.path.dirname(HERE)!r}]
from test_kernels import ROUNDING, SHAPES, adapter_errors
for dtype in (torch.float32, torch.float16):
    for shape in SHAPES:
        for name, error in adapter_errors(shape, dtype, "cpu").items():
            assert error < ROUNDING[dtype], (shape, dtype, name, error)
print("checked")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "checked", done.stderr


@needs_triton
@pytest.mark.parametrize(("capability", "shared"), [(86, 99), (90, 227)])
def test_the_kernels_compile_for_small_and_large_cards_and_fit_them(capability: int, shared: int) -> None:
    """``shared``: KiB of fast memory that a block may have, by NVIDIA's tables. No card is needed to compile."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {"D": 128, "K": 128, "TILE": adapter_kernels.TILE, "CHUNK": adapter_kernels.CHUNK}
    kernels = [(adapter_kernels._through_bottleneck, sizes | {"BACKWARD": backward}) for backward in (False, True)]
    kernels.append((adapter_kernels._weight_gradients, sizes | {"PART": adapter_kernels.PART}))
    kinds = {"sums": "*fp32"} | dict.fromkeys(("count", "in_d", "in_k", "out_d", "out_k"), "i32")
    for kernel, constants in kernels:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name][0] == "*"}
        result = compiled(ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", capability, 32))
        assert result.metadata.shared <= shared * 1024


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (2 * 64 * 197, 192, 64), (500, 384, 128)])
def test_on_a_gpu_an_adapter_in_kernels_is_that_of_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for name, error in adapter_errors(shape, dtype, "cuda").items():
        assert error < ROUNDING[dtype], (name, error)


@needs_triton
def test_the_kernels_are_for_half_precision_on_a_gpu_and_widths_they_know() -> None:
    def fits(dtype: torch.dtype, *shape: int, is_cuda: bool = True) -> bool:
        tokens = SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        return bool(adapter_kernels.fits(tokens, torch.empty(shape)))  # type: ignore[arg-type]

    assert fits(torch.bfloat16, 64, 192) and fits(torch.float16, 16, 64)
    assert not fits(torch.bfloat16, 64, 192, is_cuda=False)
    assert not fits(torch.float32, 64, 192)
    assert not fits(torch.bfloat16, 48, 192) and not fits(torch.bfloat16, 64, 200)
    assert fits(torch.bfloat16, 128, 384) and not fits(torch.bfloat16, 128, 768)
    assert not fits(torch.bfloat16, 2, 64, 192)  # of several tasks at once


def test_gelu_is_that_of_float64() -> None:
    """Phi is right to 1e-7, times |x| up to 12; and single precision rounds."""
    x = torch.linspace(-12, 12, 100_001, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    for ours, theirs in (
        (gelu(x), F.gelu(exact)),
        (torch.autograd.grad(gelu(x).sum(), x)[0], torch.autograd.grad(F.gelu(exact).sum(), exact)[0]),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-7, atol=5e-7)
    assert Gelu()(x).equal(F.gelu(x))  # uncompiled, and in single precision, it is torch's


@needs_gpu
def test_on_a_gpu_compiled_training_in_bfloat16_is_near_the_plain_one() -> None:
    """Gradients of the first norms and adapters are behind the roundings of six blocks, of 0.4 % each, and so one to
    three percent from those of float32. The fast path must be as near as the plain one in the same precision; a draw
    of other roundings makes a third of that more or less."""
    backbone = load_backbone("vit_mini_patch4_32")
    images = torch.randn(8, 3, 32, 32, generator=generator(0, "images")).cuda()
    results = []
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        vit = AdaptedViT(backbone.vit.cuda(), dtype)
        adapters, norms = vit.new_adapters(64).cuda(), vit.new_norms().cuda()
        adapters.initialise(generator(0, "adapters"))
        torch.nn.init.normal_(adapters.w2, std=0.02, generator=torch.Generator("cuda").manual_seed(0))
        features = vit.trunk(vit.stem(images), norms, adapters.weights(), compiled=compiled)
        gradients = torch.autograd.grad(features.square().sum(), [*norms.parameters(), *adapters.parameters()])
        results.append([features.detach(), *gradients])
    for exact, plain, fast in zip(*results, strict=True):
        plain_error, fast_error = ((value - exact).norm() / exact.norm() for value in (plain, fast))
        assert fast_error < 2 * plain_error
