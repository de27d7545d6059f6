from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import morecl
import tiny
from morecl import gaussian
from morecl.methods.more import More

TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(4)])


@pytest.fixture(scope="module")
def learner() -> More:
    learner = tiny.create("more")
    for kinds in ([0, 1], [2, 3]):
        learner.learn_task(*tiny.task(kinds, kinds, 6))
    assert isinstance(learner, More)
    return learner


def test_prediction_inverts_no_covariance(learner: More, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner.save(tmp_path / "saved")
    monkeypatch.setattr(gaussian, "precision", lambda g: pytest.fail("it is kept with the model"))
    assert np.array_equal(morecl.load(tmp_path / "saved").scores(TEST), learner.scores(TEST))


def test_precision_matrices_are_those_of_the_covariances(learner: More) -> None:
    for k, net in enumerate(learner.tasks):
        assert torch.equal(net.precision, gaussian.precision(learner.statistics(k)))


def test_precision_matrices_are_not_counted(learner: More) -> None:
    assert learner.entries()["statistics"] == 4 * tiny.DIM + 2 * tiny.DIM * tiny.DIM
