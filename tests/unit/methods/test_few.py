"""Answers for a few images: the same as those for many, without waiting for the device; captured and dropped again."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import morecl
from few_images import (
    KINDS,
    assert_equal,
    every_backbone,
    every_kind,
    images,
    learner_like,
    of_backbone,
    of_few,
    pictures,
    taught,
    usual,
)
from morecl import training
from morecl.methods import few
from morecl.methods.more import More
from morecl.methods.morerp import Morerp
from morecl.nn import capture
from morecl.nn.capture import Batch
from morecl.progress import EpochDone
from tiny import images_of, learner_of, teach


@every_kind
def test_few_are_answered_as_many_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when single classes, a whole task, and the task whose network feeds the ridge classifier are forgotten."""
    learner = taught(kind, monkeypatch)
    for forgotten in ((), (2, 4), (0, 1), (5, 6, 9, 3)):
        for label in forgotten:
            learner.forget(label)
        for count in (1, 6):
            assert_equal(of_few(learner, images(count)), usual(learner, images(count)), 1e-4)
        assert learner._derived["few"].among == learner.rule.remaining().nonzero()[:, 0].tolist()


def test_threads_that_are_first_use_the_same_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the addresses of what it was captured with: the others' would be freed."""
    learner = taught("more", monkeypatch)
    learner._derived.clear()
    used: list[object] = []

    class Slow(few.FewImages):
        def __init__(self, of: Any):
            super().__init__(of)
            together.wait()

        def __call__(self, of: Any, x: torch.Tensor) -> Any:
            used.append(self)
            return super().__call__(of, x)

    together = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(type(learner), "few_images", Slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(learner._for_few, (1, 1)))
    for answer in found:  # one after the other, as :class:`Replayed` does it
        answer(torch.from_numpy(images(1)))
    assert len(used) == 2 and used[0] is used[1] is learner._derived["few"]


def test_what_is_filled_up_counts_for_the_size_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught("more", monkeypatch)
    wanted: list[int] = []
    monkeypatch.setattr(learner, "captured", True)
    monkeypatch.setattr(learner, "_for_few", wanted.append)  # says that there is no such way
    for count in (1, 3, 5, 9):
        learner.output(images(count))
    assert wanted == [1, 4, 8]  # nine images are not few


