"""What can be changed between tasks: settings, labels, more images of known classes, fewer classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import morecl
import tiny
from morecl import presets
from morecl.catalogue import SHIPPED
from morecl.data import Dataset, TaskStream
from morecl.errors import InputError
from morecl.evaluator import Evaluator
from morecl.labels import Forgotten
from morecl.memory import ReplayMemory
from morecl.methods.more import More, MoreRule
from morecl.progress import EpochDone
from morecl.random import generator
from morecl.scoring import Features

LABELS = [["a", "b"], ["c", "d"], ["e"], ["f", "g"]]
KINDS = [[0, 1], [2, 3], [4], [5, 6]]
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(8)])
LOWEST = np.finfo(np.float64).min
BOTH = pytest.mark.parametrize("method", ["more", "morerp"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A learner of each method after four tasks."""
    made = {}
    for method in ("more", "morerp"):
        learner = tiny.create(method, memory_size=28, epochs=2, lr=0.02)
        for kinds, labels in zip(KINDS, LABELS, strict=True):
            learner.learn_task(*tiny.task(kinds, labels, 6))
        made[method] = tmp_path_factory.mktemp(method) / "saved"
        learner.save(made[method])
    return made


@pytest.fixture
def load(folders: dict[str, Path]) -> Callable[[str], Any]:
    return lambda method: morecl.load(folders[method])


def more_scores(learner: Any, images: Any = TEST) -> torch.Tensor:
    """MORE's scores, also of MORE-RP, with all networks asked."""
    z = [learner.embed(learner.prepare(images), str(k)) for k in range(len(learner.tasks))]
    with torch.no_grad():
        return MoreRule.score(learner.rule, z).scores


# ---- more images --------------------------------------------------------------------------------------------------

NEW = np.concatenate([tiny.pictures(1, 5, draw=4), tiny.pictures(4, 3, draw=4)])
NEW_LABELS = ["b"] * 5 + ["e"] * 3


@BOTH
def test_networks_and_features_stay(method: str, load: Callable[[str], Any]) -> None:
    learner, before = load(method), load(method)
    learner.add_examples(NEW, NEW_LABELS)
    free = ("head.weight", "head.bias", "means", "covariance", "precision", "samples", "counts", "spread")
    for key, value in before.model.state_dict().items():
        if not key.endswith(free):
            assert torch.equal(value, learner.model.state_dict()[key]), key
    for k in range(4):
        assert np.array_equal(before.features(TEST, task=k), learner.features(TEST, task=k))
    for k in (1, 3):  # not touched: only the head learns to reject
        for name in ("means", "covariance", "precision", "samples", "counts", "spread"):
            assert torch.equal(getattr(before.tasks[k], name), getattr(learner.tasks[k], name))
    assert all(not torch.equal(a.head.weight, b.head.weight) for a, b in zip(before.tasks, learner.tasks, strict=True))
    assert [net.counts.tolist() for net in learner.tasks] == [[6, 11], [6, 6], [9], [6, 6]]
    assert len(learner.memory) <= 28 and learner.classes == before.classes


