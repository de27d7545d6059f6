"""What every registered method keeps to. A method that is added to ``METHODS`` is tested here by itself."""

from __future__ import annotations

import datetime
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from PIL import Image

import morecl
import tiny
from morecl import training
from morecl.catalogue import SHIPPED
from morecl.data import load_dataset
from morecl.errors import InputError
from morecl.methods import METHODS, Learner
from morecl.progress import EpochDone
from morecl.run import RunRequest

LABELS: list[list[Any]] = [["cat", "dog"], [3, 1, 7], [("a", 1)]]  # unequal tasks, labels of three types
KINDS = [[0, 1], [2, 3, 4], [5]]
COUNT = 6
TASKS = [tiny.task(kinds, labels, COUNT) for kinds, labels in zip(KINDS, LABELS, strict=True)]
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kinds in KINDS for kind in kinds])
CLASSES = [label for labels in LABELS for label in labels]
TRAINED = [name for name, method in METHODS.items() if method.Config().trains]
TRAINED_ONCE = {"ranpac"}  # in the first task only
ENTRIES = {"backbone", "adapters", "norms", "embeddings", "heads", "statistics"}


def teach(learner: Learner, first: int = 0, last: int = 3) -> Learner:
    for images, labels in TASKS[first:last]:
        learner.learn_task(images, labels)
    return learner


@dataclass(frozen=True)
class Lesson:
    """A learner after three tasks, which no test may change, and what was seen on the way."""

    learner: Learner
    events: list[EpochDone]
    features: list[dict[str, np.ndarray]]  # after each task: network -> features of TEST
    first_scores: np.ndarray  # after the first task
    after_two: Path  # saved then


