"""timm's ViTs with an adapter after each branch of each block, run with the parameters of one task or of several."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from morecl.nn import ahead, fused, linear
from morecl.nn.adapter import Adapters, AdapterSlot, AdapterWeights
from morecl.nn.families import ViT, family_of
from morecl.nn.families.base import BLOCK_NORMS, BRANCH_ENDS
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

    timm's blocks are used with two changes: the adapters take the place of ``drop_path1`` and ``drop_path2``, which
    timm runs last in each branch and which do nothing here, and the norms use the weights they are given. A single
    block without weights serves as template for all: the weights of the block, and the norms and adapters of the task,
    are passed on every call. So the network has no current task, and compiling the one block compiles them all. What
    differs between timm's kinds of ViT is in :mod:`morecl.nn.families`.

    ``vit`` itself never changes. If the backbone is trained (not ``frozen``), methods train copies of it
    (:meth:`new_body`), which are passed on every call like norms and adapters; :meth:`trunk` then takes images.

    ``dtype`` is the precision of the blocks. Trained parameters stay float32 and are cast on every call.
    With ``kernels``, :mod:`morecl.nn.fused` computes everything that it supports.
    """

    def __init__(
        self,
        vit: ViT,
        dtype: torch.dtype = torch.float32,
        *,
        frozen: bool = True,
        kernels: bool = False,
    ):
        self.vit = vit
        self.family = family_of(vit)
        self.dtype = dtype
        self.frozen = frozen
        self.kernels = kernels
        self.dim: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.last_norm = self.family.last_norm(vit)
        self.block = _template(cast(nn.Module, vit.blocks[0]))
        pooling = self.family.pooling(vit)
        self.pooling = copy.deepcopy(pooling).to("meta").eval()
        attention = vit.blocks[-1].attn
        plain_attention = type(attention) is Attention and getattr(attention, "gate", None) is None
        self._reads_class_token = self.last_norm == "norm" and pooling.kind == "token" and pooling.attention is None
        self._last_block = ClassTokenBlock(self.block) if plain_attention and self._reads_class_token else None
        self._frozen = [_detached(_block_weights(block, dtype)) for block in vit.blocks]
        self._frozen_pooling = _detached(_weights(pooling, dtype))
        self._frozen_inputs = [_detached(inputs) for inputs in self.family.block_inputs(vit)]
        norms = [getattr(block, name) for block in vit.blocks for name in BLOCK_NORMS]
        norms.append(getattr(vit, self.last_norm))
        self._norms = Norms(torch.stack([n.weight for n in norms]), torch.stack([n.bias for n in norms]))
        self._fused = (
            kernels
            and self._last_block is not None
            and len({norm.eps for norm in norms[:-1]}) == 1
            and all(fused.supports_block(block) for block in vit.blocks)
        )
        self._adapter_observers = 0
        self._feature_observers: list[FeatureObserver] = []
        self._turn = _Turn()

    def new_adapters(self, bottleneck: int) -> Adapters:
        """Two adapters for each block."""
        return Adapters(2 * self.depth, self.dim, bottleneck)

    def new_norms(self, start: Norms | None = None) -> Norms:
        """Norms for a new task, copied from the backbone's or from ``start``."""
        start = start or self._norms
        return Norms(start.weight, start.bias)

    def new_body(self) -> ViT:
        """A trainable float32 copy of the backbone, without the norms that :meth:`new_norms` gives."""
        body = copy.deepcopy(self.vit)
        for block in body.blocks:
            for name in BLOCK_NORMS:
                setattr(block, name, nn.Identity())
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

    def stem(self, images: Tensor, body: ViT | None = None) -> Tensor:
        """All before the blocks: patches, class token, positions. (B, 3, S, S) -> (B, L, D)."""
        vit = self.vit if body is None else body
        return self.family.stem(vit, images).to(self.dtype)

    def compile_ahead(self, images: int, bottleneck: int) -> None:
        """Have the kernels for training on ``images`` at a time compiled meanwhile, see :mod:`morecl.nn.ahead`."""
        if self._fused:
            length = self.vit.patch_embed.num_patches + self.vit.num_prefix_tokens
            ahead.start((images, length, self.dim), bottleneck, self._frozen, self.vit.blocks[0].attn.num_heads)

    def trunk(
        self,
        prefix: Tensor,
        norms: Norms | NormWeights | None = None,
        adapters: AdapterWeights | None = None,
        body: ViT | None = None,
        *,
        masks: Tensor | None = None,
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
            masks: of the adapters, see :meth:`AdapterWeights.under`.
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
        fusible = self._fused and not plain and not observed and body is None
        if fusible and adapters is not None and self._is_for_kernels(prefix, adapters):
            ahead.wait()
            first = self.vit.blocks[0]
            eps, heads = (first.norm1.eps, getattr(self.vit, self.last_norm).eps), first.attn.num_heads
            features = fused.trunk(prefix, parameters, adapters, self._frozen, heads, eps, observe_last, masks).float()
        else:
            if adapters is not None and masks is not None:
                adapters = adapters.under(masks)
            # the template holds the weights of one call at a time
            with self._turn, linear.torchs_own(plain):
                features = self._plain_trunk(
                    prefix, parameters, adapters, body, compiled and not observed, observe_last
                )
        if patches:
            features = torch.cat([features, self._patch_mean(last_inputs[0])], 1)
        for observer in self._feature_observers:
            observer(features)
        return features

    def _is_for_kernels(self, prefix: Tensor, adapters: AdapterWeights) -> bool:
        """Whether our kernels can compute this, and faster than what else would."""
        able = fused.supports_batch(prefix, adapters)
        return able and (not torch.is_grad_enabled() or fused.trains_faster(self.dim, adapters.w1.shape[1]))

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

    @property
    def is_observed(self) -> bool:
        """Whether someone wants to see what passes through; so it must."""
        return self._adapter_observers > 0 or bool(self._feature_observers)

    def _patch_mean(self, tokens: Tensor) -> Tensor:
        """Mean of the patches among ``tokens`` (B, L, D) before the last block, without mean and scale: (B, D).

        The last block of many ViTs computes only the class token; before it the patches come for free.
        """
        return F.layer_norm(tokens[:, self.vit.num_prefix_tokens :].float().mean(1), (self.dim,))

    def _plain_trunk(
        self,
        prefix: Tensor,
        norms: NormWeights,
        adapters: AdapterWeights | None,
        body: ViT | None,
        compiled: bool,
        observe_last: Callable[[Tensor], object] | None,
    ) -> Tensor:
        weights, biases = (part.to(self.dtype).unbind(0) for part in norms)
        parts = [] if adapters is None else [part.to(self.dtype).unbind(0) for part in adapters]
        run = _compiled_block() if compiled else _call
        x = prefix if body is None else self.stem(prefix, body)
        if compiled and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else the first block would be compiled separately from the others
        blocks, inputs, pooling = self._frozen, self._frozen_inputs, self._frozen_pooling
        if body is not None:
            blocks = [_block_weights(block, self.dtype) for block in body.blocks]
            inputs = self.family.block_inputs(body)
            pooling = _weights(self.family.pooling(body), self.dtype)
        for i, block in enumerate(blocks):
            state = dict(block)
            for branch, (norm, end) in enumerate(zip(BLOCK_NORMS, BRANCH_ENDS, strict=True)):
                place = 2 * i + branch
                state[f"{norm}.weight"] = weights[place]
                state[f"{norm}.bias"] = biases[place]
                for name, part in zip(AdapterWeights._fields, parts, strict=False):
                    state[f"{end}.{name}"] = part[place]
            if observe_last and i == self.depth - 1:
                observe_last(x)
            if self._last_block and i == self.depth - 1:
                x = _call(self._last_block, {f"block.{name}": value for name, value in state.items()}, x)
            else:
                x = run(self.block, state, x, inputs[i])
        return self._features(x, weights[-1], biases[-1], pooling).float()

    def _features(self, x: Tensor, weight: Tensor, bias: Tensor, pooling: Mapping[str, Tensor]) -> Tensor:
        """Last norm and pooling, in the backbone's order: (B, L, D) -> (B, D)."""
        eps = getattr(self.vit, self.last_norm).eps
        if self._reads_class_token:  # the norm works token by token: the class token is enough
            return layer_norm(x[:, 0], weight, bias, eps)
        if self.last_norm == "fc_norm":
            return layer_norm(_call(self.pooling, pooling, x), weight, bias, eps)
        return _call(self.pooling, pooling, layer_norm(x, weight, bias, eps))


class _Turn:
    """A lock; a copy has its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: object) -> _Turn:
        return _Turn()


class ClassTokenBlock(nn.Module):
    """The last block if only the class token is read after it: (B, L, D) -> (B, 1, D).

    Keys and values are computed for all tokens; query, projection, MLP and adapters for the class token only.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.block
        first = x[:, :1] + block.drop_path1(block.ls1(self._attend(block.norm1(x))))
        return first + block.drop_path2(block.ls2(block.mlp(block.norm2(first))))

    def _attend(self, x: Tensor) -> Tensor:
        attn = cast(Attention, self.block.attn)
        dim = attn.proj.in_features
        weight = attn.qkv.weight
        bias = attn.qkv.bias
        q = linear.linear(x[:, :1].contiguous(), weight[:dim], None if bias is None else bias[:dim])
        kv = linear.linear(x, weight[dim:], None if bias is None else bias[dim:])
        parts = (part.unflatten(-1, (-1, attn.num_heads, dim // attn.num_heads)) for part in (q, kv))
        (q,), (k, v) = (part.permute(2, 0, 3, 1, 4) for part in parts)  # each (B, heads, tokens, D / heads)
        out = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        return cast(Tensor, attn.proj(attn.norm(out.transpose(1, 2).flatten(2))))


BlockRunner = Callable[[nn.Module, Mapping[str, Tensor], Tensor, Mapping[str, Tensor] | None], Tensor]


def _call(
    module: nn.Module, state: Mapping[str, Tensor], x: Tensor, inputs: Mapping[str, Tensor] | None = None
) -> Tensor:
    """``module(x, **inputs)`` with the weights ``state``."""
    return cast(Tensor, functional_call(module, dict(state), (x,), dict(inputs or {}), tie_weights=False))


@functools.cache
def _compiled_block(backend: str = "inductor") -> BlockRunner:
    """:func:`_call`, compiled once for all batch sizes and once for each new width.

    A process that runs several methods would soon reach torch's own limit of recompilations, after which torch runs
    uncompiled code.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    compiled = torch.compile(_call, dynamic=False, backend=backend)

    def run(
        block: nn.Module, state: Mapping[str, Tensor], x: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(block, state, x, inputs)

    return run


def _template(block: nn.Module) -> nn.Module:
    """A copy of the block without weights, with slots for norms and adapters."""
    template = copy.deepcopy(block).to("meta").eval()
    for name in BLOCK_NORMS:
        setattr(template, name, NormSlot(getattr(block, name).eps))
    for name in BRANCH_ENDS:
        setattr(template, name, AdapterSlot())
    for part in template.modules():
        for name, child in part.named_children():
            if type(child) is nn.GELU and child.approximate == "none":
                setattr(part, name, Gelu())
            if type(child) is nn.Linear:
                setattr(part, name, linear.Linear.of(child))
    return template


def _weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a module, also those that are computed and not saved; floating-point ones as ``dtype``.

    Where gradients are off they are detached: torch's matmul goes by ``requires_grad`` even then, and the features of a
    finished task would get other bits once the backbone is no longer trained.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    weights = {key: value.to(dtype) if value.is_floating_point() else value for key, value in named}
    return weights if torch.is_grad_enabled() else _detached(weights)


def _block_weights(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a block except the norms that belong to tasks."""
    mine = tuple(f"{name}." for name in BLOCK_NORMS)
    return {key: value for key, value in _weights(block, dtype).items() if not key.startswith(mine)}


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in tensors.items()}
