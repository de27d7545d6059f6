from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from morecl.methods import agem
from morecl.methods.agem import Agem, project


def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))


def gradients(*values: list[float]) -> list[Tensor]:
    return [torch.tensor(v) for v in values]


def test_a_gradient_against_the_reference_is_projected() -> None:
    g, reference = gradients([1.0, 2.0], [-3.0]), gradients([1.0, 0.0], [2.0])  # product -5, length 5
    project(g, reference)
    assert torch.equal(g[0], torch.tensor([2.0, 2.0]))
    assert torch.equal(g[1], torch.tensor([-1.0]))
    assert product(g, reference) == 0


def test_a_gradient_that_does_no_harm_is_untouched() -> None:
    g, reference = gradients([1.0, 2.0], [3.0]), gradients([1.0, 0.1], [-0.3])
    project(g, reference)
    assert torch.equal(g[0], torch.tensor([1.0, 2.0]))
    assert torch.equal(g[1], torch.tensor([3.0]))


def test_a_reference_of_zero_leaves_the_gradient() -> None:
    g = gradients([1.0, 2.0])
    project(g, gradients([0.0, 0.0]))
    assert torch.equal(g[0], torch.tensor([1.0, 2.0]))


def learner(**changes: object) -> Agem:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Agem.Config.model_fields}
    return Agem(Agem.Config.parse(settings | {"epochs": 2} | changes))


def test_no_step_after_the_first_task_points_against_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    assert sorted(one.memory.columns.tolist()) == [0] * 6 + [1] * 6  # 12 images, 2 classes
    wanted: list[float] = []
    states: list[list[Tensor]] = []
    references: list[Sequence[Tensor]] = []

    def spy(g: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
        wanted.append(product(g, reference))
        project(g, reference)
        references.append(reference)
        states.append([p.detach().clone() for p in one.model.parameters()])

    monkeypatch.setattr(agem, "project", spy)
    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    states.append([p.detach().clone() for p in one.model.parameters()])
    assert len(wanted) == 4  # 2 epochs of 16 images in batches of 8
    assert min(wanted) < 0, "no step had to be projected: the test shows nothing"
    for before, after, reference in zip(states, states[1:], references, strict=False):
        moved = [a - b for a, b in zip(before, after, strict=True)]  # against the gradient, momentum included
        assert product(moved, moved) > 0
        assert product(moved, reference) > -1e-3 * (product(moved, moved) * product(reference, reference)) ** 0.5


def test_the_reference_is_the_gradient_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner(memory_batch_size=12)  # all of it
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    images, columns = one.memory.images, torch.from_numpy(one.memory.columns)
    found: list[Sequence[Tensor]] = []
    expected: list[Sequence[Tensor]] = []

    def spy(g: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
        logits = one.head(one._features(one.prepare(images).range(0, 12)))
        loss = torch.nn.functional.cross_entropy(logits, columns)
        expected.append(torch.autograd.grad(loss, list(one.model.parameters())))
        found.append(reference)

    monkeypatch.setattr(agem, "project", spy)
    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    for one_found, one_expected in zip(found, expected, strict=True):
        for a, b in zip(one_found, one_expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("asked", "drawn"), [(5, 5), (100, 12)])
def test_the_reference_is_that_of_as_many_images_as_asked_for(
    asked: int, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of all 12 in memory, each once."""
    one = learner(memory_batch_size=asked)
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    sizes: list[int] = []
    original = agem.paired_batches

    def spy(*args: Any) -> Any:
        pairs = original(*args)
        sizes.extend(len(other) for _, other in pairs)
        assert all(len(other.unique()) == 12 for _, other in pairs if asked > 12)
        return pairs

    monkeypatch.setattr(agem, "paired_batches", spy)
    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    assert sizes and {*sizes} == {drawn}


def test_a_veto_that_is_never_used_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is looked at is the one that is taken: without a projection, momentum SGD as with no memory."""
    monkeypatch.setattr(agem, "project", lambda g, reference: None)
    learners = [learner(lr=0.05), learner(lr=0.05, memory_size=0)]
    for one in learners:
        one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
        one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    for p, q in zip(*(one.model.parameters() for one in learners), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_the_first_task_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agem, "project", lambda g, reference: pytest.fail("there is nothing to protect yet"))
    learner().learn_task(*tiny.task([0, 1], ["a", "b"], 8))


def test_the_published_form_projects_the_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without momentum both forms are the same; with it, only what is projected tells them apart."""
    seen: list[list[Tensor]] = []

    def spy(g: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
        seen.append([part.clone() for part in g])
        project(g, reference)

    monkeypatch.setattr(agem, "project", spy)
    tasks = [tiny.task([0, 1], ["a", "b"], 8), tiny.task([2, 3], ["c", "d"], 8)]

    def taught(**changes: object) -> tuple[Agem, list[list[Tensor]]]:
        seen.clear()
        one = learner(**changes)
        for task in tasks:
            one.learn_task(*task)
        return one, list(seen)

    (whole, steps), (published, alone) = taught(), taught(project="gradient")
    for a, b in zip(steps[0], alone[0], strict=True):  # nothing in the momentum yet
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    length = [float(torch.stack([part.norm() for part in second]).norm()) for second in (steps[1], alone[1])]
    assert length[0] > 1.2 * length[1]
    assert any(
        not torch.equal(p, q) for p, q in zip(whole.model.parameters(), published.model.parameters(), strict=True)
    )
    without = [taught(momentum=0.0, project=form)[0] for form in ("step", "gradient")]
    for p, q in zip(*(one.model.parameters() for one in without), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
