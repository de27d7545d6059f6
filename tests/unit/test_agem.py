from __future__ import annotations

from collections.abc import Sequence

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


def learner() -> Agem:
    return Agem(
        Agem.Config.parse({k: v for k, v in tiny.SETTINGS.items() if k in Agem.Config.model_fields} | {"epochs": 2})
    )


def test_every_step_after_the_first_task_agrees_with_a_batch_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[float] = []
    after: list[float] = []
    references: list[Sequence[Tensor]] = []

    def spy(g: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
        before.append(product(g, reference))
        project(g, reference)
        length = product(reference, reference)
        after.append(product(g, reference) / length)
        references.append(reference)

    monkeypatch.setattr(agem, "project", spy)
    one = learner()
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    assert not before  # nothing to protect yet
    assert sorted(one.memory.columns.tolist()) == [0] * 6 + [1] * 6  # 12 images, 2 classes
    parameters = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    assert len(before) == 4  # 2 epochs of 16 images in batches of 8
    assert min(before) < 0, "no step had to be projected: the test shows nothing"
    assert min(after) > -1e-5
    assert any(not torch.equal(p, parameters[name]) for name, p in one.model.named_parameters() if name in parameters)
    assert all(float(r[0].abs().sum()) > 0 for r in references[1:])
