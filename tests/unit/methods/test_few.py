"""Answers for a few images: the same as those for many, without waiting for the device; captured and dropped again."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import morecl
from morecl import training
from morecl.bench.prediction import grown, spread
from morecl.kernel_ridge import KernelRidge
from morecl.methods import few
from morecl.methods.more import More
from morecl.methods.morerp import NOT_ASKED, Morerp
from morecl.nn import capture
from morecl.nn.capture import Batch
from morecl.progress import EpochDone
from morecl.scoring import Features, Output
from tiny import images_of, learner_of, teach

STREAM = ((0, 1), (2, 3), (4,), (5, 6, 9), (7, 8))
KINDS: dict[str, tuple[type[More], dict[str, Any], int]] = {  # class, settings, networks computed at once
    "more": (More, {}, 8),
    "more without coefficient": (More, {"coefficient": False}, 8),
    "morerp, all at once": (Morerp, {}, 8),
    "morerp, gathered": (Morerp, {}, 0),
    "morerp with sums": (Morerp, {"projection": 60}, 0),
    "morerp that asks all": (Morerp, {"asked": None}, 0),
    "morerp that asks one": (Morerp, {"asked": 1, "known_weight": 0.0}, 0),
    "morerp that asks enough": (Morerp, {"asked": 9}, 8),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def images(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def learner_like(kind: str, **changes: Any) -> Any:
    cls, settings, _ = KINDS[kind]
    return learner_of(cls, image_size=8, memory_size=20, **settings, **changes)


@functools.cache
def learned(cls: type[More], projection: int | None) -> tuple[list[Any], list[int], dict[str, torch.Tensor]]:
    """Classes, sizes and state after five tasks, with networks that differ: a few steps leave adapters near the
    identity."""
    kind = "more" if cls is More else "morerp with sums" if projection else "morerp, gathered"
    learner = teach(learner_like(kind), *STREAM, each=4)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for part in learner.adapters.parameters():
            part.copy_(0.3 * torch.randn(part.shape, generator=draw))
        for net in learner.tasks:
            net.embedding.copy_(torch.randn(net.embedding.shape, generator=draw))
            net.norms.bias.add_(0.3 * torch.randn(net.norms.bias.shape, generator=draw))
        learner._derived.clear()
        if cls is Morerp:
            rank_differently(learner, draw)
    return learner.classes, learner.task_sizes, learner.state()


def rank_differently(learner: Any, draw: torch.Generator) -> None:
    """Give the ridge classifier weights under which images want different networks."""
    ridge = learner.rule.ridge
    if not isinstance(ridge, KernelRidge):
        ridge.weight.copy_(torch.randn(ridge.weight.shape, generator=draw))
        return
    z = learner.embed(learner.prepare(images(40, seed=9)), learner.rule.network)
    ridge.clear()
    ridge.scale.copy_((z - z.mean(0)).std())
    ridge.add(z, torch.arange(len(z)) % ridge.classes)
    ridge.dual = torch.randn(ridge.dual.shape, generator=draw)


def taught(kind: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    cls, settings, at_once = KINDS[kind]
    monkeypatch.setattr(few, "ALL_AT_ONCE", at_once)
    learner = learner_like(kind, **changes)
    classes, sizes, state = learned(cls, settings.get("projection"))
    learner.restore(classes, sizes, {key: value.clone() for key, value in state.items()})
    return learner


def usual(learner: Any, x: np.ndarray) -> Output:
    return learner.answer(Features(learner, learner.prepare(x), few=False))


def of_few(learner: Any, x: np.ndarray) -> Output:
    answer = learner._for_few(len(x))
    assert answer is not None
    with torch.no_grad():
        return Output.unpacked(answer(torch.from_numpy(x).to(learner.device)).packed().cpu())


def assert_equal(found: Output, expected: Output, tolerance: float) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(vars(found)[name], value.cpu(), rtol=tolerance, atol=tolerance, msg=name)
    assert torch.equal(found.scores.argmax(1), expected.scores.cpu().argmax(1))


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


def test_each_image_has_its_own_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would say little if all images asked the same networks."""
    learner = taught("morerp, gathered", monkeypatch)
    scores = of_few(learner, images(8)).scores.numpy()
    task = learner.task_of_column()
    asked = np.stack([(scores[:, task == k] > NOT_ASKED / 2).all(1) for k in range(len(STREAM))], 1)
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


# ---- on a GPU -------------------------------------------------------------------------------------------------

on_gpu = pytest.mark.gpu
strictly = pytest.mark.filterwarnings("error:answers for few images cannot be captured")


def big(method: str, tasks: int, **settings: Any) -> Any:
    """A learner of the shipped backbone, grown without training."""
    cls = {"more": More, "morerp": Morerp}[method]
    config = cls.Config.parse({"device": "cuda", "memory_size": 20, "image_size": 32, **settings})
    learner = grown(method, config, tasks)
    if isinstance(learner, Morerp) and settings.get("projection") is None:
        spread(learner, pictures(64))
    return learner


