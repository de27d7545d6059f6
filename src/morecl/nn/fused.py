"""All frozen blocks with their adapters, forward and backward, in our own kernels and cuBLAS matrix products.

Computes what :meth:`morecl.nn.network.AdaptedViT.trunk` computes, in half precision on a GPU, with 16 kernels per block
(forward and backward; 19 for wide tokens) instead of about 40 that torch's compiler generates, and nothing else to
compile. With few dimensions per token a GPU waits for memory, not for arithmetic. So a kernel does all it can while its
numbers are in registers, gradients are written where the next kernel reads them, and partial gradients of the trained
weights are added up once, for all blocks. Products with frozen weights are left to cuBLAS, except those of the MLP that
have GELU or its gradient behind them and, up to 192 dimensions, two that have an adapter behind or before them.

Trained weights are float32, are rounded to half precision for products, and get float32 gradients.

Shapes: B images, L tokens per image, N = B L tokens, D dimensions, K neurons in an adapter, H in the MLP. Block i has
the adapters and norms 2 i (attention) and 2 i + 1 (MLP); the norm after the last of n blocks has index 2 n.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from morecl.nn.adapter import AdapterWeights

OLDEST_TRITON = (3, 6)  # the oldest version the kernels were tested with


def _has_triton() -> bool:
    """Whether Triton is installed and recent enough."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= OLDEST_TRITON


AVAILABLE = _has_triton()

if AVAILABLE:
    from morecl.nn.kernels import adapter, attention, branch, class_token, norm, weights

MAX_DIM = 768  # nothing wider was measured

# Milliseconds of a training step of MORE with 64 + 64 images at 224 px on an H200: with these kernels, and with torch's
# compiler. By dimensions of a token and neurons of an adapter; see benchmarks/README.md. The
# kernels became faster since those with 128 neurons were measured.
STEP_TIMES = {
    (192, 64): (4.18, 6.7),
    (192, 128): (5.44, 6.89),
    (384, 64): (8.23, 12.09),
    (384, 128): (9.95, 12.42),
    (768, 64): (21.35, 26.43),
    (768, 128): (24.3, 26.86),
}

BlockWeights = dict[str, Tensor]  # weights of a frozen block, by timm's names


def supports_block(block: Block) -> bool:
    """Whether the kernels compute this kind of timm block."""
    if not AVAILABLE or type(block) is not Block:
        return False
    attn = block.attn
    mlp = block.mlp
    if type(attn) is not Attention or type(mlp) is not Mlp or type(mlp.act) is not nn.GELU:
        return False
    must_be_absent = (attn.q_norm, attn.k_norm, attn.norm, mlp.norm, block.ls1, block.ls2)
    linear = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    dim = attn.proj.in_features
    return (
        all(type(module) is nn.Identity for module in must_be_absent)
        and all(type(module) is nn.Linear and module.bias is not None for module in linear)
        and mlp.act.approximate == "none"
        and getattr(attn, "gate", None) is None
        and dim == attn.num_heads * attn.head_dim
        and attn.head_dim in attention.WIDTHS
        and dim % adapter.CHUNK == 0
        and dim <= MAX_DIM
        and mlp.fc1.out_features % adapter.CHUNK == 0
    )


def trains_faster(dim: int, bottleneck: int) -> bool:
    """Whether training is faster with the kernels than with torch's compiler: the nearest shape measured decides.

    For training alone: predictions are not compiled, and the kernels have single operations to beat.
    """
    nearest = min(STEP_TIMES, key=lambda shape: (abs(math.log(shape[0] / dim)), abs(math.log(shape[1] / bottleneck))))
    kernels, compiler = STEP_TIMES[nearest]
    return kernels <= compiler


def supports_batch(tokens: Tensor, adapters: AdapterWeights) -> bool:
    """Whether the kernels support these tokens (B, L, D) and adapters. Several tasks at once are not supported."""
    return (
        tokens.is_cuda
        and tokens.dtype in (torch.bfloat16, torch.float16)
        and supports_device(tokens.device)
        and len(tokens) > 0
        and adapters.w1.dim() == 3
        and adapters.w1.shape[1] <= max(adapter.WIDTHS)
    )


