"""The kernels for half precision on a GPU, and GELU for compiled code, against float64."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from morecl import training
from morecl.nn import fused
from morecl.nn.adapter import AdapterWeights
from morecl.nn.backbone import load_backbone
from morecl.nn.gelu import Gelu, gelu
from morecl.nn.network import AdaptedViT
from morecl.random import generator
from preloaded import preloaded

HERE = os.path.dirname(__file__)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# images, image size in patches of 4 pixels, dimensions, heads, bottleneck. Tokens (patches and a class token) fill one
# tile and part of another, less than a tile, exactly one; all supported widths of heads and bottlenecks, with padding;
# the last one is wide
SHAPES = [(2, (8, 9), 192, 3, 64), (3, (2, 5), 128, 4, 20), (1, (7, 9), 64, 4, 128), (2, (5, 7), 256, 8, 64)]
GPU_SHAPES = [*SHAPES, (9, (14, 14), 384, 6, 64), (5, (14, 14), 768, 12, 128), (32, (14, 14), 192, 3, 64)]
EPS = 1e-6, 1e-2  # of the blocks' norms and of the last norm
# float32 rounds by 6e-8, which grows to this through two blocks; a wrong gradient of any part is far larger
FLOAT32_ERROR = 5e-6
# Half precision rounds activations about ten times per block. The plain trunk in the same precision shows how large
# that error is. A tight comparison needs neurons far from zero (``MARGIN``).
TIMES_PLAIN = 2
MARGIN = 40.0  # added to or subtracted from the biases of the adapters' neurons
# Without it, rounding also switches neurons close to zero on or off. A few such neurons make most of the error, which
# then differs tenfold between seeds: medians of nine seeds were up to four times apart, in both directions.
# A neuron that opens for the wrong token is an error of the size of the gradient, far above this.
SEEDS, TIMES_PLAIN_SWITCHING = 9, 6

Shape = tuple[int, tuple[int, int], int, int, int]


def known(x: Tensor) -> Tensor:
    """Rounded to what all precisions can represent, so that they start from the same numbers."""
    return x.bfloat16().float()


def results(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    kernels: bool,
    margin: float = 0.0,
    seed: int = 0,
    masked: bool = False,
) -> dict[str, Tensor]:
    """Features and all gradients of a small random network, computed by the kernels or by the plain trunk.

    ``margin`` keeps the adapters' neurons away from zero: every second one is open for all tokens, the others closed.
    """
    images, size, dim, heads, bottleneck = shape
    exact = dtype == torch.float64
    pixels = (4 * size[0], 4 * size[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = VisionTransformer(pixels, patch_size=4, embed_dim=dim, depth=2, num_heads=heads, num_classes=0)
        vit.norm.eps = EPS[1]
        for parameter in vit.parameters():  # large enough that no part is negligible
            parameter.data = known(0.1 * torch.randn(parameter.shape))
    adapted = AdaptedViT(vit.to(device, torch.float64 if exact else None).eval(), dtype, kernels=kernels)
    draw = generator(seed, "kernels")
    x = torch.randn(images, size[0] * size[1] + 1, dim, generator=draw)
    places = adapted.depth * 2
    shapes = {"w": (places + 1, dim), "v": (places + 1, dim)}
    shapes |= {"w1": (places, bottleneck, dim), "b1": (places, bottleneck)}
    shapes |= {"w2": (places, dim, bottleneck), "b2": (places, dim)}
    parts = {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    parts["w"] += 1
    parts["b1"][:, ::2] += margin
    parts["b1"][:, 1::2] -= margin
    if masked:
        parts["masks"] = torch.rand(places, bottleneck + dim, generator=draw) + 0.1
    leaves = {name: known(part).to(device, torch.float64 if exact else torch.float32) for name, part in parts.items()}
    leaves["x"] = known(x).to(device, dtype)
    for leaf in leaves.values():
        leaf.requires_grad_()
    norms = leaves["w"], leaves["v"]
    adapters = AdapterWeights(*(leaves[name] for name in AdapterWeights._fields))
    masks = leaves.get("masks")
    if kernels:
        features = fused.trunk(leaves["x"], norms, adapters, adapted._frozen, heads, EPS, masks=masks).float()
    else:
        features = adapted.trunk(leaves["x"], norms, adapters, masks=masks, plain=True)
        features = features.to(torch.float64 if exact else torch.float32)
    g = torch.randn(features.shape, generator=draw).to(features)
    gradients = torch.autograd.grad(features, list(leaves.values()), g)
    return {"features": features.detach(), **dict(zip(leaves, gradients, strict=True))}


def errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors (norm over norm) of the features and gradients."""
    return {name: float((ours[name].double() - want).norm() / want.norm()) for name, want in exact.items()}


def check_float32(shape: Shape, device: str, *, masked: bool) -> None:
    exact = results(shape, torch.float64, device, kernels=False, masked=masked)
    for name, error in errors(results(shape, torch.float32, device, kernels=True, masked=masked), exact).items():
        assert error < FLOAT32_ERROR, (shape, masked, name, error)


