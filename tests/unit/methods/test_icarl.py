from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from morecl.errors import InputError
from morecl.methods.icarl import Icarl
from morecl.progress import EpochDone
from tiny import images_of, is_same, learner_of, resumes, snapshot, teach


def unit(features: np.ndarray) -> np.ndarray:
    features = features.astype(np.float64)
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def learner() -> Icarl:
    return teach(learner_of(Icarl, memory_size=12, epochs=2), (0, 1), (2, 3))


def test_predicts_the_class_whose_exemplars_have_the_nearest_mean(learner: Icarl) -> None:
    x, _ = images_of(0, 1, 2, 3, each=20)
    z, exemplars = unit(learner.features(x)), unit(learner.features(learner.memory.images))
    means = unit(np.stack([exemplars[learner.memory.columns == c].mean(0) for c in range(4)]))
    expected = np.linalg.norm(z[:, None] - means[None], axis=2).argmin(1)
    assert learner.predict(x).labels == expected.tolist()
    np.testing.assert_allclose(-learner.scores(x), np.linalg.norm(z[:, None] - means[None], axis=2), atol=1e-6)


def test_distances_say_how_well_an_image_is_known_and_the_head_gives_confidences(learner: Icarl) -> None:
    x, _ = images_of(0, 1, 2, 3)
    z, exemplars = unit(learner.features(x)), unit(learner.features(learner.memory.images))
    means = unit(np.stack([exemplars[learner.memory.columns == c].mean(0) for c in range(4)]))
    distance = np.linalg.norm(z[:, None] - means[None], axis=2)
    with torch.no_grad():
        p = learner.head(torch.from_numpy(learner.features(x))).double().softmax(1).numpy()
    soft = np.exp(-distance) / np.exp(-distance).sum(1, keepdims=True)
    for rule, known in {"distance": -distance, "softmax": soft, "head": p}.items():
        config = Icarl.adopted_config(learner, {"ood_score": rule})
        other = Icarl.adopt(learner, config)
        answer = other.predict(x)
        np.testing.assert_allclose(-answer.ood_score, known.max(1), atol=1e-6)
        assert answer.labels == distance.argmin(1).tolist()
        np.testing.assert_allclose(answer.confidence, p[np.arange(len(x)), answer.labels], atol=1e-6)
    assert learner.config.ood_score == "softmax"


def test_exemplars_are_herded_on_normalised_features() -> None:
    learner = teach(learner_of(Icarl, memory_size=6), (0, 1))
    x, y = images_of(0, 1)
    z = unit(learner.features(x))
    for c in (0, 1):
        own = np.flatnonzero(np.array(y) == c)
        chosen: list[int] = []
        for k in range(1, 4):
            distance = {i: np.linalg.norm(z[own].mean(0) - z[[*chosen, i]].sum(0) / k) for i in own if i not in chosen}
            chosen.append(min(distance, key=distance.__getitem__))
        assert np.array_equal(learner.memory.images[learner.memory.columns == c], x[chosen])


def test_old_outputs_are_held_to_the_old_networks_sigmoids(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = teach(learner_of(Icarl, memory_size=8), (0, 1))
    stored = learner.memory.images.copy()
    x, y = images_of(2, 3)
    with torch.no_grad():
        before = learner.head(torch.from_numpy(learner.features(np.concatenate([stored, x])))).sigmoid()
    seen = []
    original = F.binary_cross_entropy_with_logits

    def spy(logits: torch.Tensor, wanted: torch.Tensor, **kwargs: str) -> torch.Tensor:
        seen.append(wanted)
        return original(logits, wanted, **kwargs)

    monkeypatch.setattr(F, "binary_cross_entropy_with_logits", spy)
    learner.learn_task(x, y)
    wanted = torch.cat(seen)
    truth = torch.cat([torch.zeros(8, 2), F.one_hot(torch.tensor(y) - 2, 2).float()])
    expected = torch.cat([before, truth], 1)
    matched = torch.cdist(wanted.double(), expected.double()).min(1)
    assert len(wanted) == 24 and sorted(matched.indices.tolist()) == list(range(24))
    assert matched.values.max() < 1e-5


def test_the_loss_is_summed_over_classes_and_averaged_over_images() -> None:
    """One batch with a rate of (almost) nothing."""
    learner, events = learner_of(Icarl, batch_size=24, lr=1e-12), list[EpochDone]()
    x, y = images_of(0, 1, 2)
    learner.learn_task(x, y, events.append)
    with torch.no_grad():
        g = learner.head(torch.from_numpy(learner.features(x))).sigmoid().double().numpy()
    true = np.eye(3)[y]
    expected = -(true * np.log(g) + (1 - true) * np.log(1 - g)).sum(1).mean()
    assert events[0].loss == pytest.approx(expected, rel=1e-4)


def test_too_small_a_memory_is_refused_and_nothing_changes() -> None:
    learner = teach(learner_of(Icarl, memory_size=3), (0, 1))
    twin = teach(learner_of(Icarl, memory_size=3), (0, 1))
    with pytest.raises(InputError, match="memory_size=3"):
        learner.learn_task(*images_of(2, 3))
    assert is_same(snapshot(learner), snapshot(twin)) and learner.classes == [0, 1]


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Icarl, memory_size=12))


def test_the_memory_keeps_room_for_an_exemplar_of_each_class() -> None:
    learner = teach(learner_of(Icarl, memory_size=12), (0, 1), (2, 3))
    before = snapshot(learner)
    with pytest.raises(InputError, match="memory_size=3 cannot hold an exemplar of each of 4 classes"):
        learner.configure(memory_size=3)
    assert is_same(before, snapshot(learner)) and learner.config.memory_size == 12
    with pytest.raises(InputError, match="memory_size=1 cannot hold"):
        learner.configure(memory_size="1")
    learner.configure(memory_size=4)
    assert sorted(learner.memory.columns.tolist()) == [0, 1, 2, 3]
