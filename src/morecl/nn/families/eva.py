"""timm's ``Eva``: EVA-02, DINOv3, Perception Encoder and other ViTs with rotary positions, SwiGLU or both.

Positions are added to the tokens as in a plain ViT, or turn queries and keys in every block (rotary), or both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from timm.layers import AttentionRope
from timm.models.eva import Eva as TimmEva
from timm.models.eva import EvaAttention, EvaBlock, checkpoint_filter_fn
from torch import Tensor

from morecl.nn.families.base import Family, Pooling


class Eva(Family):
    network = TimmEva
    title = "EVA-02, DINOv3, Perception Encoder (timm's Eva)"
    modules = ("eva",)
    block = EvaBlock
    attention = (EvaAttention, AttentionRope)

    def stem(self, vit: TimmEva, images: Tensor) -> Tensor:
        still = copy.copy(vit)  # without rotary positions, which timm would make anew here, some of them on the CPU
        still._modules = vit._modules | {"rope": None}
        tokens, _ = still._pos_embed(vit.patch_embed(images))
        return vit.norm_pre(tokens)

    def block_inputs(self, vit: TimmEva) -> list[dict[str, Tensor]]:
        """``rope``: sines and cosines for each patch, float32; the same in all blocks, or learned for each."""
        if vit.rope is None:
            return super().block_inputs(vit)
        angles = vit.rope.get_embed(vit.patch_embed.grid_size if vit.dynamic_img_size else None)
        return [{"rope": rope} for rope in (angles if vit.rope_mixed else [angles] * len(vit.blocks))]

    def pooling(self, vit: TimmEva) -> Pooling:
        skip = vit.num_prefix_tokens if vit.attn_pool is None else 0
        return Pooling(vit.global_pool, skip, vit.attn_pool)

    def converted(self, state: dict[str, Tensor], vit: TimmEva) -> Mapping[str, Tensor]:
        return checkpoint_filter_fn(state, vit)