def pictures(count: int, seed: int = 0, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


@on_gpu
@strictly
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tasks", [1, 5, 12])
@pytest.mark.parametrize("method", ["more", "morerp"])
def test_on_a_gpu_replayed_answers_are_the_computed_ones_bit_by_bit(method: str, tasks: int, precision: str) -> None:
    learner = big(method, tasks, precision=precision)
    for count in (1, 2, 3, 8):
        for seed in range(4):
            x = pictures(count, seed)
            filled = np.concatenate([x, x[-1:], x[-1:]])[: {3: 4}.get(count, count)]
            found, computed = learner.output(x), of_few(learner, filled)
            for name, value in vars(computed).items():
                assert torch.equal(vars(found)[name], value[:count]), (count, seed, name)
    assert len(learner._derived["replayed"]) == 4


@on_gpu
@strictly
@pytest.mark.parametrize("tasks", [1, 5, 12])
@pytest.mark.parametrize("method", ["more", "morerp"])
def test_on_a_gpu_replayed_answers_are_those_of_the_usual_way(method: str, tasks: int) -> None:
    learner = big(method, tasks, precision="fp32")
    for count in (1, 2, 8):
        for seed in range(3):
            x = pictures(count, seed)
            assert_equal(learner.output(x), usual(learner, x), 1e-3)


@on_gpu
@strictly
@every_kind
def test_on_a_gpu_what_is_learned_drops_what_is_captured(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learner = taught(kind, monkeypatch, device="cuda", precision="fp32")
    learner.compiled = False  # would take long and is not what is tested

    def check() -> None:
        for seed in range(4):
            assert_equal(learner.output(images(1, seed)), usual(learner, images(1, seed)), 1e-3)
        assert len(learner._derived["replayed"]) == 1

    check()
    learner.learn_task(*images_of(10, 11, each=4))
    check()
    learner.add_examples(*images_of(0, 3, each=4))
    check()
    label = learner.predict(images(1)).labels[0]
    learner.rename(label, "new")
    assert learner.predict(images(1)).labels == ["new"]
    learner.forget("new")
    check()
    assert "new" not in learner.predict(images(8)).labels
    learner.save(tmp_path / "saved")
    before = learner.scores(images(1))
    loaded = morecl.load(tmp_path / "saved")
    assert loaded.captured
    for _ in range(3):
        np.testing.assert_allclose(loaded.scores(images(1)), before, rtol=1e-3, atol=1e-3)


@on_gpu
@strictly
def test_on_a_gpu_other_threads_replay_and_learners_do_not_meet() -> None:
    """Captured in this thread, replayed in others; a learner for each of two, and a third that captures meanwhile."""
    learners = [big("more", 5), big("morerp", 12)]
    x = [pictures(1, seed) for seed in range(6)]
    for learner in learners:
        for _ in range(2):
            learner.predict(x[0])
    expected = [[vars(learner.output(image)) for image in x] for learner in learners]
    wrong: list[object] = []

    def ask(which: int) -> None:
        try:
            for call in range(200):
                found = vars(learners[which].output(x[call % 6]))
                if not all(torch.equal(found[name], value) for name, value in expected[which][call % 6].items()):
                    wrong.append((which, call))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    third = big("more", 3)
    for count in (1, 1, 2, 2, 8, 8):
        third.predict(pictures(count))
    for thread in threads:
        thread.join()
    assert not wrong and len(third._derived["replayed"]) == 3


@on_gpu
@strictly
@pytest.mark.parametrize("method", ["more", "morerp"])
def test_on_a_gpu_memory_does_not_grow_with_calls_or_shapes(method: str) -> None:
    learner = big(method, 5)

    def ask(rounds: int) -> None:
        for seed in range(rounds):
            for side in (16, 32, 48, 50, 52):
                for count in (1, 2, 8):
                    for _ in range(3):
                        learner.predict(pictures(count, seed, side))

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    ask(3)  # 15 shapes, more than are kept: captures come and go
    before = used()
    ask(4)
    after = used()
    assert after[0] <= before[0] + 2**20 and after[1] <= before[1] + 2**25
    x = pictures(1)
    for _ in range(3):
        learner.predict(x)
    before = used()
    for _ in range(200):
        learner.predict(x)
    assert used() == before


@on_gpu
@strictly
def test_on_a_gpu_memory_is_given_back_with_the_learner() -> None:
    def used() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    gc.collect()
    held = []
    for _ in range(4):
        learner = big("morerp", 12)
        for count in (1, 8):
            for _ in range(3):
                learner.predict(pictures(count))
        del learner
        gc.collect()
        held.append(used())
    assert held[-1] <= held[1] + 2**20
