"""timm's ``Beit``: BEiT and BEiT v2. Positions are a bias of the attention, learned in each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from timm.models.beit import Attention, Block, checkpoint_filter_fn
from timm.models.beit import Beit as TimmBeit
from torch import Tensor

from morecl.nn.families.base import Family, Pooling


class Beit(Family):
    network = TimmBeit
    title = "BEiT, BEiT v2 (timm's Beit)"
    modules = ("beit",)
    block = Block
    attention = (Attention,)

    def stem(self, vit: TimmBeit, images: Tensor) -> Tensor:
        patches = vit.patch_embed(images)
        tokens = torch.cat([vit.cls_token.expand(len(patches), -1, -1), patches], 1)
        return tokens if vit.pos_embed is None else tokens + vit.pos_embed

    def pooling(self, vit: TimmBeit) -> Pooling:
        return Pooling("avg" if vit.global_pool == "avg" else "token", vit.num_prefix_tokens)

    def refusal(self, vit: TimmBeit) -> str | None:
        if vit.rel_pos_bias is not None:
            return "shares its position bias among blocks, which none of timm's own models does"
        return super().refusal(vit)

    def converted(self, state: dict[str, Tensor], vit: TimmBeit) -> Mapping[str, Tensor]:
        return checkpoint_filter_fn(state, vit)
