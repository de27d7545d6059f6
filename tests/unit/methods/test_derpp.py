from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from morecl.methods import tools
from morecl.methods.derpp import Derpp, equation_6
from tiny import found_in, images_of, learner_of, resumes, teach


class Watch:
    """Follows training: the logits that every image got each time it was seen, and what was replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[torch.Tensor] = []  # logits of current batches, step by step
        self.replayed: list[tuple[torch.Tensor, torch.Tensor]] = []  # stored logits, which entries count
        self.drawn: list[torch.Tensor] = []  # tokens held to their logits, then to their labels, step by step
        original = tools.fit

        def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
            learner = self.learner

            def watched(*batch: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.said.append(learner.head(learner._features(batch[0])))
                self.replayed.append((batch[3], batch[4]))
                self.drawn += [batch[2], batch[5]]
                return loss(*batch)  # type: ignore[no-any-return]

            original(watched, batches, *args, **kwargs)

        monkeypatch.setattr(tools, "fit", spy)

    learner: Derpp


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def near(rows: torch.Tensor, among: torch.Tensor) -> bool:
    return bool(found_in(rows, among).max() < 1e-4)


def test_replays_the_logits_that_were_said_when_the_image_was_seen(watch: Watch) -> None:
    learner = watch.learner = learner_of(Derpp, memory_size=20, epochs=3, lr=0.05)
    teach(learner, (0, 1))
    said = torch.cat(watch.said)
    assert len(said) == 3 * 16
    for step, (stored, _) in enumerate(watch.replayed[1:], 1):
        assert len(stored) and near(stored, torch.cat(watch.said[:step]))
    assert near(torch.from_numpy(learner.memory.extras["logits"]), said)
    # said at that time, not now
    x = learner.memory.images
    with torch.no_grad():
        now = learner.head(torch.from_numpy(learner.features(x)))
    assert (now - torch.from_numpy(learner.memory.extras["logits"])).abs().max() > 0.01


def test_logits_belong_to_their_images(watch: Watch) -> None:
    """With a rate of (almost) nothing, what is said of an image never changes."""
    learner = watch.learner = learner_of(Derpp, memory_size=20, epochs=2, lr=1e-12)
    teach(learner, (0, 1), (2, 3))
    with torch.no_grad():
        z = learner.head(torch.from_numpy(learner.features(learner.memory.images)))
    stored = torch.from_numpy(learner.memory.extras["logits"])
    old = torch.from_numpy(learner.memory.columns) < 2
    assert old.any() and not old.all()
    assert torch.allclose(stored[~old], z[~old], atol=1e-5)
    assert torch.allclose(stored[old, :2], z[old, :2], atol=1e-5)
    assert (stored[old, 2:] == 0).all()  # padding


def test_old_logits_are_compared_only_where_they_existed(watch: Watch) -> None:
    learner = watch.learner = learner_of(Derpp, memory_size=20)
    teach(learner, (0, 1))
    first = torch.from_numpy(learner.memory.extras["logits"])
    watch.replayed.clear()
    teach(learner, (2, 3))
    stored, known = watch.replayed[0]  # nothing of the second task has been seen yet
    assert known.tolist() == [[True, True, False, False]] * len(stored)
    assert near(stored[:, :2], first) and (stored[:, 2:] == 0).all()
    assert any(known.all(1).any() for _, known in watch.replayed[1:])


def test_without_the_mask_logits_of_later_classes_are_held_at_zero(watch: Watch) -> None:
    learner = watch.learner = learner_of(Derpp, memory_size=20, mask_unseen=False)
    teach(learner, (0, 1))
    watch.replayed.clear()
    teach(learner, (2, 3))
    stored, known = watch.replayed[0]
    assert known.shape == (len(stored), 4) and known.all() and (stored[:, 2:] == 0).all()


def test_both_draws_are_made_apart_and_anew_in_each_step(watch: Watch) -> None:
    learner = watch.learner = learner_of(Derpp, memory_size=20, memory_batch_size=4, epochs=2)
    teach(learner, (0, 1))
    watch.drawn.clear()
    teach(learner, (2, 3))
    draws = {frozenset(row.numpy().tobytes() for row in tokens) for tokens in watch.drawn}
    assert len(watch.drawn) == 2 * 2 * 2 and len(draws) == 8  # of 4845 possible ones


def test_loss_is_equation_6() -> None:
    """Two sevenths of the entries did not exist when the logits were stored."""
    rng = np.random.default_rng(0)
    h, ha, za, hb = (rng.normal(size=(n, 7)) for n in (5, 3, 3, 4))
    y, yb = rng.integers(0, 7, 5), rng.integers(0, 7, 4)
    known = np.arange(7) < np.array([[5], [7], [3]])

    def ce(z: np.ndarray, y: np.ndarray) -> float:
        return float((np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean())

    value = equation_6(*(torch.from_numpy(part) for part in (h, y, ha, za, known, hb, yb)), alpha=0.3, beta=0.7)
    assert float(value) == pytest.approx(ce(h, y) + 0.3 * np.square(ha - za)[known].mean() + 0.7 * ce(hb, yb))
    nothing = [torch.from_numpy(part[:0]) for part in (ha, za, known, hb, yb)]
    assert float(equation_6(torch.from_numpy(h), torch.from_numpy(y), *nothing, 0.3, 0.7)) == pytest.approx(ce(h, y))


def test_reservoir_counts_every_pass() -> None:
    learner = teach(learner_of(Derpp, memory_size=10, epochs=3), (0, 1))
    assert learner.memory.seen == 3 * 16 and len(learner.memory) == 10
    x, y = images_of(0, 1)
    label = {image.tobytes(): c for image, c in zip(x, y, strict=True)}
    assert [label[image.tobytes()] for image in learner.memory.images] == learner.memory.labels


def test_works_without_a_memory() -> None:
    learner = teach(learner_of(Derpp, memory_size=0), (0, 1), (2, 3))
    assert len(learner.memory) == 0 and len(learner.predict(images_of(0)[0]).labels) == 8


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Derpp, memory_size=6))
