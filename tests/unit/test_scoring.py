from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

import morecl
import tiny
from morecl import methods
from morecl.errors import InputError
from morecl.methods import Learner
from morecl.methods.more import More, MoreConfig
from morecl.scoring import LearnedTask, MaximumSoftmax, Output, Rule
from morecl.task import TaskData

TASKS = [tiny.task(kinds, kinds, 6) for kinds in ([0, 1], [2, 3, 4], [5])]
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(6)])


class SumsConfig(MoreConfig):
    power: float = Field(1.0, gt=0, json_schema_extra={"role": "scoring"})


class SumsRule(Rule):
    """A toy with state that grows and depends on the order of tasks: sums of features, those of all tasks in one."""

    sums: Tensor
    total: Tensor

    def __init__(self, networks: Callable[[], Sequence[str]], dim: int, power: float):
        super().__init__()
        self._networks, self.power = networks, power
        self.register_buffer("sums", torch.zeros(0, dim, dtype=torch.float64))
        self.register_buffer("total", torch.zeros(dim, dtype=torch.float64))

    def grow(self, classes: int) -> None:
        self.sums = torch.cat([self.sums, self.sums.new_zeros(classes, self.sums.shape[1])])

    def fit(self, learned: LearnedTask) -> None:
        assert not torch.is_grad_enabled()
        assert learned.networks == list(self._networks())
        features = learned.features(learned.networks[-1]).double()
        self.sums.index_add_(0, learned.task.columns, features)
        self.total.add_(features.sum(0)).mul_(0.5)
        if len(learned.memory):
            self.total.add_(learned.memory_features(learned.networks[0]).double().sum(0))

    def score(self, features: Sequence[Tensor]) -> Output:
        scores = features[-1].double().abs().pow(self.power) @ (self.sums - self.total).mT
        p = scores.softmax(1)
        return Output(scores, p, p.amax(1))


class Sums(More):
    name: ClassVar[str] = "sums"
    trained_as: ClassVar[str] = "more"
    Config = SumsConfig
    config: SumsConfig

    def _new_rule(self) -> Rule:
        return SumsRule(self.networks, self.network.dim, self.config.power)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> type[Sums]:
    """The toy, known by its name."""
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "sums": Sums})
    return Sums


def create(cls: type[More], **changes: Any) -> More:
    return cls(cls.Config.parse(tiny.settings_for("more", **changes)))


def teach(learner: Any, first: int = 0, last: int = 3) -> Any:
    for images, labels in TASKS[first:last]:
        learner.learn_task(images, labels)
    return learner


def rescored(cls: type[Learner], tasks: int = 3, **settings: Any) -> Learner:
    """A learner of ``cls`` on MORE's networks after each task in turn, as rescoring a run makes it."""
    trained, before = create(More), None
    for images, labels in TASKS[:tasks]:
        trained.learn_task(images, labels)
        before = cls.adopt(trained, cls.adopted_config(trained, settings), before)
        before.fit_rule(images, labels)
    assert before is not None
    return before


def equal_scores(one: Learner, other: Learner) -> bool:
    p, q = one.predict(TEST), other.predict(TEST)
    same = np.array_equal(p.confidence, q.confidence) and np.array_equal(p.ood_score, q.ood_score)
    return same and p.labels == q.labels and np.array_equal(one.scores(TEST), other.scores(TEST))


# ---- a rule with state ----------------------------------------------------------------------------------------------


def test_a_rules_state_is_saved_and_loaded(sums: type[Sums], tmp_path: Path) -> None:
    learner = teach(create(sums), last=2)
    learner.save(tmp_path / "saved")
    loaded = morecl.load(tmp_path / "saved")
    assert learner.state()["rule.sums"].shape == (5, tiny.DIM)
    tiny.assert_same(tiny.snapshot(learner), tiny.snapshot(loaded))
    assert equal_scores(learner, loaded)
    tiny.assert_same(tiny.snapshot(teach(learner, first=2)), tiny.snapshot(teach(loaded, first=2)))