@BOTH
def test_more_images_are_taken_in_alike_after_loading(method: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    one, other = load(method), load(method)
    one.add_examples(NEW, NEW_LABELS)
    one.save(tmp_path / "saved")
    one.add_examples(NEW[:2], NEW_LABELS[:2])
    other.add_examples(NEW, NEW_LABELS)
    other = morecl.load(tmp_path / "saved")
    other.add_examples(NEW[:2], NEW_LABELS[:2])
    tiny.assert_same(tiny.snapshot(one), tiny.snapshot(other))
    for learner in (one, other):
        learner.learn_task(*tiny.task([7], ["h"], 4))
    tiny.assert_same(tiny.snapshot(one), tiny.snapshot(other))


def alike(kind: int, count: int, draw: int) -> np.ndarray:
    """Pictures of kinds that look much like each other."""
    parts = tiny.pictures(20, count, draw=draw).astype(int), tiny.pictures(kind, count, draw=draw).astype(int)
    noise = np.random.default_rng([kind, draw]).normal(0, 15, parts[0].shape)
    return np.clip(0.5 * parts[0] + 0.5 * parts[1] + noise, 0, 255).astype(np.uint8)


@BOTH
def test_a_class_taught_with_one_image_is_learned_and_others_are_not_lost(method: str) -> None:
    shipped = {"backbone": SHIPPED}  # random features would tell the classes apart at once
    learner = tiny.create(method, memory_size=60, epochs=4, lr=0.02, back_update_epochs=5, **shipped)
    for labels, counts in (("abc", (12, 1, 12)), ("de", (12, 12))):
        images = [alike(ord(label), count, 0) for label, count in zip(labels, counts, strict=True)]
        learner.learn_task(np.concatenate(images), np.repeat(list(labels), counts))
    test, true = np.concatenate([alike(ord(label), 12, 1) for label in "abcde"]), np.repeat(list("abcde"), 12)
    few = np.array(learner.predict(test).labels) == true
    learner.add_examples(alike(ord("b"), 60, 2), ["b"] * 60)
    many = np.array(learner.predict(test).labels) == true
    assert few[true == "b"].mean() < 0.5 and many[true == "b"].mean() >= 0.8
    assert all(many[true == label].mean() >= few[true == label].mean() - 0.2 for label in "acde")


def test_all_epochs_of_a_refit_are_told(load: Callable[[str], Any]) -> None:
    events: list[EpochDone] = []
    load("more").add_examples(NEW, NEW_LABELS, events.append)
    assert {event.stage for event in events} == {"refit"}
    assert len(events) == 2 * 3  # heads of the classes, other heads; three times one epoch


def test_without_back_update_only_heads_of_the_classes_change(load: Callable[[str], Any]) -> None:
    learner, before = load("more"), load("more")
    learner.configure(back_update=False)
    learner.add_examples(NEW, NEW_LABELS)
    same = [torch.equal(a.head.weight, b.head.weight) for a, b in zip(before.tasks, learner.tasks, strict=True)]
    assert same == [False, True, False, True]


def test_a_preset_is_given_up_though_it_has_no_effect() -> None:
    """What it stands for was not given by the user, so it is not refused as idle."""
    learner = tiny.create("more", preset="paper", back_update=False)
    learner.configure(preset=None)
    assert learner.config.preset is None and learner.config.back_update_rate == "relative"  # type: ignore[attr-defined]


@BOTH
def test_without_memory_a_head_is_not_trained_on_some_of_its_classes(method: str) -> None:
    learner: Any = tiny.create(method, memory_size=0)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    learner.learn_task(*tiny.task([2], ["c"], 4))
    before = [net.head.weight.detach().clone() for net in learner.tasks]
    learner.add_examples(tiny.pictures(0, 3, draw=2), ["a"] * 3)
    assert torch.equal(before[0], learner.tasks[0].head.weight)
    learner.add_examples(tiny.pictures(2, 3, draw=2), ["c"] * 3)
    assert not torch.equal(before[1], learner.tasks[1].head.weight)
    assert len(learner.memory) == 0 and np.isfinite(learner.scores(TEST)).all()


@BOTH
def test_images_of_another_size(method: str, load: Callable[[str], Any]) -> None:
    learner = load(method)
    learner.add_examples(tiny.pictures(1, 4, draw=2, side=21), ["b"] * 4)
    assert np.isfinite(learner.scores(TEST)).all()


MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "unknown classes": (NEW, ["b"] * 6 + ["x", 7], "not learned yet: 'x', 7; .*learn_task"),
    "the placeholder": (NEW, ["b"] * 7 + [Forgotten(0)], "placeholder"),
    "no images": (NEW[:0], [], "no images"),
    "fewer labels": (NEW, ["b"], "8 images, 1 labels"),
    "no labels": (NEW, None, "labels are missing"),
}


@BOTH
def test_mistakes_change_nothing(method: str, load: Callable[[str], Any]) -> None:
    learner = load(method)
    before, scores, seconds = tiny.snapshot(learner), learner.scores(TEST), dict(learner.seconds)
    for images, labels, message in MISTAKES.values():
        with pytest.raises((ValueError, TypeError), match=message):
            learner.add_examples(images, labels)

    def interrupt(event: EpochDone) -> None:
        raise KeyboardInterrupt("between epochs")

    with pytest.raises(KeyboardInterrupt):
        learner.add_examples(NEW, NEW_LABELS, interrupt)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="at the end"):
        patch.setattr(learner, "_require_finite", raising)
        learner.add_examples(NEW, NEW_LABELS)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="at the end"):
        patch.setattr(learner.memory, "drop", raising)
        learner.forget("c")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="at the end"):
        patch.setattr(learner.memory, "_keep", raising)
        learner.configure(memory_size=7, epochs=9)
    assert learner.memory.size == 28 and learner.config.memory_size == 28 and learner.config.epochs == 2
    tiny.assert_same(before, tiny.snapshot(learner))
    assert np.array_equal(scores, learner.scores(TEST)) and seconds == learner.seconds


