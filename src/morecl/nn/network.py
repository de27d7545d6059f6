"""timm's ViT with an adapter after each branch of each block, run with the parameters of one task or of several."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from morecl.errors import InputError
from morecl.nn import fused
from morecl.nn.adapter import Adapters, AdapterSlot, AdapterWeights
from morecl.nn.gelu import Gelu

RECOMPILE_LIMIT = 64

NormWeights = tuple[Tensor, Tensor]  # weights and biases of all norms
AdapterObserver = Callable[[int, Tensor], object]
FeatureObserver = Callable[[Tensor], object]


class Norms(nn.Module):
    """One task's copy of every LayerNorm, (2 n + 1, D) for n blocks: norm1 and norm2 of each block, then the last."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())


class NormSlot(nn.Module):
    """The LayerNorm of a block. Weight and bias, (D,) or (G, D) for G tasks, are set from outside on every call."""

    weight: Tensor
    bias: Tensor

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_buffer("bias", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension; with weights (G, D) each of G equal parts of the batch has its own."""
    if weight.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    tasks, dim = weight.shape
    plain = F.layer_norm(x, (dim,), eps=eps).reshape(tasks, -1, dim)
    return torch.addcmul(bias[:, None], plain, weight[:, None]).view_as(x)


class AdaptedViT:
    """A ``vit`` with adapters in it: ``x + A1(attn(norm1(x)))``, then ``x + A2(mlp(norm2(x)))``.

    timm's blocks are used with two changes: the adapters come after ``ls1`` and ``ls2``, which timm runs last in each
    branch, and the norms use the weights they are given. A single block without weights serves as template for all: the
    weights of the block, and the norms and adapters of the task, are passed on every call. So the network has no
    current task, and compiling the one block compiles them all.

    ``vit`` itself never changes. If the backbone is trained (not ``frozen``), methods train copies of it
    (:meth:`new_body`), which are passed on every call like norms and adapters; :meth:`trunk` then takes images.

    ``dtype`` is the precision of the blocks. Trained parameters stay float32 and are cast on every call.
    With ``kernels``, :mod:`morecl.nn.fused` computes everything that it supports.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        dtype: torch.dtype = torch.float32,
        *,
        frozen: bool = True,
        kernels: bool = False,
    ):
        self.vit = vit
        self.dtype = dtype
        self.frozen = frozen
        self.kernels = kernels
        self.dim: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.last_norm = "fc_norm" if isinstance(vit.fc_norm, nn.LayerNorm) else "norm"
        self.block = _template(cast(nn.Module, vit.blocks[0]))
        attention = vit.blocks[-1].attn
        plain_attention = type(attention) is Attention and getattr(attention, "gate", None) is None
        reads_class_token = self.last_norm == "norm" and vit.global_pool == "token"
        self._last_block = ClassTokenBlock(self.block) if plain_attention and reads_class_token else None
        states = [block.state_dict(keep_vars=True) for block in vit.blocks]
        if any(_shapes(state) != _shapes(states[0]) for state in states):
            raise InputError("the backbone's blocks differ in shape; adapters cannot be put into it")
        self._frozen = [{key: value.detach() for key, value in _weights(block, dtype).items()} for block in vit.blocks]
        norms = [getattr(block, name) for block in vit.blocks for name in ("norm1", "norm2")]
        norms.append(getattr(vit, self.last_norm))
        if not all(isinstance(norm, nn.LayerNorm) for norm in norms):
            raise InputError("the backbone's norms are not LayerNorms; each task's own copy cannot be made")
        self._norms = Norms(torch.stack([n.weight for n in norms]), torch.stack([n.bias for n in norms]))
        self._fused = (
            kernels
            and self._last_block is not None
            and len({norm.eps for norm in norms[:-1]}) == 1
            and all(fused.supports_block(block) for block in vit.blocks)
        )
        self._adapter_observers = 0
        self._feature_observers: list[FeatureObserver] = []

    def new_adapters(self, bottleneck: int) -> Adapters:
        """Two adapters for each block."""
        return Adapters(2 * self.depth, self.dim, bottleneck)

    def new_norms(self, start: Norms | None = None) -> Norms:
        """Norms for a new task, copied from the backbone's or from ``start``."""
        start = start or self._norms
        return Norms(start.weight, start.bias)

    def new_body(self) -> VisionTransformer:
        """A trainable float32 copy of the backbone, without the norms that :meth:`new_norms` gives."""
        body = copy.deepcopy(self.vit)
        for block in body.blocks:
            block.norm1, block.norm2 = nn.Identity(), nn.Identity()
        setattr(body, self.last_norm, nn.Identity())
        return body.requires_grad_()

    def prefix(self, images: Tensor) -> Tensor:
        """What :meth:`trunk` takes and training never changes: tokens (B, L, D) of a frozen stem, else the images
        (B, 3, S, S) themselves."""
        return self.stem(images) if self.frozen else images

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the :meth:`prefix` of one image."""
        vit = self.vit
        if self.frozen:
            return (vit.patch_embed.num_patches + vit.num_prefix_tokens) * self.dim * self.dtype.itemsize
        return 3 * math.prod(vit.patch_embed.img_size) * torch.float32.itemsize

    def stem(self, images: Tensor, body: VisionTransformer | None = None) -> Tensor:
        """All before the blocks: patches, class token, positions. (B, 3, S, S) -> (B, L, D)."""
        vit = self.vit if body is None else body
        return cast(Tensor, vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))).to(self.dtype)

    def trunk(
        self,
        prefix: Tensor,
        norms: Norms | NormWeights | None = None,
        adapters: AdapterWeights | None = None,
        body: VisionTransformer | None = None,
        *,
        compiled: bool = False,
        plain: bool = False,
        patches: bool = False,
    ) -> Tensor:
        """Blocks and last norm: tokens (B, L, D) -> features (B, D), float32.

        Args:
            prefix: see :meth:`prefix`; with a ``body`` the images.
            norms: norms of a task; by default the backbone's own.
            adapters: see :class:`AdapterWeights`; by default none.
            body: a trained copy of the backbone, whose stem and blocks are used.
            compiled: run the blocks through ``torch.compile``, except a last block that computes only the class token;
                has no effect where our own kernels are used (``kernels`` of the network, :mod:`morecl.nn.fused`).
            plain: do not use our own kernels, so that every operation can be seen from outside.
            patches: append what :meth:`_patch_mean` tells of the patches: (B, 2 D).
        """
        norms = norms or self._norms
        parameters = norms if isinstance(norms, tuple) else (norms.weight, norms.bias)
        observed = self._adapter_observers > 0
        last_inputs: list[Tensor] = []
        observe_last = last_inputs.append if patches else None
        fusible = self._fused and not plain and not observed and body is None and adapters is not None
        if fusible and fused.supports_batch(prefix, cast(AdapterWeights, adapters)):
            features = self._fused_trunk(prefix, parameters, cast(AdapterWeights, adapters), observe_last)
        else:
            features = self._plain_trunk(prefix, parameters, adapters, body, compiled and not observed, observe_last)
        if patches:
            features = torch.cat([features, self._patch_mean(last_inputs[0])], 1)
        for observer in self._feature_observers:
            observer(features)
        return features

    @contextmanager
    def observe_adapters(self, observer: AdapterObserver) -> Iterator[None]:
        """Call ``observer(place, h)`` for each adapter in order, with its input h (B, L, D), in every :meth:`trunk`.

        In a last block that computes only the class token, L is 1. Meanwhile nothing is compiled or left to kernels.
        """
        places = itertools.cycle(range(2 * self.depth))

        def hook(slot: nn.Module, inputs: tuple[Tensor]) -> None:
            observer(next(places), inputs[0])

        # the template block runs once for every block, so its two slots see the inputs of all adapters in turn
        slots = [module for module in self.block.modules() if isinstance(module, AdapterSlot)]
        handles = [slot.register_forward_pre_hook(hook) for slot in slots]
        self._adapter_observers += 1
        try:
            yield
        finally:
            self._adapter_observers -= 1
            for handle in handles:
                handle.remove()

    @contextmanager
    def observe_features(self, observer: FeatureObserver) -> Iterator[None]:
        """Call ``observer(features)`` with what every :meth:`trunk` returns, (B, D).

        Steps that are replayed as CUDA graphs run no Python and are not seen.
        """
        self._feature_observers.append(observer)
        try:
            yield
        finally:
            self._feature_observers.remove(observer)

    def _patch_mean(self, tokens: Tensor) -> Tensor:
        """Mean of the patches among ``tokens`` (B, L, D) before the last block, without mean and scale: (B, D).

        The last block of many ViTs computes only the class token; before it the patches come for free.
        """
        return F.layer_norm(tokens[:, self.vit.num_prefix_tokens :].float().mean(1), (self.dim,))

    def _fused_trunk(
        self,
        tokens: Tensor,
        norms: NormWeights,
        adapters: AdapterWeights,
        observe_last: Callable[[Tensor], object] | None,
    ) -> Tensor:
        first = cast(Block, self.vit.blocks[0])
        eps = first.norm1.eps, getattr(self.vit, self.last_norm).eps
        return fused.trunk(tokens, norms, adapters, self._frozen, first.attn.num_heads, eps, observe_last).float()

    def _plain_trunk(
        self,
        prefix: Tensor,
        norms: NormWeights,
        adapters: AdapterWeights | None,
        body: VisionTransformer | None,
        compiled: bool,
        observe_last: Callable[[Tensor], object] | None,
    ) -> Tensor:
        weights, biases = (part.to(self.dtype).unbind(0) for part in norms)
        parts = [] if adapters is None else [part.to(self.dtype).unbind(0) for part in adapters]
        run = _compiled_block() if compiled else _run_block
        x = prefix if body is None else self.stem(prefix, body)
        if compiled and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else the first block would be compiled separately from the others
        blocks = self._frozen if body is None else [_weights(block, self.dtype) for block in body.blocks]
        for i, block in enumerate(blocks):
            state = dict(block)
            for branch in (0, 1):
                place = 2 * i + branch
                state[f"norm{branch + 1}.weight"] = weights[place]
                state[f"norm{branch + 1}.bias"] = biases[place]
                for name, part in zip(AdapterWeights._fields, parts, strict=False):
                    state[f"ls{branch + 1}.1.{name}"] = part[place]
            if observe_last and i == self.depth - 1:
                observe_last(x)
            if self._last_block and i == self.depth - 1:
                x = _run_block(self._last_block, {f"block.{name}": value for name, value in state.items()}, x)
            else:
                x = run(self.block, state, x)
        return self._pool(x, weights[-1], biases[-1]).float()

    def _pool(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Last norm and class token (or the mean of the patches, for backbones trained that way)."""
        vit = self.vit
        eps = getattr(vit, self.last_norm).eps
        if self.last_norm == "fc_norm":
            return layer_norm(vit.pool(vit.norm(x)), weight, bias, eps)
        if vit.global_pool == "token":  # the norm works token by token: the class token is enough
            return layer_norm(vit.pool(x), weight, bias, eps)
        return cast(Tensor, vit.pool(layer_norm(x, weight, bias, eps)))