def supports_device(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU whose matrix units support bfloat16."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def trunk(
    tokens: Tensor,
    norms: tuple[Tensor, Tensor],
    adapters: AdapterWeights,
    frozen: Sequence[BlockWeights],
    heads: int,
    eps: tuple[float, float],
    observe_last: Callable[[Tensor], object] | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """All blocks and the last norm: tokens (B, L, D) -> the class token's features (B, D).

    Args:
        norms: weights and biases (2 n + 1, D) for n blocks.
        adapters: 2 n adapters.
        frozen: weights of the n blocks.
        eps: of the blocks' norms and of the last norm.
        observe_last: called with the tokens (B, L, D) that enter the last block.
        masks: of the adapters, see :meth:`AdapterWeights.under`.
    """
    if masks is not None and adapters.w1.shape[1] not in adapter.WIDTHS:
        adapters, masks = adapters.under(masks), None
    adapters = _pad_bottleneck(adapters)
    trained = (tokens, *norms, *adapters, *([] if masks is None else [masks]))
    needs_gradients = torch.is_grad_enabled() and any(part.requires_grad for part in trained)
    with torch.cuda.device_of(tokens):  # Triton launches on the current device
        features: Tensor = _Trunk.apply(
            tokens, *norms, *adapters, masks, frozen, heads, eps, needs_gradients, observe_last
        )
    return features


def _pad_bottleneck(adapters: AdapterWeights) -> AdapterWeights:
    """Add neurons that do nothing, up to the next bottleneck the kernels are made for."""
    bottleneck = adapters.w1.shape[1]
    missing = min(width for width in adapter.WIDTHS if width >= bottleneck) - bottleneck
    if not missing:
        return adapters
    return AdapterWeights(
        w1=F.pad(adapters.w1, (0, 0, 0, missing)),
        b1=F.pad(adapters.b1, (0, missing)),
        w2=F.pad(adapters.w2, (0, missing)),
        b2=adapters.b2,
    )


class _Saved(NamedTuple):
    """What the backward pass of a block needs from its forward pass.

    In the last block only the class tokens go on after attention: there N is B from ``attended`` on.
    """

    x: Tensor  # (N, D), input of the block
    x_moments: Tensor  # (2, N), mean and 1 / sd of x
    query: Tensor  # (N, 3 D), queries, keys and values together; in the last block (B, D), queries of the class tokens
    key_value: Tensor  # the same tensor; in the last block (N, 2 D), keys and values of all tokens
    attended: Tensor  # (N, D), output of attention
    attention_logs: Tensor  # (N, heads), log2 of the softmax's denominators
    attention_out: Tensor  # (N, D), projection of attended, without its bias: input of the first adapter
    attention_hidden: Tensor  # (N, K), neurons of the first adapter
    middle: Tensor  # (N, D), sum after the attention branch
    middle_moments: Tensor  # (2, N)
    mlp_slopes: Tensor  # (N, H), of GELU, see :mod:`morecl.nn.kernels.gelu`
    mlp_out: Tensor  # (N, D), second product of the MLP, without its bias: input of the second adapter
    mlp_hidden: Tensor  # (N, K), neurons of the second adapter


class _Trunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        masks: Tensor | None,
        frozen: Sequence[BlockWeights],
        heads: int,
        eps: tuple[float, float],
        needs_gradients: bool,
        observe_last: Callable[[Tensor], object] | None,
    ) -> Tensor:
        images = tokens.shape[0]
        dim = tokens.shape[2]
        whole = AdapterWeights(*(part.contiguous() for part in (w1, b1, w2, b2)))
        if masks is None:
            half = AdapterWeights(*(part.to(tokens.dtype) for part in whole))
        else:
            masks = masks.contiguous()
            half = weights.under_masks(whole, masks, tokens.dtype)
        adapters = _one_by_one(half)
        norm_weight = norm_weight.float().contiguous()
        norm_bias = norm_bias.float().contiguous()
        norms = list(zip(norm_weight.unbind(), norm_bias.unbind(), strict=True))

        saved: list[_Saved] = []
        x = tokens.reshape(-1, dim).contiguous()
        normed, moments = norm.forward(x, *norms[0], eps[0])
        for i, block in enumerate(frozen):
            is_last = i == len(frozen) - 1
            block_in = x
            block_in_moments = moments
            if is_last and observe_last is not None:
                observe_last(x.view(images, -1, dim))

            # attention
            qkv_weight = block["attn.qkv.weight"]
            qkv_bias = block["attn.qkv.bias"]
            if is_last:  # only the class token is read behind it: one query per image, and no other token from here on
                query = torch.addmm(qkv_bias[:dim], _class_tokens(normed, images), qkv_weight[:dim].t())
                key_value = torch.addmm(qkv_bias[dim:], normed, qkv_weight[dim:].t())
                attended, logs = class_token.forward(query, key_value, heads)
                x = _class_tokens(x, images).contiguous()
            else:
                query = torch.addmm(qkv_bias, normed, qkv_weight.t())
                key_value = query
                attended, logs = attention.forward(query, images, heads)

            # projection, first adapter, sum, second norm
            attention_out = attended @ block["attn.proj.weight"].t()
            attention_hidden, middle, normed, middle_moments = branch.adapter_forward(
                attention_out, x, block["attn.proj.bias"], adapters[2 * i], norms[2 * i + 1], eps[0]
            )

            # MLP, second adapter, sum, next norm
            mlp_slopes, mlp_out, mlp_hidden, x, normed, moments = branch.mlp_forward(
                normed, middle, block, adapters[2 * i + 1], norms[2 * i + 2], eps[1] if is_last else eps[0],
                for_gradients=needs_gradients,
            )  # fmt: skip

            if needs_gradients:
                saved.append(
                    _Saved(
                        x=block_in,
                        x_moments=block_in_moments,
                        query=query,
                        key_value=key_value,
                        attended=attended,
                        attention_logs=logs,
                        attention_out=attention_out,
                        attention_hidden=attention_hidden,
                        middle=middle,
                        middle_moments=middle_moments,
                        mlp_slopes=mlp_slopes,
                        mlp_out=mlp_out,
                        mlp_hidden=mlp_hidden,
                    )
                )
        ctx.save_for_backward(x, moments, norm_weight, masks, *whole, *half, *itertools.chain(*saved))
        ctx.frozen = frozen
        ctx.images = images
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_features: Tensor) -> tuple[Tensor | None, ...]:
        x, moments, norm_weight, masks, *rest = ctx.saved_tensors
        parts = len(AdapterWeights._fields)
        whole, half, rest = AdapterWeights(*rest[:parts]), AdapterWeights(*rest[parts : 2 * parts]), rest[2 * parts :]
        fields = len(_Saved._fields)
        saved = [_Saved(*rest[start : start + fields]) for start in range(0, len(rest), fields)]
        adapters = _one_by_one(half)
        norm_weights = norm_weight.unbind()
        sums = _WeightGradients(norm_weight, half.w1, tokens=len(saved[0].x), images=ctx.images)

        # ``d`` is the gradient of the sum that goes through all blocks, ``d_normed`` that of a norm's output
        d = norm.backward(d_features.contiguous(), None, x, moments, norm_weights[-1], sums.norms[-1])
        for i in reversed(range(len(saved))):
            block = ctx.frozen[i]
            at = saved[i]
            first = 2 * i
            second = 2 * i + 1

            # second adapter, MLP, second norm
            d_hidden, d_mlp_out = branch.adapter_backward(d, at.mlp_hidden, adapters[second])
            sums.add_adapter(second, d, at.mlp_hidden, at.mlp_out, d_hidden)
            d_normed = branch.mlp_backward(d_mlp_out, at.mlp_slopes, block)
            d = norm.backward(d_normed, d, at.middle, at.middle_moments, norm_weights[second], sums.norms[second])

            # first adapter and projection; ``delta`` is the sum of d_attended * attended over each head
            heads = at.attention_logs.shape[1]
            d_hidden, d_attended, delta = branch.adapter_backward_to_heads(
                d, at.attention_hidden, adapters[first], block["attn.proj.weight"], at.attended, heads
            )
            sums.add_adapter(first, d, at.attention_hidden, at.attention_out, d_hidden)

            # attention, first norm
            qkv_weight = block["attn.qkv.weight"]
            if i == len(saved) - 1:  # here d is that of the class tokens alone; it is zero for all other tokens
                dim = len(qkv_weight) // 3
                d_query, d_key_value = class_token.backward(
                    d_attended, delta, at.query, at.key_value, at.attention_logs
                )
                d_normed = d_key_value @ qkv_weight[dim:]
                _class_tokens(d_normed, ctx.images).add_(d_query @ qkv_weight[:dim])
            else:
                d_qkv = attention.backward(d_attended, delta, at.query, at.attention_logs, ctx.images)
                d_normed = d_qkv @ qkv_weight
            d = norm.backward(d_normed, d, at.x, at.x_moments, norm_weights[first], sums.norms[first])

        biases = [block[name] for block in ctx.frozen for name in ("attn.proj.bias", "mlp.fc2.bias")]
        d_tokens = d.view(ctx.images, -1, d.shape[1]) if ctx.needs_input_grad[0] else None
        return d_tokens, *sums.totals(torch.stack(biases), whole, masks), None, None, None, None, None