def check_half(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    margin: float = MARGIN,
    seeds: int = 1,
    times: float = TIMES_PLAIN,
    kinds: Sequence[bool] = (False, True),
) -> None:
    """With and without masks the error of the kernels is about that of the plain trunk in the same precision, by the
    geometric mean over seeds."""
    for masked in kinds:
        of_plain, of_kernels = [], []
        for seed in range(seeds):
            same: dict[str, Any] = {"margin": margin, "seed": seed, "masked": masked}
            exact = results(shape, torch.float64, device, kernels=False, **same)
            of_plain.append(errors(results(shape, dtype, device, kernels=False, **same), exact))
            of_kernels.append(errors(results(shape, dtype, device, kernels=True, **same), exact))
        for name in of_plain[0]:
            plain, ours = (statistics.geometric_mean(each[name] for each in found) for found in (of_plain, of_kernels))
            assert ours < times * plain, (shape, dtype, masked, name, ours, plain)


def small() -> VisionTransformer:
    """A small random ViT for (B, 5, 64) tokens, whose last norm has another eps than the blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(8, patch_size=4, embed_dim=64, depth=2, num_heads=4, num_classes=0).eval()
    vit.norm.eps = EPS[1]
    return vit.requires_grad_(False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    """Runs a program in Triton's interpreter, which must be enabled before the kernels are defined.

    It does not know bfloat16.
    """

    paths = os.pathsep.join([HERE, *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with preloaded(tmp_path_factory.mktemp("interpreter"), environment) as commands:

        def run(program: str) -> None:
            whole = ["from test_kernels import *", program, 'print("checked")']
            command = [commands / "python", "-c", "\n".join(whole)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.stdout.strip() == "checked", done.stderr

        yield run


@needs_triton
def test_the_trunk_in_kernels_is_that_of_float64(interpreted: Callable[[str], None]) -> None:
    interpreted("""
for shape in SHAPES:
    check_float32(shape, "cpu", masked=True)
check_float32(SHAPES[1], "cpu", masked=False)  # padded
check_float32(SHAPES[2], "cpu", masked=False)
check_half(SHAPES[0], torch.float16, "cpu", kinds=[True])
""")


@needs_triton
def test_without_gradients_nothing_is_saved_and_the_features_are_the_same(interpreted: Callable[[str], None]) -> None:
    interpreted("""
from morecl.nn.linear import torchs_own
adapted = AdaptedViT(small(), kernels=True)
adapters, norms = adapted.new_adapters(16), adapted.new_norms()
adapters.initialise(generator(0, "adapters"))
torch.nn.init.normal_(adapters.w2, std=0.1, generator=generator(0, "w2"))
tokens = torch.randn(3, 5, adapted.dim, generator=generator(0, "tokens"))
rest = (norms.weight, norms.bias), adapters.weights(), adapted._frozen, adapted.block.attn.num_heads, EPS
with_gradient = fused.trunk(tokens, *rest)
kept = []
with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
    without = fused.trunk(tokens, *rest)
assert without.equal(with_gradient) and not without.requires_grad and len(kept) < 10
plain = adapted.trunk(tokens, norms, adapters.weights(), plain=True)
torch.testing.assert_close(without, plain, rtol=1e-4, atol=1e-5)
with torchs_own():
    assert adapted.trunk(tokens, norms, adapters.weights()).equal(plain)  # on a CPU they are not used
""")


@needs_triton
def test_a_network_passes_to_the_kernels_what_they_need(interpreted: Callable[[str], None]) -> None:
    """With gradients of everything, or of the tokens, norms or adapters only."""
    interpreted("""
fused.supports_batch = lambda x, adapters: True
adapted = AdaptedViT(small(), kernels=True)
adapters, norms = adapted.new_adapters(16), adapted.new_norms()
for part in (*adapters.parameters(), *norms.parameters()):
    part.data += 0.1 * torch.randn(part.shape, generator=generator(0, "parts"))
tokens = torch.randn(3, 5, adapted.dim, generator=generator(0, "tokens"))
groups = [[tokens], list(norms.parameters()), list(adapters.parameters())]
for learning in (groups, groups[:1], groups[1:2], groups[2:]):
    leaves = [leaf for group in learning for leaf in group]
    for leaf in (leaf for group in groups for leaf in group):
        leaf.requires_grad_(any(leaf is other for other in leaves))
    results = []
    for plain in (False, True):
        features = adapted.trunk(tokens, norms, adapters.weights(), plain=plain)
        results.append([features, *torch.autograd.grad(features.square().sum(), leaves)])
    assert not results[0][0].equal(results[1][0])  # computed in two ways
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()
""")


@needs_triton
@pytest.mark.parametrize("dim", [64, 320])
def test_many_tokens_are_summed_part_by_part(interpreted: Callable[[str], None], dim: int) -> None:
    """More tokens than in the networks above: several parts, the last one not full."""
    interpreted(
        f"dim, k = {dim}, 64"
        """
