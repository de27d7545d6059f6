"""Backbones by name, from both kinds of files, at other sizes; errors say what does not fit."""

from __future__ import annotations

import argparse
import socket
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants, is_offline_mode
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from family_members import SMALL
from morecl.catalogue import SHIPPED
from morecl.errors import InputError
from morecl.nn.backbone import _input_spec, load_backbone, located

TINY = "test_vit"  # timm's smallest: 0.4 M parameters


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """The shipped weights under timm's names."""
    return {key: value.detach().clone() for key, value in load_backbone(SHIPPED).state.items()}


def test_shipped_backbone() -> None:
    backbone = load_backbone(SHIPPED)
    assert (backbone.name, backbone.architecture) == (SHIPPED, SHIPPED)
    assert (backbone.input.size, backbone.input.resize) == (32, 32)
    assert sum(value.numel() for value in backbone.state.values()) == 2_691_648
    assert not any(p.requires_grad for p in backbone.vit.parameters())
    assert not backbone.vit.training
    assert backbone.sha256 == load_backbone(SHIPPED).sha256


@pytest.mark.parametrize(
    "content", ["safetensors", "plain", "model", "state_dict", "module", "with classifier", "double", "training state"]
)
def test_checkpoint_files(state: dict[str, torch.Tensor], tmp_path: Path, content: str) -> None:
    """However the weights are wrapped, the network is the same; a training script's other entries do not matter."""
    name = tmp_path / "weights.pth"
    saved: Any = state
    if content == "safetensors":
        name = tmp_path / "weights.safetensors"
        save_file(state, name)
    elif content in ("model", "state_dict"):
        saved = {content: state, "epoch": 3}
    elif content == "module":
        saved = {f"module.{key}": value for key, value in state.items()}
    elif content == "with classifier":
        saved = state | {"head.weight": torch.zeros(611, 192), "head.bias": torch.zeros(611)}
    elif content == "double":
        saved = {key: value.double() for key, value in state.items()}
    elif content == "training state":  # as DeiT's training script writes best_checkpoint.pth
        saved = {"model": state, "epoch": 299, "args": argparse.Namespace(lr=5e-4, model=TINY), "scaler": {"scale": 1}}
    if content != "safetensors":
        torch.save(saved, name)
    backbone = load_backbone(f"{SHIPPED}@{name}")
    assert backbone.architecture == SHIPPED
    assert backbone.sha256 == load_backbone(SHIPPED).sha256
    by_shape = load_backbone(str(name))
    assert by_shape.architecture == ""
    assert by_shape.sha256 == backbone.sha256
    assert by_shape.vit.blocks[0].attn.num_heads == backbone.vit.blocks[0].attn.num_heads


def test_half_precision_files_are_used_in_float32(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({key: value.bfloat16() for key, value in state.items()}, tmp_path / "half.safetensors")
    backbone = load_backbone(f"{SHIPPED}@{tmp_path / 'half.safetensors'}")
    for key, value in state.items():
        assert torch.equal(backbone.state[key], value.bfloat16().float())


def test_the_source_is_known_at_every_input_size() -> None:
    """Resampled weights have another sha256; that of the file they came from stays."""
    plain, other = load_backbone(SHIPPED), load_backbone(SHIPPED, image_size=16)
    assert plain.sha256 != other.sha256
    assert plain.source_sha256 == other.source_sha256 == plain.sha256
    assert load_backbone(TINY, pretrained=False).source_sha256 == ""
    assert load_backbone(SHIPPED, pretrained=False).source_sha256 == ""


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "exploded").touch, ())

    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(InputError, match=r"bomb\.pth cannot be read"):
        load_backbone(f"{SHIPPED}@{tmp_path / 'bomb.pth'}")
    assert not (tmp_path / "exploded").exists()


def test_file_named_after_its_architecture(tmp_path: Path) -> None:
    vit = timm.create_model(TINY, num_classes=0)
    save_file(vit.state_dict(), tmp_path / f"{TINY}.safetensors")
    backbone = load_backbone(str(tmp_path / f"{TINY}.safetensors"))
    assert backbone.architecture == TINY
    assert (backbone.input.size, backbone.input.resize) == (160, 168)  # timm's crop share of 0.95
    assert all(torch.equal(value, backbone.state[key]) for key, value in vit.state_dict().items())