@pytest.fixture(scope="module", params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lesson(method: str, tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    learner, events, features, scores = tiny.create(method), [], [], []
    folder = tmp_path_factory.mktemp(method) / "after-two"
    for k, (images, labels) in enumerate(TASKS):
        learner.learn_task(images, labels, events.append)
        features.append({name: learner.features(TEST, task=i) for i, name in enumerate(learner.networks())})
        scores.append(learner.scores(TEST))
        if k == 1:
            learner.save(folder)
    return Lesson(learner, events, features, scores[0], folder)


@pytest.fixture(scope="module")
def taught(lesson: Lesson) -> Learner:
    return lesson.learner


# ---- predictions --------------------------------------------------------------------------------------------------


def test_predictions(taught: Learner) -> None:
    p = taught.predict(TEST)
    assert len(p.labels) == len(p.confidence) == len(p.ood_score) == len(p.task) == len(TEST)
    assert all(any(label is given for given in CLASSES) for label in p.labels)  # the very objects
    assert p.confidence.dtype == p.ood_score.dtype == np.float64
    assert ((p.confidence >= 0) & (p.confidence <= 1)).all()
    assert np.isfinite(p.ood_score).all()
    tasks = [next(k for k, labels in enumerate(LABELS) if label in labels) for label in p.labels]
    assert p.task.tolist() == tasks


def test_columns_follow_classes(taught: Learner) -> None:
    assert taught.classes == CLASSES
    assert taught.task_sizes == [2, 3, 1]
    scores = taught.scores(TEST)
    assert scores.shape == (len(TEST), 6)
    assert scores.dtype == np.float64
    assert np.isfinite(scores).all()
    assert [taught.classes[column] for column in scores.argmax(1)] == taught.predict(TEST).labels


def test_what_is_stored_was_shown_under_its_label(taught: Learner) -> None:
    label = {image.tobytes(): name for images, labels in TASKS for image, name in zip(images, labels, strict=True)}
    assert [label[image.tobytes()] for image in taught.memory.images] == taught.memory.labels


def test_learns_something(method: str) -> None:
    """One easy task, a little longer: the training pictures are told apart, so columns and classes belong together."""
    changes = {"epochs": 4, "lr": 0.02} if method in TRAINED else {}
    learner = tiny.create(method, backbone=SHIPPED, **changes)
    images, labels = tiny.task([0, 1, 2], ["x", "y", "z"], 8)
    learner.learn_task(images, labels)
    right = [a == b for a, b in zip(learner.predict(images).labels, labels, strict=True)]
    assert np.mean(right) > 0.8


def test_a_second_task_is_learned_under_its_own_columns(method: str) -> None:
    """Its training pictures are told apart among its classes, which nobody but the second task can have taught."""
    changes = {"epochs": 4, "lr": 0.02} if method in TRAINED else {}
    learner = tiny.create(method, backbone=SHIPPED, **changes)
    learner.learn_task(*tiny.task([3, 4, 5], ["u", "v", "w"], 8))
    images, labels = tiny.task([0, 1, 2], ["x", "y", "z"], 8)
    learner.learn_task(images, labels)
    within = ["xyz"[column] for column in learner.scores(images)[:, 3:].argmax(1)]
    assert np.mean([a == b for a, b in zip(within, labels, strict=True)]) > 0.8


def test_seconds_add_up() -> None:
    learner = tiny.create("ncm")
    learner.seconds["train"] = 1000.0
    learner.learn_task(*TASKS[0])
    assert 1000 < learner.seconds["train"] < 1900


def test_single_image_and_kinds_of_input(taught: Learner, tmp_path: Path) -> None:
    one, among_others = taught.predict(TEST[:1]), taught.predict(TEST)
    assert one.labels == among_others.labels[:1]
    assert one.confidence == pytest.approx(among_others.confidence[:1], rel=1e-4)
    assert one.ood_score == pytest.approx(among_others.ood_score[:1], rel=1e-4)
    assert taught.scores(TEST[:1]) == pytest.approx(taught.scores(TEST)[:1], rel=1e-4)
    path = tmp_path / "one.png"
    Image.fromarray(TEST[0]).save(path)
    for same in ([Image.fromarray(TEST[0])], [path], [str(path)], torch.from_numpy(TEST[:1]), [TEST[0]]):
        assert np.array_equal(taught.scores(same), taught.scores(TEST[:1]))
    grey = TEST[:2, :, :, 0]
    assert np.array_equal(taught.scores(grey), taught.scores(np.repeat(grey[..., None], 3, 3)))
    other_size = tiny.pictures(0, 1, side=21)
    assert taught.scores([TEST[0], other_size[0]]).shape == (2, 6)


def test_images_may_come_one_by_one(taught: Learner, tmp_path: Path) -> None:
    p, q = taught.predict(TEST), taught.predict(image for image in TEST)
    assert p.labels == q.labels and np.array_equal(p.confidence, q.confidence)
    assert np.array_equal(taught.scores(iter(TEST)), taught.scores(TEST))
    assert np.array_equal(taught.features(iter(TEST)), taught.features(TEST))


def test_no_images_no_answers(taught: Learner) -> None:
    p = taught.predict([])
    assert p.labels == [] and len(p.confidence) == len(p.ood_score) == len(p.task) == 0
    assert taught.scores(TEST[:0]).shape == (0, 6)


def test_features_and_networks(taught: Learner) -> None:
    names = taught.networks()
    assert len(set(names)) == len(names)
    for k in range(len(names)):
        features = taught.features(TEST, task=k)
        assert features.shape == (len(TEST), tiny.DIM) and features.dtype == np.float32
    for k in (-1, len(names)):
        with pytest.raises(ValueError, match="no network of task"):
            taught.features(TEST, task=k)


def test_a_network_keeps_its_name_only_as_long_as_its_features(lesson: Lesson) -> None:
    known: dict[str, np.ndarray] = {}
    for now in lesson.features:
        for name in known.keys() & now.keys():
            assert np.array_equal(known[name], now[name]), name
        known |= now


def test_before_the_first_task(method: str) -> None:
    learner = tiny.create(method)
    assert learner.classes == []
    for call in (learner.predict, learner.scores):
        with pytest.raises(ValueError, match="learn_task first"):
            call(TEST)


def test_entries(taught: Learner, method: str) -> None:
    entries = taught.entries()
    assert entries.keys() == ENTRIES
    assert all(type(value) is int and value >= 0 for value in entries.values())
    assert entries["backbone"] == sum(value.numel() for value in taught.backbone.state.values())
    fresh = tiny.create(method).entries()
    assert sum(entries.values()) > sum(fresh.values())


def test_memory_keeps_its_budget(taught: Learner, method: str) -> None:
    memory = taught.memory
    assert len(memory.images) == len(memory.labels) == len(memory)
    assert set(memory.labels) <= set(CLASSES)
    if "memory_size" in METHODS[method].Config.model_fields:
        assert len(memory) <= tiny.SETTINGS["memory_size"]
    seen = {label: images[[name == label for name in labels]] for images, labels in TASKS for label in labels}
    for image, label in zip(memory.images, memory.labels, strict=True):
        assert (seen[label] == image).all((1, 2, 3)).any(), "an image in memory was never shown under its label"


# ---- randomness ---------------------------------------------------------------------------------------------------


def global_generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def test_same_seed_same_bits_whatever_the_global_generators_hold(method: str, taught: Learner) -> None:
    torch.manual_seed(987)
    np.random.seed(654)  # noqa: NPY002
    random.seed(321)
    before = global_generators()
    again = tiny.create(method)
    for images, labels in TASKS:
        given = images.copy()
        again.learn_task(given, labels)
        assert np.array_equal(given, images), "the user's images were written to"
        given[:] = 0  # and the learner keeps none of them but as copies
    assert global_generators() == before, "a draw was made from a global generator"
    tiny.assert_same(tiny.snapshot(taught), tiny.snapshot(again))
    assert np.array_equal(taught.scores(TEST), again.scores(TEST))
    assert np.array_equal(taught.predict(TEST).ood_score, again.predict(TEST).ood_score)


def test_other_seed_other_learner(method: str, lesson: Lesson) -> None:
    if method in TRAINED:
        other = teach(tiny.create(method, seed=1), last=1)
        assert not np.array_equal(other.scores(TEST), lesson.first_scores)


# ---- saving -------------------------------------------------------------------------------------------------------


def test_save_load_identical(taught: Learner, tmp_path: Path) -> None:
    taught.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved")
    assert type(loaded) is type(taught)
    tiny.assert_same(tiny.snapshot(taught), tiny.snapshot(loaded))
    assert [type(label) for label in loaded.classes] == [type(label) for label in CLASSES]
    assert loaded.memory.labels == taught.memory.labels
    assert np.array_equal(loaded.scores(TEST), taught.scores(TEST))
    p, q = loaded.predict(TEST), taught.predict(TEST)
    assert p.labels == q.labels
    for field in ("confidence", "ood_score", "task"):
        assert np.array_equal(getattr(p, field), getattr(q, field))
    assert loaded.entries() == taught.entries()
    assert loaded.config == taught.config
    assert loaded.seconds == taught.seconds


def test_goes_on_after_load_as_if_nothing_had_been(lesson: Lesson) -> None:
    learner = teach(morecl.load(lesson.after_two), first=2)
    tiny.assert_same(tiny.snapshot(lesson.learner), tiny.snapshot(learner))
    assert np.array_equal(lesson.learner.scores(TEST), learner.scores(TEST))


# ---- between tasks ------------------------------------------------------------------------------------------------

CHANGING = {"more", "morerp"}  # can take further images of known classes, and forget classes


def test_what_a_method_cannot_do_is_refused_and_changes_nothing(method: str, taught: Learner) -> None:
    if method in CHANGING:
        return
    before = tiny.snapshot(taught)
    with pytest.raises(morecl.InputError, match=f"method '{method}' cannot take further images of known classes"):
        taught.add_examples(TEST[:1], ["cat"])
    with pytest.raises(morecl.InputError, match=f"method '{method}' cannot forget a class"):
        taught.forget("cat")
    tiny.assert_same(before, tiny.snapshot(taught))


def test_settings_and_names_change_between_tasks(method: str, lesson: Lesson, tmp_path: Path) -> None:
    learner, events = morecl.load(lesson.after_two), list[EpochDone]()
    scores = learner.scores(TEST)
    learner.rename("cat", "tiger")
    assert learner.classes[0] == "tiger" and np.array_equal(scores, learner.scores(TEST))
    fields = type(learner.config).model_fields
    if method in TRAINED:
        learner.configure(epochs=2)
    else:
        with pytest.raises(morecl.InputError, match="trains nothing"):
            learner.configure(epochs=2)
    if "memory_size" in fields:
        if learner.memory.seen:
            with pytest.raises(morecl.InputError, match="reservoir"):
                learner.configure(memory_size=6)
        else:
            learner.configure(memory_size=6)
            assert len(learner.memory) <= 6
    for key in ("seed", "bottleneck"):
        if key in fields:
            with pytest.raises(morecl.InputError, match=f"{key} cannot change"):
                learner.configure(**{key: 9})
    learner.save(tmp_path / "saved")
    learner = morecl.load(tmp_path / "saved")
    learner.learn_task(*TASKS[2], events.append)
    assert len(learner.memory) <= (learner.config.memory_size if "memory_size" in fields else 10**6)  # type: ignore[attr-defined]
    if method in TRAINED and method not in TRAINED_ONCE:
        assert [event.epochs for event in events if not event.stage] == [2, 2]
    assert np.isfinite(learner.scores(TEST)).all()


def test_tasks_of_one_class(method: str, tmp_path: Path) -> None:
    """Tasks of 1, 3 and 1 classes are learned, saved and resumed like any other."""
    tasks = [tiny.task(kinds, kinds, COUNT) for kinds in ([0], [1, 2, 3], [4])]
    learner, resumed = tiny.create(method), tiny.create(method)
    for k, (images, labels) in enumerate(tasks):
        learner.learn_task(images, labels)
        if k < 2:  # each task follows on a learner that was just loaded
            resumed.learn_task(images, labels)
            resumed.save(tmp_path / str(k))
            resumed = morecl.load(tmp_path / str(k))
        scores, answers = learner.scores(TEST), learner.predict(TEST)
        assert scores.shape == (len(TEST), len(learner.classes)) and np.isfinite(scores).all()
        assert set(answers.labels) <= set(learner.classes)
        assert np.isfinite(answers.ood_score).all() and ((answers.confidence >= 0) & (answers.confidence <= 1)).all()
    assert learner.task_sizes == [1, 3, 1]
    resumed.learn_task(*tasks[2])
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(resumed))
    assert np.array_equal(learner.scores(TEST), resumed.scores(TEST))


# ---- mistakes and accidents ---------------------------------------------------------------------------------------

GOOD = tiny.pictures(9, 4)
NAN = np.full((4, 8, 8, 3), np.nan, np.float32)
MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "class learned before": (GOOD, ["new", "new", "cat", 7], "already learned.*'cat'.*7"),
    "empty array": (GOOD[:0], [], "empty"),
    "empty list": ([], [], "empty"),
    "channels first": (GOOD.transpose(0, 3, 1, 2), list("abcd"), "channels last"),
    "five dimensions": (GOOD[None], ["a"], "shape"),
    "one image without N": (GOOD[0, 0], list("abcdefgh"), "shape"),
    "four channels": (np.concatenate([GOOD, GOOD[..., :1]], 3), list("abcd"), "shape"),
    "no pixels": (GOOD[:, :0], list("abcd"), "empty side"),
    "float images": (GOOD.astype(np.float32), list("abcd"), "uint8"),
    "int64 images": (GOOD.astype(np.int64), list("abcd"), "uint8"),
    "NaN images": (NAN, list("abcd"), "NaN"),
    "fewer labels": (GOOD, list("abc"), "4 images, 3 labels"),
    "more labels": (GOOD, list("abcde"), "4 images, 5 labels"),
    "unhashable label": (GOOD, ["a", "b", [1], "c"], "label 2.*hashed"),
    "NaN label": (GOOD, [0.5, float("nan"), 0.5, 1.5], "label 1.*NaN"),
    "None as label": (GOOD, [0, None, 1, 2], "label 1 is None"),
    "text as labels": (GOOD, "abcd", "list"),
    "labels of two dimensions": (GOOD, np.zeros((4, 1), int), "dimension"),
    "a number and true/false": (GOOD, [1, 0, 1, True], "the labels 1 and True are equal in Python"),
    "two types of numbers": (GOOD, [2, 3, 3.0, 2], "the labels 3 and 3.0 are equal in Python"),
    "two types in tuples": (GOOD, [("a", (1,)), "b", ("a", (True,)), "c"], r"the labels \('a', \(1,\)\) and .*True"),
    "a class learned before, of another type": (
        GOOD,
        ["new", "new", 7.0, "d"],
        "the labels 7 and 7.0 are equal in Python",
    ),
    "no images at all": (None, list("abcd"), "images must be"),
    "a path alone": ("image.png", ["a"], "images must be"),
    "no labels": (GOOD, None, "labels are missing"),
    "no such folder": ("no-such-folder", None, "no folder no-such-folder"),
    "a date as label": (GOOD, ["a", "b", datetime.date(2022, 8, 22), "c"], "cannot save the label datetime.date"),
    "bytes as label": (GOOD, ["a", "b", b"c", "d"], "cannot save the label b'c'"),
    "a set as label": (GOOD, ["a", "b", ("c", frozenset({1})), "d"], "cannot save the label frozenset"),
    "missing file": ([Path("no-such.png")], ["a"], "no-such.png does not exist"),
    "not an image": ([3], ["a"], "image 0"),
}