from morecl.nn.kernels import adapter, norm
def close(one, other):
    assert (one - other).norm() < 1e-5 * other.norm()
draw = generator(0, "parts")
adapter.PART = 128
part = norm._part(10**5, dim)
count = 101 * part + 1
x, g, passed, w = (torch.randn(*shape, generator=draw) for shape in ((count, dim),) * 3 + ((dim,),))
_, moments = norm.forward(x, w, w, 1e-6)
sums = torch.empty(norm.parts(count, dim))
assert len(sums) == 102
d = norm.backward(g, passed, x, moments, w, sums)
x.requires_grad_(), w.requires_grad_()
v = torch.zeros(dim, requires_grad=True)
exact = torch.autograd.grad(F.layer_norm(x, (dim,), w, v, 1e-6), (x, w, v), g)
for one, other in zip((d - passed, *sums.sum(0)), exact, strict=True):
    close(one, other)
count = 2 * adapter.PART + 1
d, y, r, p = (torch.randn(count, width, generator=draw) for width in (dim, dim, k, k))
sums = torch.empty(adapter.parts(count, dim, k))
adapter.gradients(d, r, y, p, sums)
dw2, dw1, db2, db1 = sums.sum(0).split([dim * k, k * dim, dim, k])
close(dw2.view(dim, k), d.T @ r), close(dw1.view(k, dim), p.T @ y), close(db2, d.sum(0)), close(db1, p.sum(0))
"""
    )


@needs_triton
@pytest.mark.parametrize(("dim", "k"), [(384, 64), (768, 128)])
def test_the_kernels_for_wide_tokens_are_float64s(interpreted: Callable[[str], None], dim: int, k: int) -> None:
    """The mean of the sum is far above its standard deviation: a variance from sums of squares would be inexact."""
    interpreted(f"""
from morecl.nn.kernels import attention, wide
def close(one, other, error=1e-6):
    assert (one.double() - other).norm() < error * other.norm()
count, dim, k = wide.TILE + 3, {dim}, {k}
draw = generator(0, "wide")
def random(*shape):
    return torch.randn(*shape, generator=draw)
y, x, d, bias, b2, w, v = *(random(count, dim) for _ in range(3)), *(random(dim) for _ in range(4))
x[:, ::3] += 200
x[:, 1::3] += 203
x[:, 2::3] += 206
adapter = AdapterWeights(w1=random(k, dim), b1=random(k), w2=0.01 * random(dim, k), b2=b2)
r, total, normed, moments = wide.forward(y, x, bias, adapter, (w, v), 1e-6)
p, dh = wide.backward(d, r, adapter)
w1, b1, w2, b2, y, x, d, bias, w, v = (part.double() for part in (*adapter, y, x, d, bias, w, v))
h = y + bias
exact_r = (h @ w1.T + b1).relu()
exact_total = x + h + exact_r @ w2.T + b2
close(r, exact_r), close(total, exact_total), close(moments[0], exact_total.mean(1))
# the rest as it follows from the rounded sum, in which float32 leaves an error of 1e-5 beside the mean
total = total.double()
close(moments[1], 1 / (total.var(1, correction=0) + 1e-6).sqrt())
close(normed, F.layer_norm(total, (dim,), w, v, 1e-6), 1e-5)
exact_p = (r > 0) * (d @ w2)
close(p, exact_p), close(dh, d + exact_p @ w1)

close(attention.head_sums(x.float(), d.float(), 6), (x.float() * d.float()).double().unflatten(1, (6, -1)).sum(2), 1e-5)
""")


@needs_triton
def test_gelu_in_kernels_is_that_of_float64(interpreted: Callable[[str], None]) -> None:
    """Behind a product that is 0, of its bias alone."""
    interpreted("""
from morecl.nn.kernels import mlp
u = torch.cat([torch.linspace(-12, 12, 20_028), torch.tensor([-1e30, -1e4, 1e4, 1e30])])
exact = u.double().requires_grad_()
want = F.gelu(exact)
(slopes,) = torch.autograd.grad(want.sum(), exact)
ours = mlp.forward(torch.zeros(1, 64), torch.zeros(len(u), 64), u, with_slopes=True)
for one, other in zip(ours, (want.detach(), slopes), strict=True):
    torch.testing.assert_close(one[0].double(), other, rtol=2e-7, atol=1e-6)
nan = torch.full((64,), torch.nan)
assert mlp.forward(torch.zeros(1, 64), torch.zeros(64, 64), nan, with_slopes=False)[0].isnan().all()
""")


@needs_triton
@pytest.mark.parametrize(("count", "dim", "neurons"), [(1, 64, 64), (131, 192, 192), (67, 128, 512)])
def test_products_with_gelu_behind_them_are_float64s(
    interpreted: Callable[[str], None], count: int, dim: int, neurons: int
) -> None:
    """One token, a last tile that is not full, and neurons that do not fill the columns of a tile."""
    interpreted(f"count, dim, neurons = {count}, {dim}, {neurons}" + PRODUCTS)


PRODUCTS = """
from morecl.nn.kernels import mlp
draw = generator(0, "products")
x, w1, b, w2, d = (torch.randn(*shape, generator=draw) for shape in (
    (count, dim), (neurons, dim), (neurons,), (dim, neurons), (count, dim)))