def test_a_failed_task_leaves_a_rules_state_as_it_was(sums: type[Sums], monkeypatch: pytest.MonkeyPatch) -> None:
    learner = teach(create(sums), last=2)
    before, scores = tiny.snapshot(learner), learner.scores(TEST)

    def broken(task: TaskData) -> None:
        raise RuntimeError("after the rule was fitted")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="after the rule"):
        patch.setattr(learner, "_require_finite", broken)
        learner.learn_task(*TASKS[2])
    tiny.assert_same(before, tiny.snapshot(learner))
    assert np.array_equal(scores, learner.scores(TEST))
    tiny.assert_same(tiny.snapshot(teach(learner, first=2)), tiny.snapshot(teach(create(sums))))


def test_a_rules_state_counts_as_statistics(sums: type[Sums]) -> None:
    plain, learner = teach(create(More), last=1), teach(create(sums), last=1)
    assert learner.entries()["statistics"] - plain.entries()["statistics"] == (2 + 1) * tiny.DIM
    assert list(learner.entries()) == list(plain.entries())


# ---- another rule on networks that are already trained --------------------------------------------------------------


def test_a_rule_on_adopted_networks_is_that_of_networks_of_its_own(sums: type[Sums]) -> None:
    tiny.assert_same(tiny.snapshot(rescored(sums, power=2.0)), tiny.snapshot(teach(create(sums, power=2.0))))


@pytest.mark.parametrize("settings", [{"coefficient": False}, {"temperature": 3.0, "c": 5.0}])
def test_more_with_other_settings_of_scoring_need_not_be_trained_again(settings: dict[str, Any]) -> None:
    trained, other = teach(create(More)), teach(create(More, **settings))
    adopted = More.adopt(trained, More.adopted_config(trained, settings))
    assert adopted.config == other.config
    tiny.assert_same(tiny.snapshot(adopted), tiny.snapshot(other))
    assert equal_scores(adopted, other) and not equal_scores(adopted, trained)
    assert equal_scores(rescored(More, **settings), other)
    tiny.assert_same(tiny.snapshot(trained), tiny.snapshot(teach(create(More))))  # which stays as it is


def test_what_was_trained_otherwise_is_refused(sums: type[Sums]) -> None:
    trained = teach(create(More), last=2)
    config = sums.adopted_config(trained, {})
    with pytest.raises(InputError, match=r"other settings: epochs=7 instead of 1, memory_size=5 instead of 12"):
        sums.adopt(trained, sums.adopted_config(trained, {"memory_size": 5, "epochs": 7}))
    with pytest.raises(InputError, match=r"'more' trains; these are of 'hat'"):
        sums.adopt(tiny.create("hat"), config)
    with pytest.raises(InputError, match="start from the first task"):
        sums.adopt(trained, config)
    with pytest.raises(InputError, match="after one task less"):
        sums.adopt(trained, config, before=rescored(sums, tasks=2))
    adopted = sums.adopt(trained, config, before=rescored(sums, tasks=1))
    with pytest.raises(InputError, match=r"newest task, whose classes are \[2, 3, 4\]"):
        adopted.fit_rule(*TASKS[0])


def test_methods_are_trained_as_themselves_unless_they_say_otherwise() -> None:
    expected = {name: name for name in methods.METHODS} | {"morerp": "more"}
    assert {name: cls.trained_as for name, cls in methods.METHODS.items()} == expected
    assert Sums.trained_as == "more"


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_maximum_softmax_puts_the_heads_side_by_side() -> None:
    first, second = np.array([[1.0, 2.0, 0.0]]), np.array([[0.5, 0.0]])
    rule = MaximumSoftmax(lambda: [lambda z: z, lambda z: z])
    output = rule.score([torch.from_numpy(first), torch.from_numpy(second)])
    expected = np.concatenate([np.exp(z) / np.exp(z).sum() for z in (first, second)], 1)
    np.testing.assert_allclose(output.scores, expected)
    np.testing.assert_allclose(output.probabilities, expected)
    assert float(output.known[0]) == pytest.approx(expected.max())
