"""timm's ``VisionTransformer``: ViT, DeiT, DINOv2 (with registers), CLIP, SigLIP, and many more.

Patches, class token, registers and learned positions, in CLIP a norm, then blocks. Features are the class token, the
mean of the patches or, in SigLIP, what attention pooling makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor

from morecl.nn.families.base import Family, Pooling


class Plain(Family):
    network = VisionTransformer
    title = "ViT, DeiT, DINOv2, CLIP, SigLIP (timm's VisionTransformer)"
    modules = ("deit", "vision_transformer")
    block = Block
    attention = (Attention,)

    def stem(self, vit: VisionTransformer, images: Tensor) -> Tensor:
        return vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))

    def pooling(self, vit: VisionTransformer) -> Pooling:
        skip = 0 if vit.pool_include_prefix else vit.num_prefix_tokens
        return Pooling(vit.global_pool, skip, vit.attn_pool)

    def converted(self, state: dict[str, Tensor], vit: VisionTransformer) -> Mapping[str, Tensor]:
        return checkpoint_filter_fn(state, vit)
