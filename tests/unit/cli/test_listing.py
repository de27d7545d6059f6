"""What ``morecl list`` shows."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from morecl.catalogue import GROUPS
from morecl.catalogue import METHODS as METHOD_INFO
from morecl.cli.listing import Listing, sections
from morecl.data import recipe_names
from morecl.errors import InputError
from morecl.methods import METHODS
from morecl.nn.backbone import load_backbone
from morecl.suite.plan import load_suite, suite_names


def rows_of(what: Listing) -> dict[str, str]:
    return {name: text for section in sections(what) for name, text in section.rows}


def test_methods_are_those_of_the_catalogue_in_their_groups() -> None:
    rows = rows_of(Listing.methods)
    assert rows.keys() == METHODS.keys()
    assert rows["finetune"] == METHOD_INFO["finetune"].summary
    found = {section.title: [name for name, _ in section.rows] for section in sections(Listing.methods)}
    assert list(found) == list(GROUPS.values())
    assert found[GROUPS["frozen"]] == [name for name, info in METHOD_INFO.items() if info.group == "frozen"]


def test_suites_are_those_that_can_be_loaded() -> None:
    assert rows_of(Listing.suites) == {name: load_suite(name).description for name in suite_names()}


def test_benchmarks_have_different_descriptions() -> None:
    rows = rows_of(Listing.benchmarks)
    assert [*rows][:-1] == recipe_names()
    assert len({*rows.values()}) == len(rows)
    assert rows["cifar10-5t-1k"] == "cifar10, 5 tasks, 1,000 training and 400 test images per class"


@pytest.mark.parametrize("name", METHODS)
def test_a_name_in_the_catalogue_is_that_of_its_class(name: str) -> None:
    assert METHODS[name].name == name


def in_words(vit: Any) -> str:
    return f"{sum(p.numel() for p in vit.parameters()) / 1e6:.0f} M parameters, {vit.patch_embed.img_size[0]} px"


def test_backbones_with_their_size_and_input() -> None:
    """The sizes are those of the whole networks; nothing of timm is left changed."""
    rows = rows_of(Listing.backbones)
    assert len(rows) > 200
    assert rows["vit_giant_patch14_224"] == "1.0 B parameters, 224 px; no weights in timm: NAME@FILE"
    assert rows["vit_tiny_patch16_224"].startswith("5.5 M parameters, 224 px; weights ")
    for name in (
        "vit_small_patch14_reg4_dinov2",
        "vit_small_patch16_dinov3",
        "eva02_small_patch14_336",
        "vit_base_patch16_clip_224",
        "vit_base_patch16_siglip_224",
        "vit_small_patch16_rope_mixed_224",
        "beit_base_patch16_384",
    ):
        with torch.device("meta"):
            vit = timm.create_model(name, num_classes=0)
        assert len(vit.blocks) == 12
        assert rows[name].startswith(in_words(vit)), name


REFUSED = {
    "vit_base_patch16_rpn_224": "pre-norm",
    "vit_small_patch16_18x2_224": "pre-norm",
    "deit_tiny_distilled_patch16_224": "VisionTransformerDistilled",
    "eva02_enormous_patch14_clip_224": "pre-norm",
    "vit_base_patch16_sapiens2": "RmsNorm",
    "vit_pe_spatial_tiny_patch16_512": "no norms after its blocks",
    "aimv2_large_patch14_224": "RmsNorm",
}


def test_backbones_that_are_refused_are_not_listed() -> None:
    rows = rows_of(Listing.backbones)
    assert not REFUSED.keys() & rows.keys()
    assert not [name for name in rows if name.startswith("test_")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_listed_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=REFUSED[name]):
        load_backbone(name, pretrained=False)


@pytest.mark.parametrize(("cached", "text"), [(True, "weights in the local cache"), (False, "weights from timm")])
def test_weights_that_need_no_network_are_told_apart(cached: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morecl.classifier.backbones.is_cached", lambda name: cached)
    assert rows_of(Listing.backbones)["deit_tiny_patch16_224"].endswith(text)