def test_each_image_has_its_own_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would say little if all images asked the same networks."""
    learner = taught("morerp, gathered", monkeypatch)
    rule = learner.rule
    with torch.no_grad():
        _, ridge = rule.compare(learner.embed(learner.prepare(images(8)), rule.network))
    asked = rule._ranking(ridge).numpy()
    assert (asked.sum(1) == 3).all() and len(np.unique(asked, axis=0)) > 1


@every_kind
def test_one_task(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "ALL_AT_ONCE", KINDS[kind][2])
    learner = teach(learner_like(kind), (0, 1, 2), each=4)
    assert_equal(of_few(learner, images(3)), usual(learner, images(3)), 1e-5)


@every_kind
def test_nothing_waits_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without numbers goes through, so nothing asks for any."""
    learner = taught(kind, monkeypatch)
    learner.forget(4)
    answer = learner._for_few(2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        packed = answer(mode.from_tensor(torch.from_numpy(images(2)))).packed()
    assert packed.shape == (2, 2 * 10 + 1) and packed.dtype == torch.float64


@every_backbone
def test_every_backbone(name: str) -> None:
    learner = of_backbone(name, "cpu")
    x = pictures(2)
    assert_equal(of_few(learner, x), usual(learner, x), 1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        learner._for_few(2)(mode.from_tensor(torch.from_numpy(x)))


def test_too_much_memory_or_too_many_images_go_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught("more", monkeypatch)
    learner.eval_batch_size = 9
    assert learner._for_few(1) is not None and learner._for_few(2) is None  # 5 networks
    learner._derived.clear()
    monkeypatch.setattr("morecl.methods.more.FOLDED_BYTES", few.FewImages.bytes_for(learner) - 1)
    assert learner._for_few(1) is None
    both = taught("morerp, gathered", monkeypatch)
    kept = 4 * both.rule.ridge.features.numel()
    assert few.FewRanked.bytes_for(both) == few.FewImages.bytes_for(both) + kept > kept


# ---- captured -------------------------------------------------------------------------------------------------


class Rehearsal:
    """A stand-in for a CUDA graph on any device: the same buffers, and the function as it was when it was captured."""

    made = 0

    def __init__(self, step: Any, batch: Batch, changed: Any = (), **how: Any):
        type(self).made += 1
        self.inputs, self.step = tuple(part.clone() for part in batch), step

    def __call__(self, batch: Batch) -> Any:
        for buffer, part in zip(self.inputs, batch, strict=True):
            buffer.copy_(part)
        return self.step(self.inputs)


def captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A learner that has captured the answer for one image."""
    learner = taught(kind, monkeypatch)
    monkeypatch.setattr(capture, "CapturedStep", Rehearsal)
    monkeypatch.setattr(training, "Capturing", lambda step, changed: step)
    monkeypatch.setattr(Rehearsal, "made", 0)
    learner.captured = True
    for _ in range(2):
        learner.predict(images(1))
    assert Rehearsal.made == 1
    return learner


BOTH = pytest.mark.parametrize("kind", ["more", "morerp, gathered"])


@BOTH
def test_predictions_are_captured_from_the_second_call_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = captured(kind, monkeypatch)
    for count in (1, 2, 3, 8, 2, 3, 8):
        x = images(count, seed=count)
        found, expected = learner.predict(x), usual(learner, x)
        assert found.labels == [learner.classes[c] for c in expected.scores.argmax(1)]
        np.testing.assert_allclose(found.ood_score, -expected.known.numpy(), rtol=1e-4)
        np.testing.assert_allclose(learner.scores(x), expected.scores.numpy(), rtol=1e-4, atol=1e-4)
    assert Rehearsal.made == 4  # 1, 2, 4 and 8 images
    learner.predict(images(9)), learner.predict(images(9)), learner.predict(images(0))
    assert Rehearsal.made == 4


def test_the_last_of_many_images_go_the_way_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = captured("more", monkeypatch)
    learner.eval_batch_size = 512  # images read at once
    asked: list[int] = []
    monkeypatch.setattr(learner, "_for_few", asked.append)
    learner.predict(images(513))
    assert not asked
    learner.predict(images(1))
    assert asked == [1]


@BOTH
def test_what_is_learned_drops_what_is_captured(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learner = captured(kind, monkeypatch)
    x = images(1)

    def drop(change: Any) -> None:
        """After ``change`` the answers are again those of the usual way, and captured anew."""
        made = Rehearsal.made
        change()
        for call in range(3):
            assert_equal(learner.output(x), usual(learner, x), 1e-4)
            assert Rehearsal.made == made + min(call, 1)

    state = {key: value.clone() for key, value in learner.state().items()}
    classes, sizes = list(learner.classes), list(learner.task_sizes)
    drop(lambda: learner.learn_task(*images_of(10, 11, each=4)))
    drop(lambda: learner.add_examples(*images_of(0, 3, each=4)))
    drop(lambda: learner.forget(learner.classes[int(learner.output(x).scores.argmax())]))
    drop(lambda: learner.restore(classes, sizes, state))
    with pytest.raises(KeyboardInterrupt):
        learner.learn_task(*images_of(10, 11, each=4), interrupt)
    drop(lambda: None)


def interrupt(event: EpochDone) -> None:
    raise KeyboardInterrupt


def test_a_rule_fitted_anew_drops_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = teach(learner_like("more"), (0, 1), each=4)
    monkeypatch.setattr(capture, "CapturedStep", Rehearsal)
    adopted = Morerp.adopt(trained, Morerp.adopted_config(trained, {}))
    adopted.fit_rule(*images_of(0, 1, each=4))
    adopted.captured = True
    for _ in range(3):
        adopted.predict(images(1))
    adopted.rule.ridge.clear()
    adopted.fit_rule(*images_of(0, 1, each=4))
    assert_equal(adopted.output(images(1)), usual(adopted, images(1)), 1e-5)
    assert not len(adopted._derived["replayed"])


def test_a_new_name_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = captured("more", monkeypatch)
    (before,) = learner.predict(images(1)).labels
    learner.rename(before, "new")
    assert learner.predict(images(1)).labels == ["new"] and Rehearsal.made == 1


def test_in_the_middle_of_a_task_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = captured("more", monkeypatch)
    asked: list[bool] = []

    def ask(event: EpochDone) -> None:
        for _ in range(3):
            learner.predict(images(1))
        asked.append(Rehearsal.made)

    learner.learn_task(*images_of(10, 11, each=4), ask)
    assert asked and set(asked) == {1}


def test_who_observes_sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = captured("more", monkeypatch)
    monkeypatch.setattr(learner, "_for_few", lambda count: pytest.fail("replayed"))
    seen: list[int] = []
    with learner.network.observe_features(lambda features: seen.append(len(features))):
        learner.predict(images(1))
    assert seen == [5]
    with learner.network.observe_adapters(lambda place, h: seen.append(place)):
        learner.predict(images(1))
    assert len(seen) > 1


def test_a_loaded_learner_captures_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learner = captured("more", monkeypatch)
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved", device="cpu")
    loaded.captured = True
    for _ in range(3):
        assert_equal(loaded.output(images(1)), usual(learner, images(1)), 1e-5)
    assert Rehearsal.made == 2


def test_compile_off_means_no_capture() -> None:
    learner = learner_of(More, compile="off")
    assert not learner.captured and not learner._replays(1)


def test_a_learner_is_freed_with_its_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the garbage collector: its memory on the device may be needed at once."""
    monkeypatch.setattr(capture, "CapturedStep", lambda step, batch, **how: lambda batch: torch.zeros(1, 21))
    learner = taught("morerp, gathered", monkeypatch)
    learner.captured = True
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            learner.predict(images(1))
        parts = weakref.ref(learner._derived["few"]), weakref.ref(learner._derived["replayed"])
        learner._derived.clear()
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()