class _WeightGradients:
    """Gradients of norms and adapters. The kernels sum them over parts of the tokens; the parts are added at the end.

    No kernel waits for the gradients of an adapter: on a GPU they are computed on a second stream.
    """

    def __init__(self, norm_weight: Tensor, w1: Tensor, *, tokens: int, images: int):
        """The last two norms and adapters see only the class tokens, one per image."""
        count, bottleneck, self._dim = w1.shape
        dim = self._dim
        self._norms = weights.Parts(norm_weight, count + 1, 2, norm.parts(tokens, dim), norm.parts(images, dim))
        self._adapters = weights.Parts(
            norm_weight, count, 2, adapter.parts(tokens, dim, bottleneck), adapter.parts(images, dim, bottleneck)
        )
        self.norms = self._norms.of
        self._side = _side_stream(w1.device) if w1.is_cuda else None
        self._in_use: list[Tensor] = []  # read on the second stream: must not be freed before it is done

    def add_adapter(self, place: int, d: Tensor, hidden: Tensor, adapter_in: Tensor, d_hidden: Tensor) -> None:
        """Sum the gradients of the adapter in this place, see :func:`morecl.nn.kernels.adapter.gradients`."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            adapter.gradients(d, hidden, adapter_in, d_hidden, self._adapters.of[place])
        self._in_use += [d, d_hidden]  # the other two are saved for backward anyway

    def totals(self, biases: Tensor, whole: AdapterWeights, masks: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the norms' weights and biases, w1, b1, w2, b2, and the masks, if there are any.

        Args:
            biases: (A, D), the frozen ones before each adapter, which ``adapter_in`` above does not contain.
            whole: the adapters without masks, float32.
        """
        d_norms = weights.norm_totals(self._norms, self._dim)
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._in_use.clear()
        d_adapters, d_masks = weights.adapter_totals(self._adapters, biases, whole, masks)
        return *d_norms, *d_adapters, d_masks


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream other than that of :mod:`morecl.training`, which runs at the same time."""
    return torch.cuda.Stream(device)


def _class_tokens(x: Tensor, images: int) -> Tensor:
    """A view of the class tokens (B, D) among all tokens (N, D)."""
    return x.view(images, -1, x.shape[1])[:, 0]


def _one_by_one(adapters: AdapterWeights) -> list[AdapterWeights]:
    """The weights of each adapter."""
    return [AdapterWeights(*weights) for weights in zip(*(part.unbind() for part in adapters), strict=True)]