def raising(*args: Any) -> None:
    raise RuntimeError("at the end")


# ---- forgetting ---------------------------------------------------------------------------------------------------


@BOTH
def test_scores_of_the_other_classes_stay(method: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    learner, before = load(method), load(method)
    learner.forget("c")
    learner.forget("g")
    learner.save(tmp_path / "saved")
    for now in (learner, morecl.load(tmp_path / "saved")):
        gone, rest = [2, 6], [0, 1, 3, 4, 5]
        assert now.classes == ["a", "b", Forgotten(2), "d", "e", "f", Forgotten(6)]
        assert torch.equal(more_scores(now)[:, rest], more_scores(before)[:, rest])
        assert (more_scores(now)[:, gone] == LOWEST).all()
        assert (now.scores(TEST)[:, gone] == LOWEST).all()
        assert not {2, 6} & set(now.memory.columns.tolist())
        images = lambda one, c: one.memory.images[one.memory.columns == c]  # noqa: E731
        assert all(np.array_equal(images(now, c), images(before, c)) for c in rest)
        assert set(now.predict(TEST).labels) <= set("abdef")
        output = now.answer(Features(now, now.prepare(TEST)))
        assert (output.probabilities[:, gone] == 0).all() and output.probabilities.sum(1).max() < 1.0001 * 4
        assert [net.counts.tolist() for net in now.tasks] == [[6, 6], [0, 6], [6], [6, 0]]
        assert (now.tasks[1].spread[0] == 0).all() and (now.tasks[1].spread[1] != 0).any()
        assert torch.equal(now.tasks[1].means, before.tasks[1].means)
        if method == "morerp":
            z = now.embed(now.prepare(TEST), now.rule.network)
            assert torch.equal(now.rule.ridge(z)[:, rest], before.rule.ridge(z)[:, rest])
            assert (now.rule.ridge.dual[:, gone] == 0).all() and not set(gone) & set(now.rule.ridge.columns.tolist())
            assert now.rule.counts.tolist() == [6, 6, 0, 6, 6, 6, 0]
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(now))


@BOTH
def test_known_is_the_largest_score_of_what_remains(method: str, load: Callable[[str], Any]) -> None:
    learner, before = load(method), load(method)
    if method == "morerp":
        learner.rule.asked = before.rule.asked = None
        learner.rule.known_weight = 0.0
    for label in ("a", "d", "e"):
        learner.forget(label)
    rest = [1, 2, 5, 6]
    scores = more_scores(before)[:, rest].amax(1).numpy()
    known = -learner.predict(TEST).ood_score
    assert np.allclose(known if method == "more" else np.exp(known), scores, rtol=1e-5)


@BOTH
def test_a_network_without_classes_is_never_asked(method: str, load: Callable[[str], Any]) -> None:
    learner = load(method)
    for label in ("c", "e", "d"):
        learner.forget(label)
    asked: set[str] = set()
    embed, embed_rows = learner.embed, learner.embed_rows

    def rows_of(tokens: Any, rows: torch.Tensor, networks: torch.Tensor) -> torch.Tensor:
        asked.update(str(k) for k in networks.tolist())
        return embed_rows(tokens, rows, networks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "embed", lambda tokens, name: (asked.add(name), embed(tokens, name))[1])
        patch.setattr(learner, "embed_rows", rows_of)
        patch.setattr(learner, "embed_all", lambda tokens: pytest.fail("all networks were asked"))
        for images in (TEST, TEST[:1]):
            assert set(learner.predict(images).labels) <= set("abfg")
    assert not asked & {"1", "2"} and {"0", "3"} <= asked


def test_the_ranking_leaves_out_what_is_forgotten(load: Callable[[str], Any]) -> None:
    learner = load("morerp")
    learner.rule.asked = 2
    for label in ("b", "e", "f"):
        learner.forget(label)
    z = learner.embed(learner.prepare(TEST), learner.rule.network)
    outputs = float(learner.rule.ridge.sharpness) * learner.rule.ridge(z).numpy()
    sums = np.stack([np.exp(outputs[:, c]).sum(1) for c in ([0], [2, 3], [6])], 1)
    expected = np.zeros((len(TEST), 4), bool)
    for row, two in zip(expected, np.argsort(-sums, 1)[:, :2], strict=True):
        row[np.array([0, 1, 3])[two]] = True
    found = learner.rule._ranking(learner.rule.compare(z)[1]).numpy()
    assert np.array_equal(found, expected)
    others = learner.rule.compare(z)[1][:, [0, 2, 3, 6]].exp().sum(1)
    assert torch.allclose(others, torch.ones_like(others))