w1 /= dim**0.5
a, slopes = mlp.forward(x, w1, b, with_slopes=True)
alone, none = mlp.forward(x, w1, b, with_slopes=False)
assert alone.equal(a) and len(none) == 0
at = (x.double() @ w1.double().T + b).requires_grad_()
want = F.gelu(at)
(want_slopes,) = torch.autograd.grad(want.sum(), at)
want_du = (d.double() @ w2.double()) * want_slopes
ours = a, slopes, mlp.backward(d, w2, slopes)
for one, other in zip(ours, (want, want_slopes, want_du), strict=True):
    assert (one.double() - other).norm() < 1e-6 * other.norm()

# nothing is written behind the last token
borders = [torch.full((count + 200, neurons), 7.0) for _ in range(3)]
columns = mlp._columns(neurons)
grid, sizes = mlp._grid(count, neurons), (count, dim, neurons, mlp.ROWS, columns, mlp.CHUNK)
read, weights = mlp._tiles(x, mlp.ROWS, mlp.CHUNK), mlp._tiles(w1, columns, mlp.CHUNK)
mlp._mlp_forward[grid](read, weights, b, *borders[:2], *sizes, True)
read, weights = mlp._tiles(d, mlp.ROWS, mlp.CHUNK), mlp._tiles(w2, mlp.CHUNK, columns)
mlp._mlp_backward[grid](read, weights, slopes, mlp._tiles(borders[2][:count], mlp.ROWS, columns), *sizes)
for border, one in zip(borders, ours, strict=True):
    assert border[:count].equal(one) and (border[count:] == 7).all()
"""


@needs_triton
def test_slopes_in_bytes_round_at_most_two_and_a_half_times_as_much_as_bfloat16(
    interpreted: Callable[[str], None],
) -> None:
    """1.5 times if u is around 0, 2.5 times if it is around -1, where slopes are small. bfloat16 rounds slopes to 0.17
    to 0.2 %, and so the gradient itself."""
    interpreted("""
from morecl.nn.kernels import mlp
mlp.new_slopes = lambda a: torch.empty_like(a, dtype=torch.uint8)
draw = generator(0, "bytes")
x, w1, w2, d = (torch.randn(*shape, generator=draw) for shape in ((64, 64), (512, 64), (64, 512), (64, 64)))
w1 /= 8
for bias, times in ((0.0, 1.5), (-1.0, 2.5)):
    b = torch.full((512,), bias)
    slopes = mlp.forward(x, w1, b, with_slopes=True)[1]
    assert slopes.dtype == torch.uint8
    du = mlp.backward(d, w2, slopes)
    at = (x.double() @ w1.double().T + b).requires_grad_()
    (exact_slopes,) = torch.autograd.grad(F.gelu(at).sum(), at)
    s = d.double() @ w2.double()
    exact = s * exact_slopes
    error, in_bfloat16 = ((each - exact).norm() / exact.norm() for each in (du, s * exact_slopes.bfloat16()))
    assert 0.5 * in_bfloat16 < error < times * in_bfloat16, (bias, error, in_bfloat16)
b = torch.tensor([-20.0, 20.0] * 32)  # where GELU is 0 or u: exact
slopes = mlp.forward(torch.zeros(2, 64), w1[:64], b, with_slopes=True)[1]
du = mlp.backward(d[:2], w2[:, :64].contiguous(), slopes)
assert (du[:, ::2] == 0).all()
torch.testing.assert_close(du[:, 1::2], (d[:2] @ w2[:, :64])[:, 1::2])
ends = torch.linspace(-4, 4, 64)  # the lowest and highest slopes are at -1.41 and 1.41
slopes = mlp.forward(torch.zeros(1, 64), w1[:64], ends, with_slopes=True)[1]
found = mlp.backward(torch.ones(1, 64), torch.full((64, 64), 1 / 64), slopes)
ends = ends.double().requires_grad_()
(want,) = torch.autograd.grad(F.gelu(ends).sum(), ends)
assert (found[0] - want).abs().max() < 0.0028
""")


@needs_triton
def test_padding_tokens_do_not_count_even_if_all_logits_are_low(interpreted: Callable[[str], None]) -> None:
    """All logits are far below zero, so a padding key of zeros would win the softmax."""
    interpreted("""
