from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from morecl.methods import tools
from morecl.methods.joint import Joint
from tiny import images_of, learner_of, resumes, teach


def test_trains_on_everything_seen_starting_from_the_pretrained_state(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(Joint)
    fresh = {key: value.clone() for key, value in learner.model.state_dict().items() if not key.startswith("head")}
    original, columns, starts = tools.fit, [], []

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        starts.append({key: value.clone() for key, value in learner.model.state_dict().items()})
        columns.append([])

        def watched(epoch: int) -> Any:
            for batch in batches(epoch):
                columns[-1].append(batch[1])
                yield batch

        original(loss, watched, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    teach(learner, (0, 1), (2, 3))
    assert torch.cat(columns[0]).bincount().tolist() == [8, 8]
    assert torch.cat(columns[1]).bincount().tolist() == [8, 8, 8, 8]
    for start in starts:
        assert all(torch.equal(start[key], value) for key, value in fresh.items())
    assert starts[1]["head.weight"].shape[0] == 4 and not starts[1]["head.bias"].any()
    learned = learner.model.state_dict()
    assert any(not torch.equal(learned[key], value) for key, value in fresh.items() if key.startswith("adapters"))


def test_starts_anew_whatever_was_learned_before() -> None:
    """Its second step does not depend on how the first one was trained."""
    a, b = teach(learner_of(Joint), (0, 1)), teach(learner_of(Joint), (0, 1))
    with torch.no_grad():
        for parameter in b.model.parameters():
            parameter.add_(1.0)
    x, _ = images_of(0, 3)
    assert np.array_equal(teach(a, (2, 3)).scores(x), teach(b, (2, 3)).scores(x))


def test_keeps_every_image_with_its_label() -> None:
    learner = teach(learner_of(Joint), (0, 1), (2, 3))
    x = np.concatenate([images_of(0, 1)[0], images_of(2, 3)[0]])
    assert np.array_equal(learner.memory.images, x)
    assert learner.memory.labels == [c for c in range(4) for _ in range(8)]


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Joint))