@BOTH
def test_learning_goes_on_after_forgetting(method: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    """The name is free again, places in memory are shared by what remains, and a forgotten class is never an answer."""
    learner = load(method)
    learner.forget("a")
    learner.forget("b")
    learner.learn_task(*tiny.task([0, 7], ["a", "h"], 6))
    learner.add_examples(tiny.pictures(0, 9, draw=2), ["a"] * 9)
    assert learner.classes == [Forgotten(0), Forgotten(1), *"cdefg", "a", "h"]
    assert learner.rule.forgotten.tolist() == [True, True] + [False] * 7
    assert learner.memory.quota(7) == 4 and np.bincount(learner.memory.columns).tolist() == [0, 0] + [4] * 7
    assert set(learner.predict(TEST).labels) <= set("cdefgah")
    learner.save(tmp_path / "saved")
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(morecl.load(tmp_path / "saved")))
    learner.forget("a")
    learner.add_examples(tiny.pictures(7, 3, draw=2), ["h"] * 3)  # beside a forgotten class in its task
    assert "a" not in learner.predict(TEST).labels


def test_the_last_class_stays(load: Callable[[str], Any]) -> None:
    learner = load("more")
    for label in "abcdef":
        learner.forget(label)
    before = tiny.snapshot(learner)
    with pytest.raises(InputError, match="cannot forget 'g': it is the only class"):
        learner.forget("g")
    for gone in ("a", Forgotten(0), "nonsense", [1]):
        with pytest.raises(InputError, match=r"there is no class .*; known: 'g'"):
            learner.forget(gone)
    with pytest.raises(InputError, match="not learned yet: 'a'"):
        learner.add_examples(NEW[:1], ["a"])
    tiny.assert_same(before, tiny.snapshot(learner))
    assert set(learner.predict(TEST).labels) == {"g"}


def test_the_evaluator_never_answers_a_forgotten_class() -> None:
    learner = tiny.create("more", epochs=2, lr=0.02)
    for kinds in ([0, 1], [2, 3], [4]):
        learner.learn_task(*tiny.task(kinds, kinds, 6))
    images, labels = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(5)]), np.repeat(np.arange(5), 3)
    stream = TaskStream(Dataset("tiny", images, labels, images, labels, tuple("abcde")), range(5), tasks=3)
    before = Evaluator(learner, stream).after_task(2)
    for label in (3, 4):
        learner.forget(label)
    step = Evaluator(learner, stream).after_task(2)
    assert step.accuracy[2] == step.til[2] == 0 and step.til[1] == 50
    assert step.accuracy[0] >= before.accuracy[0]


def test_a_learner_that_forgot_is_not_adopted(load: Callable[[str], Any]) -> None:
    learner = load("morerp")
    learner.forget("a")
    with pytest.raises(InputError, match="forgotten"):
        More.adopt(learner, More.adopted_config(learner, {}))


# ---- labels and settings ------------------------------------------------------------------------------------------