from morecl.nn.kernels import attention, class_token
draw = generator(0, "unlike")
q, k, v, g = (torch.randn(5, 16, generator=draw) for _ in range(4))
q[:, 0], k[:, 0] = 30.0, -30.0
qkv = torch.cat([q, k, v], 1)
exact = qkv.double().requires_grad_()
parts = (part[None, None] for part in exact.split(16, 1))
out = F.scaled_dot_product_attention(*parts)[0, 0]
assert (q @ k.T).max() / 4 < -150
(want,) = torch.autograd.grad(out, exact, g.double())
ours, logs = attention.forward(qkv, 1, 1)
got = attention.backward(g, (g * ours).sum(1, keepdim=True), qkv, logs, 1)
torch.testing.assert_close(ours.double(), out.detach(), rtol=1e-3, atol=1e-4)
torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)
ours, logs = class_token.forward(q[:1], qkv[:, 16:].contiguous(), 1)
torch.testing.assert_close(ours.double(), out[:1].detach(), rtol=1e-3, atol=1e-4)
dq, dkv = class_token.backward(g[:1], (g[:1] * ours).sum(1, keepdim=True), q[:1], qkv[:, 16:].contiguous(), logs)
torch.testing.assert_close(dq.double(), want[:1, :16], rtol=1e-3, atol=1e-3)
assert dkv.isfinite().all()
""")


@needs_triton
def test_memory_layout_does_not_matter(interpreted: Callable[[str], None]) -> None:
    """Folded adapters are transposed, gradients of sums are expanded, tokens may be a view of a larger tensor."""
    interpreted("""
adapted = AdaptedViT(small(), kernels=True)
adapters, norms = adapted.new_adapters(64), adapted.new_norms()
for part in adapters.parameters():
    torch.nn.init.normal_(part, std=0.1, generator=generator(0, "adapters"))
every = torch.ones(4, 64), torch.ones(4, adapted.dim)
folded = AdapterWeights(*(part[:, 0] for part in adapters.folded([every])))
assert not folded.w2.is_contiguous()
tokens = torch.randn(3, 5, 2 * adapted.dim, generator=generator(0, "tokens"))[..., ::2].requires_grad_()
rest = adapted._frozen, adapted.block.attn.num_heads, EPS
gradients = []
straight = tokens.detach().clone().requires_grad_()
for x, weights, turned in ((tokens, folded, True), (straight, adapters.weights(), False)):
    w, v = (part.detach().clone().requires_grad_() for part in norms.parameters())
    if turned:
        features = fused.trunk(x, (w.t().contiguous().t(), v), weights, *rest)
        features.sum().backward()
    else:
        features = fused.trunk(x, (w, v), weights, *rest)
        features.backward(torch.ones_like(features))
    gradients.append([features.detach(), x.grad, w.grad, v.grad])
