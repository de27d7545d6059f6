"""Tiny members of the families of ViTs, with random weights, as models that timm knows by name.

``import family_members`` registers them; ``load_backbone(name, pretrained=False)`` and saved learners then find them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

LAYER_NORM = partial(nn.LayerNorm, eps=1e-5)
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}

# name -> class, arguments in which it differs from SMALL
MEMBERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "tiny_dinov2_reg": (VisionTransformer, {"init_values": 0.5, "reg_tokens": 2, "no_embed_class": True}),
    "tiny_clip": (VisionTransformer, {"pre_norm": True, "norm_layer": LAYER_NORM}),
    "tiny_siglip": (VisionTransformer, {"class_token": False, "global_pool": "map"}),
    "tiny_siglip_gap": (VisionTransformer, {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "tiny_eva02": (
        Eva,
        {"mlp_ratio": 8 / 3, "swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)},
    ),
    "tiny_eva02_clip": (  # as from base size on: separate projections, norms in MLP and attention
        Eva,
        {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True, "use_rot_pos_emb": True}
        | {"ref_feat_shape": (4, 4), "global_pool": "token"},
    ),
    "tiny_dinov3": (
        Eva,
        {"dynamic_img_size": True, "init_values": 0.5, "rope_type": "dinov3", "rope_temperature": 100}
        | {"rope_rotate_half": True, "use_rot_pos_emb": True, "use_abs_pos_emb": False, "num_reg_tokens": 2}
        | {"qkv_bias": False, "use_fc_norm": False, "norm_layer": LAYER_NORM},
    ),
    "tiny_rope_mixed": (  # angles learned for each block
        Eva,
        {"attn_type": "rope", "init_values": 0.5, "global_pool": "token", "use_abs_pos_emb": False}
        | {"use_rot_pos_emb": True, "rope_type": "mixed", "rope_temperature": 10.0},
    ),
    "tiny_pe_core": (
        Eva,
        {"attn_type": "rope", "global_pool": "map", "attn_pool_num_heads": 4, "use_pre_transformer_norm": True}
        | {"use_rot_pos_emb": True, "ref_feat_shape": (4, 4), "rope_grid_offset": 1.0},
    ),
    "tiny_beit": (Beit, {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.5}),
    "tiny_beit_token": (Beit, {"use_rel_pos_bias": True, "global_pool": "token", "qkv_bias": False}),
}


def _spread(vit: nn.Module) -> nn.Module:
    """Weights that are neither 0 nor 1, so that each of them matters."""
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return vit


def _maker(name: str) -> Callable[..., nn.Module]:
    kind, arguments = MEMBERS[name]

    def make(pretrained: bool = False, **changes: Any) -> nn.Module:
        for unused in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            changes.pop(unused, None)
        vit = build_model_with_cfg(
            kind, name, False, pretrained_cfg={"mean": (0.5,) * 3, "std": (0.5,) * 3}, **SMALL | arguments | changes
        )
        return _spread(vit)

    make.__name__ = name
    return make


for _name in MEMBERS:
    register_model(_maker(_name))