def test_mistakes_are_refused_and_change_nothing(taught: Learner) -> None:
    before, scores, seconds = tiny.snapshot(taught), taught.scores(TEST), dict(taught.seconds)
    for mistake, (images, labels, message) in MISTAKES.items():
        with pytest.raises((ValueError, TypeError), match=message):
            taught.learn_task(images, labels)
        assert (taught.classes, taught.task_sizes) == (before["classes"], before["task_sizes"]), mistake
    with pytest.raises(ValueError, match=r"no-such\.png does not exist"):
        taught.learn_task(iter([GOOD[0], "no-such.png"]), ["a", "b"])
    for images in (NAN, GOOD.astype(np.float64), GOOD.transpose(0, 3, 1, 2), 5, None):
        with pytest.raises((ValueError, TypeError)):
            taught.predict(images)
    tiny.assert_same(before, tiny.snapshot(taught))
    assert np.array_equal(scores, taught.scores(TEST))
    assert seconds == taught.seconds


def test_an_accident_leaves_the_learner_as_before(method: str, lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after an epoch, then again when all is learned but not yet returned; then learning goes on."""
    learner = morecl.load(lesson.after_two)
    before, scores, seconds = tiny.snapshot(learner), learner.scores(TEST), dict(learner.seconds)
    learn = learner._learn

    def interrupt(event: EpochDone) -> None:
        raise KeyboardInterrupt("between epochs")

    def broken(*args: Any) -> None:
        learn(*args)
        raise RuntimeError("when all was done")

    if method in TRAINED and method not in TRAINED_ONCE:
        with pytest.raises(KeyboardInterrupt, match="between epochs"):
            learner.learn_task(*TASKS[2], interrupt)
    tiny.assert_same(before, tiny.snapshot(learner))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="when all was done"):
        patch.setattr(learner, "_learn", broken)
        learner.learn_task(*TASKS[2])
    tiny.assert_same(before, tiny.snapshot(learner))
    assert np.array_equal(scores, learner.scores(TEST))
    assert seconds == learner.seconds
    teach(learner, first=2)
    tiny.assert_same(tiny.snapshot(lesson.learner), tiny.snapshot(learner))
    assert np.array_equal(lesson.learner.scores(TEST), learner.scores(TEST))


@pytest.mark.parametrize(
    ("method", "changes"), [("more", {"epochs": 2, "lr": 1e4}), ("finetune", {"epochs": 4, "lr": 100.0})]
)
@pytest.mark.parametrize("explodes", [True, False])
def test_a_last_step_that_diverges_is_no_result(
    method: str, changes: dict[str, Any], explodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All losses are finite, and so are all weights; features under them are not. The growth of the loss is noticed
    first."""
    if not explodes:
        monkeypatch.setattr(training, "EXPLODED", float("inf"))
    digits = load_dataset("digits")
    first = digits.y_train < 2
    events: list[EpochDone] = []
    learner = morecl.create(method, image_size=16, device="cpu", **changes)
    before = tiny.snapshot(learner)
    told = "diverged: the loss of task 1 grew from" if explodes else "diverged: task 1"
    with pytest.raises(morecl.DivergedError, match=rf"{told} .* lower the learning rate"):
        learner.learn_task(digits.x_train[first][:64], digits.y_train[first][:64], events.append)
    assert (len(events) < changes["epochs"]) == explodes and all(np.isfinite(event.loss) for event in events)
    tiny.assert_same(before, tiny.snapshot(learner))
    assert learner.seconds["train"] == 0


def test_epochs_are_reported(method: str, lesson: Lesson) -> None:
    if method in TRAINED:
        own = [e for e in lesson.events if not e.stage]  # besides, methods tell of stages of their own
        assert [(e.task, e.epoch, e.epochs) for e in own] == [
            (task, 1, 1) for task in range(1 if method in TRAINED_ONCE else 3)
        ]
    assert all(np.isfinite(e.loss) for e in lesson.events)
    assert all(e.images_per_second is None or e.images_per_second > 0 for e in lesson.events)
    assert not any(e.images_per_second is None for e in lesson.events if not e.stage)


def test_each_epoch_has_an_order_of_its_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method not in TRAINED:
        return
    changes = {"memory_size": 0} if method == "derpp" else {}  # which replays what it has just seen
    learner, rows = tiny.create(method, epochs=2, **changes), [list[bytes]()]
    trunk = learner.network.trunk

    def spied(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            rows[-1] += [row.numpy().tobytes() for row in tokens.detach()]
        return trunk(tokens, *args, **kwargs)

    monkeypatch.setattr(learner.network, "trunk", spied)
    learner.learn_task(*TASKS[0], lambda event: rows.append([]) if not event.stage else None)
    assert len(rows[0]) >= 2 * COUNT
    assert sorted(rows[0]) == sorted(rows[1]) and rows[0] != rows[1]


def test_unknown_setting_names_the_nearest(method: str) -> None:
    with pytest.raises(morecl.InputError, match=r"unknown setting 'bakbone'; did you mean 'backbone'\?"):
        morecl.create(method, bakbone="x")


IDLE = [
    ("agem", {"memory_size": 0}),
    ("derpp", {"memory_size": 0}),
    ("derpp", {"alpha": 0}),
    ("eeil", {"memory_size": 0}),
    ("eeil", {"balanced_epochs": 0}),
    ("gd", {"balanced_epochs": 0}),
    ("hal", {"memory_size": 0}),
    ("hal", {"lamb": 0}),
    ("more", {"memory_size": 0}),
    ("more", {"back_update": False}),
    ("more", {"coefficient": False}),
    ("morerp", {"memory_size": 0}),
    ("morerp", {"projection": 40}),
    ("pass", {"kd_weight": 0}),
    ("row", {"memory_size": 0}),
    ("tpl", {"memory_size": 0}),
]


@pytest.mark.parametrize(("method", "off"), IDLE, ids=str)
def test_settings_that_are_said_to_change_nothing_change_nothing(method: str, off: dict[str, Any]) -> None:
    config = METHODS[method].Config
    idle = config.parse(off).switched_off()
    changes: dict[str, Any] = {}
    for key in idle:
        kind, value = config.model_fields[key].annotation, config.model_fields[key].default
        if get_origin(kind) is Literal:
            changes[key] = next(other for other in get_args(kind) if other != value)
        elif isinstance(value, bool):
            changes[key] = not value
        elif value is None:
            changes[key] = 0.3
        else:
            changes[key] = value + 1 if isinstance(value, int) else value / 2
    assert changes and not {*off} & {*changes}
    for key in changes:
        with pytest.raises(InputError, match=f"{key} would change nothing with "):
            config.parse(off | changes).refuse_switched_off([key])

    def answers(settings: dict[str, Any]) -> Any:
        learner = METHODS[method](config.parse(tiny.settings_for(method, **off) | settings))  # `create` refuses them
        for kinds in ((0, 1), (2, 3)):
            learner.learn_task(*tiny.task(kinds, [f"k{k}" for k in kinds], 6))
        images = tiny.task(range(5), "abcde", 3)[0]
        return learner.scores(images), learner.predict(images).ood_score

    on = {key: value for key, value in changes.items() if value is not False}  # what is off may switch others off
    for some in (changes, on) if on else (changes,):
        for one, other in zip(answers({}), answers(some), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("method", "off", "given"),
    [
        ("derpp", {"alpha": 0}, {"mask_unseen": False}),
        ("more", {"memory_size": 0}, {"back_update": False}),
        ("morerp", {"memory_size": 0}, {"back_update": False}),
        ("row", {"memory_size": 0}, {"wp_epochs": 3, "ood_epochs": 3, "head_batch_size": 8, "head_lr": 0.1}),
        ("tpl", {"memory_size": 0}, {"neighbours": 3, "calibrate": False}),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(method: str, off: dict[str, Any], given: dict[str, Any]) -> None:
    """Only if they are given: values that come from elsewhere, such as a recipe, are no mistake of the user's."""
    config = METHODS[method].Config.parse(off | given)
    cause = "=".join(str(part) for part in next(iter(off.items())))
    for further in (False, True):
        with pytest.raises(InputError, match=f"^{', '.join(given)} would change nothing with {cause}. Leave it out"):
            config.refuse_switched_off(off | given, further=further)
        config.refuse_switched_off(off, further=further)
    METHODS[method].Config.parse(given).refuse_switched_off(given)
    with pytest.raises(InputError, match=f"would change nothing with {cause}"):
        tiny.create(method, **off, **given)
    learner = tiny.create(method, **off)
    learner.learn_task(*tiny.task([0], ["a"], 4))
    before = learner.config
    with pytest.raises(InputError, match=f"would change nothing with {cause}"):
        learner.configure(**given)
    assert learner.config == before


@pytest.mark.parametrize("method", ["more", "morerp"])
def test_a_recipe_without_back_update_runs_without_a_memory(method: str) -> None:
    """Its own ``back_update=false`` is no mistake of the user's."""
    settings = {"memory_size": 0, "backbone": "vit_tiny_patch16_224"}
    request = RunRequest(method=method, benchmark="tinyimagenet-5t", settings=settings)
    run = request.resolve()
    assert run.settings["back_update"] is False  # the recipe's
    run.check()
    given = request.model_copy(update={"settings": {**request.settings, "back_update": False}})
    with pytest.raises(InputError, match="back_update would change nothing with memory_size=0"):
        given.resolve().check()