class ClassTokenBlock(nn.Module):
    """The last block if only the class token is read after it: (B, L, D) -> (B, 1, D).

    Keys and values are computed for all tokens; query, projection, MLP and adapters for the class token only.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        first = x[:, :1] + block.ls1(self._attend(block.norm1(x)))  # type: ignore[operator]
        return cast(Tensor, first + block.ls2(block.mlp(block.norm2(first))))  # type: ignore[operator]

    def _attend(self, x: Tensor) -> Tensor:
        attn = cast(Attention, self.block.attn)
        dim = attn.proj.in_features
        weight = attn.qkv.weight
        bias = attn.qkv.bias
        q = F.linear(x[:, :1].contiguous(), weight[:dim], None if bias is None else bias[:dim])
        kv = F.linear(x, weight[dim:], None if bias is None else bias[dim:])
        parts = (part.unflatten(-1, (-1, attn.num_heads, dim // attn.num_heads)) for part in (q, kv))
        (q,), (k, v) = (part.permute(2, 0, 3, 1, 4) for part in parts)  # each (B, heads, tokens, D / heads)
        out = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        return cast(Tensor, attn.proj(attn.norm(out.transpose(1, 2).flatten(2))))


def _run_block(block: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    return cast(Tensor, functional_call(block, state, (x,), tie_weights=False))


@functools.cache
def _compiled_block(backend: str = "inductor") -> Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]:
    """:func:`_run_block`, compiled once for all batch sizes and once for each new width.

    A process that runs several methods would soon reach torch's own limit of recompilations, after which torch runs
    uncompiled code.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    compiled = torch.compile(_run_block, dynamic=False, backend=backend)

    def run(block: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(block, state, x)

    return run


def _template(block: nn.Module) -> nn.Module:
    """A copy of the block without weights, with slots for norms and adapters."""
    template = copy.deepcopy(block).to("meta").eval()
    for name in ("norm1", "norm2"):
        setattr(template, name, NormSlot(getattr(block, name).eps))
    for name in ("ls1", "ls2"):
        setattr(template, name, nn.Sequential(getattr(template, name), AdapterSlot()))
    for part in template.modules():
        for name, child in part.named_children():
            if type(child) is nn.GELU and child.approximate == "none":
                setattr(part, name, Gelu())
    return template


def _weights(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a block except its norms. ``ls1.gamma`` becomes ``ls1.0.gamma``, as the adapter is ``ls1.1``."""
    return {
        key.replace("ls1.", "ls1.0.").replace("ls2.", "ls2.0."): value.to(dtype)
        for key, value in block.state_dict(keep_vars=True).items()
        if not key.startswith(("norm1.", "norm2."))
    }


def _shapes(state: dict[str, Tensor]) -> dict[str, Sequence[int]]:
    return {key: value.shape for key, value in state.items()}
