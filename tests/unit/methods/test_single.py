from __future__ import annotations

import numpy as np

import tiny
from morecl.methods.finetune import Finetune
from morecl.methods.single import Single

FIRST, OTHER, SECOND = (tiny.task([k, k + 1], [k, k + 1], 8) for k in (0, 2, 4))


def learner(cls: type[Single] | type[Finetune] = Single) -> Single | Finetune:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in cls.Config.model_fields}
    return cls(cls.Config.parse(settings | {"epochs": 2}))


def test_a_model_does_not_depend_on_other_tasks() -> None:
    after_first, after_other = learner(), learner()
    after_first.learn_task(*FIRST)
    before = after_first.features(FIRST[0], task=0)
    after_other.learn_task(*OTHER)
    for one in (after_first, after_other):
        one.learn_task(*SECOND)
    assert np.array_equal(after_first.features(SECOND[0], task=1), after_other.features(SECOND[0], task=1))
    assert np.array_equal(after_first.scores(SECOND[0])[:, 2:], after_other.scores(SECOND[0])[:, 2:])
    assert np.array_equal(after_first.features(FIRST[0], task=0), before)
    assert not np.array_equal(before, after_first.features(FIRST[0], task=1))


def test_the_first_model_is_what_fine_tuning_reaches_on_the_first_task() -> None:
    single, finetune = learner(), learner(Finetune)
    for one in (single, finetune):
        one.learn_task(*FIRST)
    assert np.array_equal(single.scores(FIRST[0]), finetune.scores(FIRST[0]))


def test_scores_are_the_softmax_of_each_model() -> None:
    one = learner()
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    scores = one.scores(OTHER[0])
    assert np.allclose(scores[:, :2].sum(1), 1) and np.allclose(scores[:, 2:].sum(1), 1)
    assert np.allclose(-one.predict(OTHER[0]).ood_score, scores.max(1))