def test_random_weights_come_from_the_seed_and_touch_nothing_else() -> None:
    before = torch.get_rng_state()
    one, same, other = (load_backbone(TINY, pretrained=False, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert one.sha256 == same.sha256 != other.sha256


@pytest.mark.parametrize("size", [8, 16, 48])
def test_other_input_size_resamples_the_position_embedding(size: int) -> None:
    plain, other = load_backbone(SHIPPED), load_backbone(SHIPPED, image_size=size)
    assert (other.input.size, other.input.resize) == (size, size)
    assert other.vit.pos_embed.shape == (1, (size // 4) ** 2 + 1, 192)
    changed = {key for key in plain.state if not torch.equal(plain.state[key], other.state[key])}
    assert changed == {"pos_embed"}
    assert torch.equal(plain.vit.pos_embed[:, 0], other.vit.pos_embed[:, 0])  # the class token has no place
    x = torch.zeros(1, 3, size, size)
    assert torch.isfinite(other.vit(x)).all()


def test_what_is_missing_wrong_or_superfluous_is_named(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    bad = dict(state)
    del bad["blocks.3.norm1.weight"]
    bad["blocks.2.mlp.fc1.bias"] = torch.zeros(5)
    bad["blocks.2.gamma"] = torch.zeros(5)
    save_file(bad, tmp_path / "bad.safetensors")
    with pytest.raises(InputError) as caught:
        load_backbone(f"{SHIPPED}@{tmp_path / 'bad.safetensors'}")
    message = str(caught.value)
    assert "missing: blocks.3.norm1.weight" in message
    assert "wrong shape: blocks.2.mlp.fc1.bias (5,) instead of (768,)" in message
    assert "not expected: blocks.2.gamma" in message


def test_other_architecture_says_what_does_not_fit(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"do not fit the network.*wrong shape: .*and \d+ more"):
        load_backbone(f"{TINY}@{tmp_path / 'w.safetensors'}")


@pytest.mark.parametrize("name", ["tiny_clip", "tiny_dinov3", "tiny_beit"])
def test_weights_that_timm_cannot_convert_are_named_too(name: str, tmp_path: Path) -> None:
    save_file({"pos_embed": torch.zeros(3), "patch_embed.proj.weight": torch.zeros(4)}, tmp_path / "w.safetensors")
    with pytest.raises(
        InputError, match=r"do not fit the network. missing: .*wrong shape: patch_embed.proj.weight \(4,\)"
    ):
        load_backbone(f"{name}@{tmp_path / 'w.safetensors'}")


@pytest.mark.parametrize("spec", ["~/w.safetensors", f"{SHIPPED}@~/w.safetensors"])
def test_a_file_in_the_home_folder(
    spec: str, state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(state, tmp_path / "w.safetensors")
    assert located(spec, Path("elsewhere")).endswith(str(tmp_path / "w.safetensors"))
    assert load_backbone(spec).source_sha256 == load_backbone(str(tmp_path / "w.safetensors")).source_sha256


def test_a_file_without_a_name_that_is_no_plain_vit_says_how_to_name_it(tmp_path: Path) -> None:
    vit = load_backbone("tiny_dinov2_reg", pretrained=False).vit
    save_file(dict(vit.state_dict()), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"do not fit the network.*name its architecture: NAME@.*w\.safetensors"):
        load_backbone(str(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vit_mini_patch4_33", "did you mean 'vit_mini_patch4_32'"),
        ("deit_smal_patch16_224", "did you mean 'deit_small_patch16_224'"),
        ("no/such/file.safetensors", "does not exist"),
        (f"{SHIPPED}@no/such/file.pth", "does not exist"),
        ("resnet18", "resnet18 is a ResNet"),
        ("", "backbone needs a name or a file"),
        (" ", "backbone needs a name or a file"),
        ("swin_tiny_patch4_window7_224", "is a SwinTransformer, which cannot take adapters"),
        ("deit_tiny_distilled_patch16_224", "is a VisionTransformerDistilled"),
        ("vit_base_patch16_rpn_224", "blocks of the kind ResPostBlock, not timm's pre-norm blocks"),
        ("vit_small_patch16_18x2_224", "blocks of the kind ParallelThingsBlock"),
        ("vit_dwee_patch16_reg1_gap_256", "has DiffAttention, which is not the same in all blocks"),
        ("vit_tiny_r_s16_p8_224", "is a hybrid: its tokens come from a network of its own"),
        ("test_vit4", "norms of the kind RmsNorm, not LayerNorm"),
        ("vit_intern300m_patch14_448", "has no norms after its blocks"),
    ],
)
def test_names_that_cannot_be(spec: str, message: str) -> None:
    """Said before any weights are fetched."""
    with pytest.raises(InputError, match=message):
        load_backbone(spec)


@pytest.mark.parametrize("size", [8, 170])
def test_a_size_that_gives_no_whole_patches(size: int) -> None:
    """``test_vit`` takes images of any size made of its patches of 16 pixels."""
    with pytest.raises(InputError, match=f"size of {size} cannot be cut into patches of 16 pixels; (16|176) can"):
        load_backbone(TINY, image_size=size, pretrained=False)


def test_mean_and_standard_deviation_are_the_models_own() -> None:
    """Values as published with CLIP and SigLIP."""
    specs = {}
    for name in ("vit_xsmall_patch16_clip_224", "vit_base_patch16_siglip_224"):
        with torch.device("meta"):
            vit = timm.create_model(name, num_classes=0, depth=1)
        specs[name] = _input_spec(vit, dict(vit.pretrained_cfg))
    clip, siglip = specs.values()
    assert clip.mean == (0.48145466, 0.4578275, 0.40821073) and clip.std == (0.26862954, 0.26130258, 0.27577711)
    assert siglip.mean == siglip.std == (0.5, 0.5, 0.5)
    assert clip.size == siglip.size == 224


def test_published_files_are_read_under_their_own_names(tmp_path: Path) -> None:
    """CLIP as OpenAI wrote it: image tower under ``visual.``, other names, beside a text tower."""
    vit = VisionTransformer(**SMALL, pre_norm=True)
    swaps = {
        "patch_embed.proj": "conv1",
        "norm_pre": "ln_pre",
        "attn.qkv.": "attn.in_proj_",
        "attn.proj": "attn.out_proj",
    }
    swaps |= {"norm1": "ln_1", "norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    published = {"visual.proj": torch.zeros(32, 8), "token_embedding.weight": torch.zeros(5, 4)}
    for key, value in vit.state_dict().items():
        name = f"transformer.resblocks.{key[7:]}" if key.startswith("blocks.") else key
        for ours, theirs in swaps.items():
            name = name.replace(ours, theirs)
        whole = {"cls_token": "class_embedding", "pos_embed": "positional_embedding"}
        name = {"norm.weight": "ln_post.weight", "norm.bias": "ln_post.bias"}.get(name, name)
        published[f"visual.{whole.get(name, name)}"] = value.squeeze(0) if key == "pos_embed" else value
    published["visual.class_embedding"] = vit.cls_token[0, 0]
    save_file({key: value.detach().clone() for key, value in published.items()}, tmp_path / "clip.safetensors")
    backbone = load_backbone(f"tiny_clip@{tmp_path / 'clip.safetensors'}")
    for key, value in vit.state_dict().items():
        assert torch.equal(backbone.state[key], value), key


def test_without_a_network_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
        if pretrained:
            raise OSError("no route to host")
        return create(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(InputError, match=rf"could not be fetched.*--backbone {TINY}@"):
        load_backbone(TINY)


@pytest.mark.parametrize(
    ("known", "proxies", "asked"),
    [(False, {}, False), (True, {}, True), (False, {"https": "proxy:3128"}, True)],
    ids=["offline", "online", "proxy"],
)
def test_the_hub_is_asked_only_where_it_can_be(
    known: bool, proxies: dict[str, str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = timm.create_model
    modes, looked_up = [], []

    def look_up(host: str, port: int) -> list[Any]:
        looked_up.append(host)
        if not known:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    def note(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
        modes.append(is_offline_mode())
        return create(name, **kwargs)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: proxies)
    monkeypatch.setattr(timm, "create_model", note)
    load_backbone(TINY, pretrained=False)
    assert not looked_up
    load_backbone(TINY)
    assert modes[-1] is not asked
    assert not is_offline_mode()  # as it was


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pth"])
def test_broken_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a checkpoint at all")
    with pytest.raises(InputError, match=f"{name} cannot be read"):
        load_backbone(f"{SHIPPED}@{tmp_path / name}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", r"\(EOFError\)"), (b"hello\n", r"\(KeyError: 101\)"), (b"\x80\x02.", r"\(IndexError: .+\)")],
    ids=["empty", "text", "short"],
)
def test_what_is_no_checkpoint_says_why(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "notes.pth").write_bytes(content)
    with pytest.raises(InputError, match=rf"notes\.pth cannot be read {reason}; is it a checkpoint\?"):
        load_backbone(str(tmp_path / "notes.pth"))


def test_a_file_of_something_else(tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "cnn.safetensors")
    with pytest.raises(InputError, match="does not look like a timm ViT"):
        load_backbone(str(tmp_path / "cnn.safetensors"))
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(InputError, match="holds no table of tensors"):
        load_backbone(f"{SHIPPED}@{tmp_path / 'list.pth'}")


def test_shipped_features_tell_pictures_apart() -> None:
    """The weights are trained: the features of two kinds of noise differ."""
    rng = np.random.default_rng(0)
    fine = torch.from_numpy(rng.normal(size=(8, 3, 32, 32))).float()
    coarse = torch.nn.functional.interpolate(fine[:, :, :4, :4], 32)
    with torch.no_grad():
        a, b = (load_backbone(SHIPPED).vit(x) for x in (fine, coarse))
    within = torch.cdist(a, a).mean() + torch.cdist(b, b).mean()
    assert torch.cdist(a, b).mean() > within / 2
