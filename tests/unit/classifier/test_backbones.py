"""The choice of a backbone for a new model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import tiny
from morecl.catalogue import SHIPPED
from morecl.classifier import Classifier, backbones
from morecl.classifier.backbones import ON_CPU, choose_backbone
from morecl.config import LearnerConfig
from morecl.errors import InputError
from morecl.nn.backbone import load_backbone


def choose(spec: str = "auto") -> tuple[str, list[str]]:
    said: list[str] = []
    name, loaded = choose_backbone(spec, LearnerConfig(device="cpu", image_size=16), said.append)
    assert loaded.input.size == 16
    return name, said


def test_the_shipped_one_if_none_can_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(spec: str, **options: Any) -> Any:
        if spec != SHIPPED:
            raise InputError("its weights could not be fetched")
        return load_backbone(spec, **options)

    monkeypatch.setattr(backbones, "load_backbone", offline)
    name, said = choose()
    assert name == SHIPPED
    assert f"{ON_CPU.name}; its weights are fetched once, {ON_CPU.megabytes} MB" in said[0]
    assert "could not be fetched" in said[1] and "32 x 32 pixels" in said[2]
    assert all(text.isprintable() for text in said), "each is one line"


@pytest.mark.parametrize("cached", [True, False])
def test_a_small_strong_one_if_it_can_be_had(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(spec: str, **options: Any) -> Any:
        return load_backbone(spec.split(".")[0], **options | {"pretrained": False})

    monkeypatch.setattr(backbones, "load_backbone", fetched)
    monkeypatch.setattr(backbones, "is_cached", lambda name: cached)
    name, said = choose()
    assert name == ON_CPU.name and len(said) == 1
    assert ("from the local cache" in said[0]) == cached


def test_what_is_named_is_taken() -> None:
    assert choose(SHIPPED) == (SHIPPED, [])
    with pytest.raises(InputError, match="unknown backbone"):
        choose("vit_minni_patch4_32")


def test_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not backbones.is_cached(ON_CPU.name)


@pytest.mark.parametrize("settings", [{"pretrained": False}, {"image_size": 8.0}, {"image_size": 16}, {"seed": 3}])
def test_a_model_opens_with_the_backbone_it_was_made_with(settings: dict[str, Any], tmp_path: Path) -> None:
    made = Classifier.create(backbone=SHIPPED, **{"image_size": 8, **settings})
    pictures = [*tiny.pictures(0, 12), *tiny.pictures(1, 12)]
    made.learn(pictures, ["a"] * 12 + ["b"] * 12, minutes=0.001)
    made.save(tmp_path / "model")
    again = Classifier.open(tmp_path / "model")
    assert again.predict(pictures[:3]) == made.predict(pictures[:3])
    random = settings.get("pretrained") is False
    assert (made.learner.backbone.sha256 != load_backbone(SHIPPED, image_size=made.side).sha256) == random


def test_what_a_method_cannot_do_is_said_at_once() -> None:
    said: list[str] = []
    Classifier.create(backbone=SHIPPED, method="ncm", say=said.append)
    wanted = "Note: a model of 'ncm' cannot learn with --more, forget classes, or be exported; 'morerp' can."
    assert said == [wanted]
    for method in ("morerp", "more"):
        Classifier.create(backbone=SHIPPED, method=method, say=said.append)
    assert said == [wanted]


def test_a_typo_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(InputError, match="unknown setting 'epoch'") as caught:
        Classifier.create(epoch=3)
    assert ", epochs," not in str(caught.value)  # which would be refused as well
    assert "did you mean" not in str(caught.value)
    with pytest.raises(InputError, match="epochs is chosen from the number of images"):
        Classifier.create(epochs=3)
    with pytest.raises(InputError, match="unknown method"):
        Classifier.create(method="mroe")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ncm", "lr": 0.1}, "'ncm' trains nothing on a frozen backbone: lr would change nothing"),
        ({"coefficient": False, "c": 3}, "c would change nothing with coefficient=false"),
        ({"projection": 100, "known_weight": 0.5}, "known_weight would change nothing with projection=100"),
        ({"back_update": False, "back_update_draw": "balanced"}, "back_update_draw would change nothing"),
        ({"back_update": False, "back_update_lr": 0.1}, None),  # is used for further images of known classes
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str | None) -> None:
    with pytest.raises(InputError, match=message) if message else nullcontext():
        Classifier.create(backbone=SHIPPED, **settings)
