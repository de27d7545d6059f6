"""What ``morecl list`` shows."""

from __future__ import annotations

import pytest

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


REFUSED = {
    "vit_base_patch16_rpn_224": "pre-norm",
    "vit_small_patch16_18x2_224": "pre-norm",
    "deit_tiny_distilled_patch16_224": "VisionTransformerDistilled",
}


def test_backbones_that_are_refused_are_not_listed() -> None:
    rows = rows_of(Listing.backbones)
    assert rows["vit_tiny_patch16_224"] == "weights from timm"
    assert rows["vit_giant_patch14_224"] == "no weights in timm: NAME@FILE"
    assert len(rows) > 100
    assert not REFUSED.keys() & rows.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_listed_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=REFUSED[name]):
        load_backbone(name, pretrained=False)
