"""What ``morecl list`` shows."""

from __future__ import annotations

import pytest

from morecl.errors import InputError
from morecl.listing import listing
from morecl.methods import METHODS
from morecl.nn.backbone import load_backbone


def test_methods_are_those_of_the_catalogue() -> None:
    rows = dict(listing("methods"))
    assert rows.keys() == METHODS.keys()
    assert rows["finetune"] == "naive fine-tuning: the lower bound"


@pytest.mark.parametrize("name", METHODS)
def test_a_name_in_the_catalogue_is_that_of_its_class(name: str) -> None:
    assert METHODS[name].name == name


REFUSED = {
    "vit_base_patch16_siglip_224": "attention pooling",
    "vit_base_patch16_rpn_224": "pre-norm",
    "vit_small_patch16_18x2_224": "pre-norm",
    "deit_tiny_distilled_patch16_224": "VisionTransformerDistilled",
}


def test_backbones_that_are_refused_are_not_listed() -> None:
    rows = dict(listing("backbones"))
    assert rows["vit_tiny_patch16_224"] == "weights through timm"
    assert rows["vit_giant_patch14_224"] == "no weights in timm: NAME@FILE"
    assert len(rows) > 100
    assert not REFUSED.keys() & rows.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_listed_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=REFUSED[name]):
        load_backbone(name, pretrained=False)
