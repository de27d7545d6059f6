"""The frozen blocks with adapters, forward and backward, from kernels of our own and the library's matrix products.

What :class:`morecl.nn.network.AdaptedViT` computes, in half precision on a GPU: seventeen kernels a block, forward and
backward, instead of the forty that torch's compiler makes, and nothing to compile but these. With 192 or 384 dimensions
a token a GPU waits for memory, not for arithmetic: so a kernel does what can be done while its numbers are at hand,
gradients are written where they are read, and the parts of the trained weights' gradients are added up once, for all
blocks. Wide products are left to the library: what was fused with them in Triton lost more there than it gained.

Trained weights are float32, are multiplied in half precision, and get float32 gradients.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from morecl.nn.adapter import AdapterWeights


def _has_triton() -> bool:
    """Whether Triton is here, and not older than what the kernels were tried with."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (3, 6)


AVAILABLE = _has_triton()

if AVAILABLE:
    from morecl.nn.kernels import adapter, attention, class_token, gelu, norm

MOST_DIMENSIONS = 384  # wider tokens do not fit into a processor's registers, and wait less for memory

Weights = dict[str, Tensor]  # of a frozen block, by timm's names


def suits(block: Block) -> bool:
    """Whether timm's block is one of those that are put together here."""
    attn, inner = block.attn, block.mlp
    if not (
        AVAILABLE
        and type(block) is Block
        and type(attn) is Attention
        and type(inner) is Mlp
        and type(inner.act) is nn.GELU
    ):
        return False
    absent = (attn.q_norm, attn.k_norm, attn.norm, inner.norm, block.ls1, block.ls2)
    linear = (attn.qkv, attn.proj, inner.fc1, inner.fc2)
    dim, width = attn.proj.in_features, attn.head_dim
    return (
        all(type(module) is nn.Identity for module in absent)
        and all(type(module) is nn.Linear and module.bias is not None for module in linear)
        and inner.act.approximate == "none"
        and getattr(attn, "gate", None) is None
        and dim == attn.num_heads * width
        and width in attention.WIDTHS
        and dim % adapter.CHUNK == 0
        and dim <= MOST_DIMENSIONS
        and inner.fc1.out_features % adapter.CHUNK == 0
    )


def fits(x: Tensor, adapters: AdapterWeights) -> bool:
    """Whether tokens and adapters are such as the kernels can take; those of several tasks at once are not."""
    half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _is_able(x.device)
    return half and len(x) > 0 and adapters.w1.dim() == 3 and adapters.w1.shape[1] <= max(adapter.WIDTHS)


@functools.cache
def _is_able(device: torch.device) -> bool:
    """Whether it is a card by NVIDIA with matrix units that know bfloat16."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def trunk(
    x: Tensor,
    norms: tuple[Tensor, Tensor],
    adapters: AdapterWeights,
    frozen: Sequence[Weights],
    heads: int,
    eps: tuple[float, float],
) -> Tensor:
    """All blocks and the last norm: tokens (B, L, D) -> the class token's features (B, D).

    Args:
        norms: weights and biases (2 n + 1, D) for n blocks.
        adapters: 2 n of them.
        frozen: the n blocks' weights.
        eps: of the blocks' norms and of the last.
    """
    k = adapters.w1.shape[1]
    more = min(width for width in adapter.WIDTHS if width >= k) - k
    if more:  # neurons that do nothing
        pads = ((0, 0, 0, more), (0, more), (0, more), (0, 0))
        adapters = AdapterWeights(*(F.pad(part, pad) for part, pad in zip(adapters, pads, strict=True)))
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in (x, *norms, *adapters))
    with torch.cuda.device_of(x):  # where Triton's kernels are launched
        features: Tensor = _Trunk.apply(x, *norms, *adapters, frozen, heads, eps, learns)
    return features


class _Kept(NamedTuple):
    """What a block's gradients need of its forward pass; names as in the kernels."""

    x: Tensor  # what comes in, and the moments of its norm
    moments: Tensor
    q: Tensor  # queries, keys and values together; in the last block, where there is one query an image, apart
    kv: Tensor
    seen: Tensor  # what attention gives
    logs: Tensor
    y1: Tensor  # before the first adapter, and inside it
    r1: Tensor
    middle: Tensor  # between the branches
    middle_moments: Tensor
    u: Tensor  # before GELU
    y2: Tensor
    r2: Tensor