for one, other in zip(*gradients, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
""")


@needs_triton
@pytest.mark.parametrize(("decay", "nesterov"), [(0.0, False), (0.01, True)])
def test_a_step_of_all_tensors_is_that_of_float64(
    interpreted: Callable[[str], None], decay: float, nesterov: bool
) -> None:
    """Tensors that fill several programs, a part of one, and a single number; two of them with gates."""
    interpreted(
        f"decay, nesterov = {decay}, {nesterov}"
        """
from morecl.nn.kernels import sgd
draw = generator(0, "sgd")
shapes = [(3, 8, 100), (7, 11), (1030,), (1,)]
before, gradients, velocities = ([torch.randn(s, generator=draw) for s in shapes] for _ in range(3))
gates = [torch.rand(shapes[0], generator=draw), torch.zeros(shapes[1])]
gates[0][:2] = 0
for gated in (gates, []):
    p, v = ([x.clone() for x in parts] for parts in (before, velocities))
    sgd.step(p, gradients, v, gated, sgd.sizes_of(p), lr=0.1, momentum=0.9, weight_decay=decay, nesterov=nesterov)
    for i, at in enumerate(before):
        g = gradients[i].double() + decay * at.double()
        velocity = 0.9 * velocities[i].double() + g
        update = g + 0.9 * velocity if nesterov else velocity
        gate = gated[i].double() if i < len(gated) else torch.ones(())
        torch.testing.assert_close(v[i].double(), velocity, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p[i].double(), at.double() - 0.1 * gate * update, rtol=1e-6, atol=1e-6)
        assert torch.equal(p[i][(gate == 0).expand_as(at)], at[(gate == 0).expand_as(at)])
"""
    )


@needs_triton
def test_the_optimiser_takes_the_same_steps_in_the_kernel(interpreted: Callable[[str], None]) -> None:
    """Of one to sixteen tensors, an empty one among them, and not of more; with gradients of any layout."""
    interpreted("""
from morecl import training
shapes = [(3, 8, 100), (7, 11), (1030,), (1,), (0,), (5, 4, 3)]

def gradient(i, shape, draw):
    if i % 3 == 0:
        return torch.randn(shape[::-1], generator=draw).permute(*reversed(range(len(shape))))
    return torch.randn([1] * len(shape) if i % 3 == 1 else shape, generator=draw).expand(shape)

def steps(count, gated, able, **how):
    training.supports_device = lambda device: able
    draw = generator(0, "sgd")
    parameters = [torch.randn(shapes[i % 6], generator=draw).requires_grad_() for i in range(count)]
    gates = [torch.rand(3, 1, 1, generator=draw).round(), torch.zeros(7, 11)][:gated]
    optimizer = training.ProtectedSGD(parameters, 0.1, 0.9, gates, **how)
    optimizer.use_kernel()
    assert (optimizer._sizes is not None) == (able and count <= 16)
    for step in range(4):
        for i, p in enumerate(parameters):
            p.grad = gradient(i, p.shape, draw)
        if step == 2:
            optimizer.param_groups[0].update(lr=0.01, momentum=0.5)
        before = [p._version for p in parameters]
        optimizer.step()
        assert all(p._version > old for p, old in zip(parameters, before))
    return optimizer.tensors()

for count, gated in ((1, 0), (2, 1), (6, 2), (16, 2), (17, 2)):
    for how in ({}, {"weight_decay": 0.05}, {"nesterov": True, "weight_decay": 0.01}):
        for found, expected in zip(steps(count, gated, True, **how), steps(count, gated, False, **how), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
""")


@pytest.mark.parametrize(
    "parameters",
    [[], [torch.zeros(2, dtype=torch.float16)], [torch.zeros(2, 3).T], [torch.zeros(2), torch.zeros(2, device="meta")]],
    ids=["none", "half precision", "turned", "two devices"],
)
def test_an_optimiser_that_the_kernel_does_not_suit(parameters: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "supports_device", lambda device: True)
    optimizer = training.ProtectedSGD(parameters, 0.1, 0.9)
    optimizer.use_kernel()
    assert optimizer._sizes is None


@needs_triton
@pytest.mark.parametrize("capability", [86, 90])
def test_the_step_of_all_tensors_compiles(capability: int) -> None:
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from morecl.nn.kernels import sgd

    signature = dict.fromkeys(("parameters", "gradients", "velocities"), ("*fp32",) * 3)
    signature |= {"gates": ("*fp32",), "sizes": "*i32"}
    signature |= dict.fromkeys(("lr", "momentum", "weight_decay"), "fp32")
    constants = {"COUNT": 3, "GATED": 1, "NESTEROV": True, "BLOCK": sgd.BLOCK}
    signature |= dict.fromkeys(constants, "constexpr")
    names = sgd._steps.arg_names
    source = ASTSource(sgd._steps, signature, {(names.index(name),): value for name, value in constants.items()})
    assert compiled(source, target=GPUTarget("cuda", capability, 32)).metadata.num_warps == 4


@needs_triton
@pytest.mark.parametrize(
    ("dim", "heads", "k", "capability", "shared"),
    [
        (192, 3, 64, 86, 99),
        (192, 3, 64, 90, 227),
        (192, 3, 128, 86, 99),
        (384, 6, 64, 90, 227),
        (768, 12, 128, 86, 99),
    ],
)
def test_the_kernels_compile_for_small_and_large_cards_and_fit_into_their_memory(
    dim: int, heads: int, k: int, capability: int, shared: int
) -> None:
    """``shared``: KiB of shared memory per thread block, by NVIDIA's tables. Compiling needs no card."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from morecl.nn.kernels import adapter, attention, class_token, mlp, norm, weights, wide

    tiles = {"D": dim, "K": k, "TILE": adapter.TILE, "CHUNK": adapter.CHUNK}
    head = {"HEADS": heads, "WIDTH": dim // heads, "LENGTH": 197, "TILE": attention.TILE}
    rows = {"D": dim, "WIDTH": {192: 256, 384: 512, 768: 1024}[dim], "ROWS": norm.ROWS}
    inner = {"D": dim, "H": 4 * dim, "ROWS": mlp.ROWS, "COLUMNS": mlp.COLUMNS, "CHUNK": mlp.CHUNK}
    around = {"D": dim, "K": k}
    totals = {"ROWS": weights.BLOCK // k, "WIDTH": rows["WIDTH"], "ADDED": weights.ADDED}
    kernels: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (adapter._adapter_gradients, tiles | {"PART": adapter._part(dim)}, adapter._gradients_launch(dim, k)),
        (attention._attend, head | {"REST": 16}, attention.FORWARD),
        (attention._attend_backward, head | {"REST": 16}, attention.BACKWARD),
        (class_token._attend_once, head, {}),
        (class_token._attend_once_backward, head, {}),
        (mlp._mlp_forward, inner | {"SLOPES": True}, mlp.LAUNCH),
        (mlp._mlp_forward, inner | {"SLOPES": False}, mlp.LAUNCH),
        (mlp._mlp_backward, inner, mlp.LAUNCH),
        (norm._norm, rows, {"num_warps": norm.warps(dim)}),
        (norm._norm_backward, rows | {"PART": norm._part(10**5, dim), "EVERY": 1}, norm._launch(dim)),
        (norm._norm_backward, rows | {"PART": norm._part(10**5, dim), "EVERY": 197}, norm._launch(dim)),
        (weights._under_masks, around | {"BLOCK": weights.BLOCK, "WIDEST": rows["WIDTH"]}, {}),
        (weights._norm_totals, {"D": dim, "CHUNK": weights.CHUNK, "ADDED": weights.NORM_ADDED}, {}),
        (weights._adapter_totals, around | totals | {"MASKED": True}, {}),
        (weights._adapter_totals, around | totals | {"MASKED": False}, {}),
    ]
    if dim > adapter.NARROW:
        kernels += [
            (wide._adapt_wide, tiles | {"STAGES": wide.STAGES}, {}),
            (wide._adapt_wide_backward, tiles | {"STAGES": wide.STAGES}, {}),
            (attention._attend_sums, {"WIDTH": dim // heads, "SUMS": attention.SUMS}, {}),
        ]
    else:
        kernels += [
            (adapter._adapt, tiles | {"H": 0, "weight": None}, adapter.LAUNCH),
            (adapter._adapt, tiles | {"H": 4 * dim}, adapter.LAUNCH),
            (adapter._adapt_backward, tiles | {"WIDTH": 0}, adapter.LAUNCH),
            (adapter._adapt_backward, tiles | {"WIDTH": dim // heads}, adapter.LAUNCH),
        ]
    kinds = dict.fromkeys(("sums", "moments", "logs", "delta", "norm_weight", "norm_bias"), "*fp32")
    kinds |= {"count": "i32", "eps": "fp32", "slopes": "*u8"}
    kinds |= dict.fromkeys(("early", "parts", "late_parts"), "i32")
    whole = ("w1", "b1", "w2", "b2", "masks", "d_w1", "d_b1", "d_w2", "d_b2", "d_masks", "d_weight", "d_bias")
    tile = f"tensordesc<bf16[{mlp.ROWS},{mlp.CHUNK}]>"
    tiles_of = {
        mlp._mlp_forward: {"x": tile, "weight": f"tensordesc<bf16[{mlp.COLUMNS},{mlp.CHUNK}]>"},
        mlp._mlp_backward: {
            "g": tile,
            "weight": f"tensordesc<bf16[{mlp.CHUNK},{mlp.COLUMNS}]>",
            "out": f"tensordesc<bf16[{mlp.ROWS},{mlp.COLUMNS}]>",
        },
    }
    for kernel, constants, options in kernels:
        names = kernel.arg_names
        own = kinds | tiles_of.get(kernel, {})
        if kernel.fn.__module__ == weights.__name__:
            own |= dict.fromkeys(whole, "*fp32")
        signature = {name: "constexpr" if name in constants else own.get(name, "*bf16") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(kernel, signature, values, aligned)
        result = compiled(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert result.metadata.shared <= shared * 1024
        if kernel in (adapter._adapt, wide._adapt_wide):  # ReLU must propagate NaN, which it does not by default
            assert "max.NaN.f32" in result.asm["ptx"] and "max.f32" not in result.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_on_a_gpu_the_trunk_in_kernels_is_that_of_float64(shape: Shape, dtype: torch.dtype) -> None:
    check_half(shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_on_a_gpu_neurons_open_and_close_token_by_token(shape: Shape, dtype: torch.dtype) -> None:
    check_half(shape, dtype, "cuda", margin=0.0, seeds=SEEDS, times=TIMES_PLAIN_SWITCHING)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES[-3:])
def test_on_a_gpu_the_trunk_in_kernels_repeats_bit_by_bit(shape: Shape, masked: bool) -> None:
    once, *others = (results(shape, torch.bfloat16, "cuda", kernels=True, masked=masked) for _ in range(6))
    for again in others:
        assert all(once[name].equal(again[name]) for name in once)


@pytest.mark.gpu
def test_on_a_gpu_patches_beside_the_class_token_are_those_of_the_plain_trunk() -> None:
    vit = VisionTransformer(32, patch_size=4, embed_dim=192, depth=3, num_heads=3, num_classes=0).cuda().eval()
    network = AdaptedViT(vit, torch.bfloat16, kernels=True)
    adapters = network.new_adapters(64).cuda()
    adapters.initialise(generator(0, "adapters"))
    with torch.no_grad():
        tokens = network.prefix(torch.randn(4, 3, 32, 32, device="cuda"))
        fast, plain = (
            network.trunk(tokens, adapters=adapters.weights(), patches=True, plain=plain) for plain in (False, True)
        )
    assert fast.shape == (4, 2 * 192)
    assert torch.allclose(fast, plain, atol=0.1) and (fast - plain).square().mean() < 1e-3


@needs_triton
def test_batches_the_kernels_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "supports_device", lambda device: device == "able")

    class Tokens(SimpleNamespace):
        def __len__(self) -> int:
            return int(self.count)

    def supported(dtype: torch.dtype, *shape: int, is_cuda: bool = True, device: str = "able", count: int = 2) -> bool:
        tokens: Any = Tokens(is_cuda=is_cuda, dtype=dtype, device=device, count=count)
        return fused.supports_batch(tokens, AdapterWeights(torch.empty(shape), *[torch.empty(0)] * 3))

    assert supported(torch.bfloat16, 24, 64, 192)
    assert supported(torch.float16, 24, 16, 64)
    assert supported(torch.bfloat16, 24, 128, 64)
    assert not supported(torch.bfloat16, 24, 64, 192, is_cuda=False)
    assert not supported(torch.bfloat16, 24, 64, 192, device="old")
    assert not supported(torch.bfloat16, 24, 64, 192, count=0)
    assert not supported(torch.float32, 24, 64, 192)
    assert not supported(torch.bfloat16, 24, 144, 192)
    assert not supported(torch.bfloat16, 24, 5, 64, 192)  # several tasks at once


@needs_triton
def test_blocks_the_kernels_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(dim: int = 192, heads: int = 3, **changes: Any) -> Any:
        return VisionTransformer(8, 4, embed_dim=dim, depth=1, num_heads=heads, num_classes=0, **changes).blocks[0]

    for supported in (block(), block(384, 6), block(768, 12), block(64, 4)):
        assert fused.supports_block(supported)
    for other in (
        block(1024, 16),
        block(96, 3),  # not a multiple of 64 dimensions
        block(256, 2),  # heads of 128
        block(qkv_bias=False),
        block(qk_norm=True),
        block(init_values=0.1),
        block(act_layer="relu"),
        block(act_layer="gelu_tanh"),
        block(64, 4, mlp_ratio=3.5),  # 224 inner dimensions
        block(scale_mlp_norm=True),
        block(scale_attn_norm=True),
    ):
        assert not fused.supports_block(other)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.5.1")
    assert not fused._has_triton()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.10.0+git1234")
    assert fused._has_triton()


@needs_triton
def test_a_network_uses_the_kernels_if_asked_and_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a constant stands for the kernels' result."""
    vit = load_backbone("vit_mini_patch4_32", image_size=8).vit
    monkeypatch.setattr(fused, "supports_batch", lambda x, adapters: True)
    monkeypatch.setattr(fused, "trunk", lambda x, *rest: torch.full((len(x), x.shape[2]), 7.0))
    tokens = torch.randn(3, 5, 192)

    def by_kernels(kernels: bool, **how: Any) -> bool:
        adapted = AdaptedViT(copy.deepcopy(vit), kernels=kernels)
        adapters = adapted.new_adapters(16).weights()
        with torch.no_grad():
            return bool((adapted.trunk(tokens, adapted.new_norms(), adapters, **how) == 7).all())

    assert by_kernels(True)
    assert not by_kernels(False) and not by_kernels(True, plain=True)
    vit.blocks[1].norm1.eps = 1e-3
    assert not by_kernels(True)


def test_gelu_is_that_of_float64() -> None:
    """The error of Phi is 1e-7, times |x| up to 12, and single precision rounds."""
    x = torch.linspace(-12, 12, 100_001, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    for ours, theirs in (
        (gelu(x), F.gelu(exact)),
        (torch.autograd.grad(gelu(x).sum(), x)[0], torch.autograd.grad(F.gelu(exact).sum(), exact)[0]),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-7, atol=5e-7)
    assert Gelu()(x).equal(F.gelu(x))  # uncompiled and in single precision it is torch's


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["kernels", "compiled"])
def test_on_a_gpu_fast_training_in_bfloat16_is_as_exact_as_plain_training(how: str) -> None:
    """Gradients of the first norms and adapters carry the rounding of six blocks, 0.4 % each, and so differ by one to
    three percent from those of float32. The fast path must be about as exact as the plain one in the same precision;
    errors of rounding vary by a third."""
    backbone = load_backbone("vit_mini_patch4_32")
    images = torch.randn(8, 3, 32, 32, generator=generator(0, "images")).cuda()
    results = []
    for dtype, fast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        vit = AdaptedViT(backbone.vit.cuda(), dtype, kernels=fast and how == "kernels")
        adapters, norms = vit.new_adapters(64).cuda(), vit.new_norms().cuda()
        adapters.initialise(generator(0, "adapters"))
        torch.nn.init.normal_(adapters.w2, std=0.02, generator=torch.Generator("cuda").manual_seed(0))
        compiled = fast and how == "compiled"
        features = vit.trunk(vit.stem(images), norms, adapters.weights(), compiled=compiled)
        gradients = torch.autograd.grad(features.square().sum(), [*norms.parameters(), *adapters.parameters()])
        results.append([features.detach(), *gradients])
    for exact, plain, fast_ in zip(*results, strict=True):
        plain_error, fast_error = ((value - exact).norm() / exact.norm() for value in (plain, fast_))
        assert fast_error < 2 * plain_error


def test_slopes_are_bytes_with_bfloat16_alone() -> None:
    new_slopes = pytest.importorskip("morecl.nn.kernels.gelu").new_slopes
    kinds = {kind: new_slopes(torch.empty(2, 3, dtype=kind)).dtype for kind in (torch.bfloat16, torch.float16)}
    assert kinds == {torch.bfloat16: torch.uint8, torch.float16: torch.float16}