@BOTH
def test_rename(method: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    learner = load(method)
    before, scores = tiny.snapshot(learner), learner.scores(TEST)
    learner.rename("c", ("see", 1))
    learner.rename("a", "c")
    learner.rename("d", np.int64(4))
    learner.rename("b", "b")
    assert learner.classes == ["c", "b", ("see", 1), 4, "e", "f", "g"]
    tiny.assert_same(before | {"classes": learner.classes}, tiny.snapshot(learner))
    assert np.array_equal(scores, learner.scores(TEST))
    assert set(learner.memory.labels) == set(learner.classes)
    learner.save(tmp_path / "saved")
    assert morecl.load(tmp_path / "saved").classes == learner.classes
    learner.add_examples(tiny.pictures(0, 1), ["c"])
    wrong: list[tuple[Any, Any, str]] = [
        ("c", "e", "another class is called 'e'"),
        ("zebra", "x", "there is no class 'zebra'; known: 'c', 'b'"),
        ("c", float("nan"), "NaN"),
        ("c", [1], "hashed"),
        ("c", b"x", "cannot save the label"),
        ("c", Forgotten(0), "placeholder"),
    ]
    for old, new, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            learner.rename(old, new)
    assert learner.classes == ["c", "b", ("see", 1), 4, "e", "f", "g"]


def test_nothing_learned_yet() -> None:
    learner = tiny.create("more")
    for call in (lambda: learner.rename("a", "b"), lambda: learner.forget("a")):
        with pytest.raises(InputError, match="there is no class 'a'; known: nothing has been learned yet"):
            call()
    with pytest.raises(InputError, match="not learned yet: 'b'"):
        learner.add_examples(NEW[:1], ["b"])
    learner.configure(epochs=3, memory_size=5)
    assert learner.config.epochs == 3 and learner.memory.size == 5


def test_configure(load: Callable[[str], Any], tmp_path: Path) -> None:
    learner, events = load("more"), list[EpochDone]()
    learner.configure(epochs=3, lr=0.001, batch_size=4, memory_batch_size=2, back_update_epochs=2, back_update_lr=1e-4)
    learner.save(tmp_path / "saved")
    assert morecl.load(tmp_path / "saved").config == learner.config
    learner.learn_task(*tiny.task([7], ["h"], 6), events.append)
    assert [(e.stage, e.epochs) for e in events] == [("", 3)] * 3 + [("back-update", 2)] * 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scoring": ({"temperature": 3.0}, "temperature cannot change any more: it decides how answers are made"),
    "projection": ({"projection": 50}, "projection cannot change .* how answers are made"),
    "shape": ({"bottleneck": 8}, "bottleneck cannot change any more: it decides what is kept of every task"),
    "statistics": ({"shrink_below": 20.0}, "shrink_below cannot change any more: it decides what is kept"),
    "seed": ({"seed": 3}, "seed cannot change"),
    "device": ({"device": "cuda"}, "device cannot change"),
    "frozen": ({"freeze_backbone": False}, "freeze_backbone cannot change"),
    "bad value": ({"epochs": -1}, "bad setting: epochs=-1"),
    "unknown": ({"epoch": 1}, "unknown setting 'epoch'; did you mean 'epochs'"),
    "one of two": ({"epochs": 5, "image_size": 16}, "image_size cannot change"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_change(case: str, load: Callable[[str], Any]) -> None:
    learner = load("morerp")
    config, before = learner.config, tiny.snapshot(learner)
    settings, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        learner.configure(**settings)
    assert learner.config == config
    tiny.assert_same(before, tiny.snapshot(learner))
    learner.configure(seed=config.seed, temperature=config.temperature)  # as they are


def test_without_a_preset_the_back_update_is_ours_again() -> None:
    learner: Any = tiny.create("more", preset="paper", epochs=4, lr=0.003)
    learner.configure(preset=None, back_update_epochs=7)
    wanted = {**presets.MORE_DEFAULT, "preset": None, "back_update_epochs": 7, "epochs": 4, "lr": 0.003}
    assert {name: getattr(learner.config, name) for name in wanted} == wanted
    learner.configure(preset=None, lr=0.002)  # there is none: nothing of the back-update changes
    assert learner.config.back_update_epochs == 7
    learner.configure(preset="paper")
    assert learner.config.back_update_rate == "absolute" and learner.config.back_update_epochs == 10


@pytest.mark.parametrize("size", [0, 3, 14, 100])
@BOTH
def test_another_memory_size(method: str, size: int, load: Callable[[str], Any], tmp_path: Path) -> None:
    learner = load(method)
    held = {image.tobytes() for image in learner.memory.images}
    learner.configure(memory_size=size)
    counts = np.bincount(learner.memory.columns, minlength=7)
    assert counts.tolist() == [min(4, size // 7)] * 7 if size >= 7 else counts.sum() == size and counts.max() <= 1
    assert {image.tobytes() for image in learner.memory.images} <= held
    learner.save(tmp_path / "saved")
    learner = morecl.load(tmp_path / "saved")
    learner.learn_task(*tiny.task([7], ["h"], 30))
    counts = np.bincount(learner.memory.columns, minlength=8)
    assert len(learner.memory) <= size
    assert counts.tolist() == [min(4, size // 8)] * 7 + [size // 8] if size >= 8 else counts.sum() == size
    assert np.isfinite(learner.scores(TEST)).all()


def test_classes_with_a_place_are_drawn_evenly_when_the_memory_shrinks() -> None:
    places = np.zeros(8)
    for seed in range(1500):
        memory = ReplayMemory(8, list(range(6)), 1)
        memory.update(np.zeros((6, 1, 1, 3), np.uint8), np.arange(6), generator(seed, "a"))
        memory.resize(3, generator(seed, "b"))
        assert len(memory) == 3
        memory.update(np.zeros((2, 1, 1, 3), np.uint8), np.array([6, 7]), generator(seed, "c"))
        assert len(memory) == 3
        places[memory.columns] += 1
    assert np.abs(places / 1500 - 3 / 8).max() < 0.05