class _Trunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        frozen: Sequence[Weights],
        heads: int,
        eps: tuple[float, float],
        learns: bool,
    ) -> Tensor:
        images, dim = x.shape[0], x.shape[2]
        halves = AdapterWeights(*(part.to(x.dtype).contiguous() for part in (w1, b1, w2, b2)))
        norm_weight, norm_bias = norm_weight.float().contiguous(), norm_bias.float().contiguous()
        adapters, norms = _each(halves), list(zip(norm_weight.unbind(), norm_bias.unbind(), strict=True))
        x = x.reshape(-1, dim).contiguous()
        normed, moments = norm.forward(x, *norms[0], eps[0])
        kept: list[_Kept] = []
        for i, block in enumerate(frozen):
            last, before = i == len(frozen) - 1, (x, moments)
            weight, bias = block["attn.qkv.weight"], block["attn.qkv.bias"]
            if last:  # only the class token is read behind it: one query an image, and everything else for it alone
                q = torch.addmm(bias[:dim], _first(normed, images), weight[:dim].t())
                kv = torch.addmm(bias[dim:], normed, weight[dim:].t())
                seen, logs = class_token.forward(q, kv, heads)
                x = _first(x, images).contiguous()
            else:
                q = kv = torch.addmm(bias, normed, weight.t())
                seen, logs = attention.forward(q, images, heads)
            y1 = seen @ block["attn.proj.weight"].t()
            following = adapters[2 * i], norms[2 * i + 1], eps[0]
            _, r1, middle, normed, middle_moments = adapter.forward(y1, x, block["attn.proj.bias"], *following)
            u = normed @ block["mlp.fc1.weight"].t()
            following = adapters[2 * i + 1], norms[2 * i + 2], eps[last]
            product = block["mlp.fc2.weight"], block["mlp.fc1.bias"]
            y2, r2, x, normed, moments = adapter.forward(u, middle, block["mlp.fc2.bias"], *following, product)
            if learns:
                kept.append(_Kept(*before, q, kv, seen, logs, y1, r1, middle, middle_moments, u, y2, r2))
        ctx.save_for_backward(x, moments, norm_weight, *halves, *itertools.chain(*kept))
        ctx.frozen, ctx.images = frozen, images
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, moments, norm_weight, *rest = ctx.saved_tensors
        halves, rest, size = AdapterWeights(*rest[:4]), rest[4:], len(_Kept._fields)
        kept = [_Kept(*rest[start : start + size]) for start in range(0, len(rest), size)]
        adapters, weights = _each(halves), norm_weight.unbind()
        sums = _Sums(norm_weight, halves.w1, len(kept[0].x), ctx.images)
        d = norm.backward(g.contiguous(), None, x, moments, weights[-1], sums.norms[-1])
        for i in reversed(range(len(kept))):
            block, of, one, two = ctx.frozen[i], kept[i], 2 * i, 2 * i + 1
            p, dh = adapter.backward(d, of.r2, adapters[two])
            sums.adapter(two, d, of.r2, of.y2, p)
            g = gelu.backward(dh @ block["mlp.fc2.weight"], of.u, block["mlp.fc1.bias"]) @ block["mlp.fc1.weight"]
            d = norm.backward(g, d, of.middle, of.middle_moments, weights[two], sums.norms[two])
            heads, weight = of.logs.shape[1], block["attn.qkv.weight"]
            p, e, delta = adapter.backward_to_heads(d, of.r1, adapters[one], block["attn.proj.weight"], of.seen, heads)
            sums.adapter(one, d, of.r1, of.y1, p)
            if i == len(kept) - 1:
                dq, dkv = class_token.backward(e, delta, of.q, of.kv, of.logs)
                g = dkv @ weight[len(weight) // 3 :]
                _first(g, ctx.images).add_(dq @ weight[: len(weight) // 3])
                first, d = d, torch.zeros_like(of.x)
                _first(d, ctx.images).copy_(first)
            else:
                g = attention.backward(e, delta, of.q, of.logs, ctx.images) @ weight
            d = norm.backward(g, d, of.x, of.moments, weights[one], sums.norms[one])
        biases = [block[name] for block in ctx.frozen for name in ("attn.proj.bias", "mlp.fc2.bias")]
        d_x = d.view(ctx.images, -1, d.shape[1]) if ctx.needs_input_grad[0] else None
        return d_x, *sums.totals(torch.stack(biases)), None, None, None, None


class _Sums:
    """Gradients of norms and adapters, which the kernels give part by part of the tokens.

    Nothing waits for an adapter's: on a GPU they are made beside the rest, on a stream of their own.
    """

    def __init__(self, norm_weight: Tensor, w1: Tensor, tokens: int, images: int):
        """The last two norms and adapters see only the class tokens."""
        many, self._k, self._dim = w1.shape
        new = norm_weight.new_empty
        self._norms = [new(n, *norm.parts(c, self._dim)) for n, c in ((many - 1, tokens), (2, images))]
        self._adapters = [new(n, *adapter.parts(c, self._dim, self._k)) for n, c in ((many - 2, tokens), (2, images))]
        self.norms = [part for parts in self._norms for part in parts.unbind()]
        self.adapters = [part for parts in self._adapters for part in parts.unbind()]
        self._side = _side_stream(w1.device) if w1.is_cuda else None
        self._used: list[Tensor] = []  # by the other stream, until that has been waited for; r and y are kept anyway

    def adapter(self, place: int, d: Tensor, r: Tensor, y: Tensor, p: Tensor) -> None:
        """Those of the adapter in this place, see :func:`morecl.nn.kernels.adapter.gradients`."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            adapter.gradients(d, r, y, p, self.adapters[place])
        self._used += [d, p]

    def totals(self, biases: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the norms' weights and biases, w1, b1, w2, b2; ``biases`` (A, D): b in adapter.py."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._used.clear()
        k, dim = self._k, self._dim
        d_weight, d_bias = torch.cat([parts.sum(1) for parts in self._norms]).unbind(1)
        total = torch.cat([parts.sum(1) for parts in self._adapters])
        dw2, dw1, db2, db1 = total.split([dim * k, k * dim, dim, k], 1)
        dw1 = torch.addcmul(dw1.unflatten(1, (k, dim)), db1[:, :, None], biases[:, None].float())
        return d_weight, d_bias, dw1, db1, dw2.unflatten(1, (dim, k)), db2


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Not the one of :mod:`morecl.training`, beside which it runs."""
    return torch.cuda.Stream(device)


def _first(x: Tensor, images: int) -> Tensor:
    """The class tokens (B, D) among all (N, D), in place."""
    return x.view(images, -1, x.shape[1])[:, 0]


def _each(adapters: AdapterWeights) -> list[AdapterWeights]:
    """Adapter by adapter."""
    return [AdapterWeights(*weights) for weights in zip(*(part.unbind() for part in adapters), strict=True)]
