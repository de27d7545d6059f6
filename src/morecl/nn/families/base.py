"""What the network with adapters must know about a kind of ViT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from timm.layers import PatchEmbed
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

# One of timm's ViTs. They have no base class in common, but ``patch_embed``, ``blocks``, ``norm``, ``fc_norm``,
# ``embed_dim`` and ``num_prefix_tokens``.
ViT = Any

BLOCK_NORMS = ("norm1", "norm2")  # the first thing in the attention branch and in the MLP branch
BRANCH_ENDS = ("drop_path1", "drop_path2")  # the last thing in each branch; the identity, except while timm trains


class Pooling(nn.Module):
    """From the tokens after the last block to the features: (B, L, D) -> (B, D).

    ``kind`` is timm's name for it: ``token`` (the class token), ``avg``, ``max``, ``avgmax``; with ``attention``, one
    of timm's attention pools, that is used. ``skip`` tokens at the front are not pooled.
    """

    def __init__(self, kind: str, skip: int, attention: nn.Module | None = None):
        super().__init__()
        self.kind = kind
        self.skip = skip
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            return self.attention(x[:, self.skip :])
        return global_pool_nlc(x, self.kind, self.skip)


class Family(ABC):
    """One of timm's ViT classes: what is equal in all of them is here, what differs in a file per family.

    :class:`morecl.nn.network.AdaptedViT` asks in this order: :meth:`stem` for the tokens, :meth:`block_inputs` for what
    the blocks take beside them, :meth:`pooling` for the features after the last block.

    Adapters stand at the ends of the two branches of a block, after layer scale: ``x + A1(s1 attn(norm1(x)))``, then
    ``x + A2(s2 mlp(norm2(x)))``. A task owns norm1 and norm2 of each block and the one norm after the blocks. All
    other norms (before the blocks, within attention, MLP or pooling) stay the backbone's.
    """

    network: ClassVar[type[nn.Module]]
    title: ClassVar[str]  # in listings
    modules: ClassVar[tuple[str, ...]]  # of timm, where its models are
    block: ClassVar[type[nn.Module]]
    attention: ClassVar[tuple[type[nn.Module], ...]]

    @abstractmethod
    def stem(self, vit: ViT, images: Tensor) -> Tensor:
        """All before the blocks: (B, 3, S, S) -> (B, L, D)."""

    def block_inputs(self, vit: ViT) -> list[dict[str, Tensor]]:
        """What each block takes beside the tokens, by name: positions that depend on the grid alone."""
        return [{} for _ in vit.blocks]

    @abstractmethod
    def pooling(self, vit: ViT) -> Pooling:
        """How features are made of the tokens. Has the weights of ``vit``, if any."""

    @abstractmethod
    def converted(self, state: dict[str, Tensor], vit: ViT) -> Mapping[str, Tensor]:
        """A checkpoint under timm's names, as published or as timm writes it, with positions resampled to fit."""

    def last_norm(self, vit: ViT) -> str:
        """Name of the norm after the blocks: before the pooling or after it."""
        return "norm" if isinstance(vit.fc_norm, nn.Identity) else "fc_norm"

    def refusal(self, vit: ViT) -> str | None:
        """Why ``vit`` cannot take adapters, to be read after its name; ``None`` if it can."""
        others = {type(block).__name__ for block in vit.blocks if type(block) is not self.block}
        if others:
            return f"has blocks of the kind {others.pop()}, not timm's pre-norm blocks, so it cannot take adapters"
        others = {type(block.attn).__name__ for block in vit.blocks if type(block.attn) not in self.attention}
        if others:
            return f"has {others.pop()}, which is not the same in all blocks, so one block cannot stand for all"
        if type(vit.patch_embed) is not PatchEmbed:
            return f"is a hybrid: its tokens come from a network of its own ({type(vit.patch_embed).__name__})"
        after = [norm for norm in (vit.norm, vit.fc_norm) if not isinstance(norm, nn.Identity)]
        norms = [getattr(block, name) for block in vit.blocks for name in BLOCK_NORMS] + after
        others = {type(norm).__name__ for norm in norms if not isinstance(norm, nn.LayerNorm)}
        if others:
            return f"has norms of the kind {others.pop()}, not LayerNorm: a task cannot have its own copy"
        if len(after) != 1:
            return f"has {len(after) or 'no'} norms after its blocks instead of one: a task cannot have its own copy"
        if not vit.global_pool:
            return "does not pool its tokens, so it has no features"
        shapes = [{key: value.shape for key, value in block.state_dict().items()} for block in vit.blocks]
        if any(shape != shapes[0] for shape in shapes):
            return "has blocks that differ in shape, so one block cannot stand for all"
        return None
