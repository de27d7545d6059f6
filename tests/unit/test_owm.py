from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

import tiny
from morecl.methods.owm import Owm, Projector
from morecl.nn.adapter import Adapter


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def test_projector_is_the_regularised_inverse() -> None:
    first, second = random(3, 6), random(2, 6, seed=1)
    projector = Projector(6)
    projector.store(first, alpha=0.5)
    projector.store(second, alpha=0.1)
    X, Y = with_one(first), with_one(second)
    expected = torch.linalg.inv(torch.eye(7, dtype=X.dtype) + X.mT @ X / 0.5 + Y.mT @ Y / 0.1)
    assert torch.allclose(projector.P, expected, atol=1e-12)


def test_inputs_stored_together_are_rank_one_steps_in_turn() -> None:
    inputs = random(4, 5)
    together, alone = Projector(5), Projector(5)
    together.store(inputs, alpha=0.2)
    P = alone.P
    for x in with_one(inputs):  # k = P x / (alpha + x P x); P <- P - k x P
        k = P @ x / (0.2 + x @ P @ x)
        P = P - torch.outer(k, x @ P)
    assert torch.allclose(together.P, P, atol=1e-12)


def step_changes(projector: Projector | None, stored: Tensor, fresh: Tensor) -> tuple[float, float]:
    """How much one gradient step on ``fresh`` inputs changes a layer's outputs on stored and on fresh inputs."""
    layer = nn.Linear(8, 3).double()
    old, new = layer(stored).detach(), layer(fresh).detach()
    layer(fresh).square().sum().backward()
    if projector:
        projector.project(layer)
    with torch.no_grad():
        for p in layer.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
        return float((layer(stored) - old).norm()), float((layer(fresh) - new).norm())


def test_a_step_keeps_the_outputs_on_stored_inputs() -> None:
    stored, fresh = random(4, 8), random(4, 8, seed=1)
    projector = Projector(8)
    projector.store(stored, alpha=1e-6)
    torch.manual_seed(0)
    free, _ = step_changes(None, stored, fresh)
    kept, learned = step_changes(projector, stored, fresh)
    assert kept < 1e-4 * free
    assert learned > 0.1  # five directions are left to learn in


def learner(**changes: object) -> Owm:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Owm.Config.model_fields}
    return Owm(Owm.Config.parse(settings | {"epochs": 2, "batch_size": 64} | changes))


def test_the_second_task_keeps_what_layers_said_of_the_first() -> None:
    one = learner(alpha=1e-6, alpha_decay=1.0, lr=0.1, epochs=4)
    images, labels = tiny.task([0, 1], ["a", "b"], 8)
    one.learn_task(images, labels)
    tokens = one.prepare(images)
    mean = one.embed(tokens, "").mean(0)  # the only input of the head that was stored: 16 images, one batch
    block, adapter = one.network.vit.blocks[0], cast(Adapter, one.network.adapters[0])
    with torch.no_grad():  # the first adapter's input does not depend on any adapter
        norm = one.norms.of("blocks.0")
        h = block.attn(
            nn.functional.layer_norm(tokens.range(0, 16), (192,), norm["norm1.weight"], norm["norm1.bias"], 1e-6)
        )
    position = h.mean(0)[1]
    weight, bias = one.head.weight.detach().clone(), one.head.bias.detach().clone()
    fc1 = [p.detach().clone() for p in adapter.fc1.parameters()]
    norms = [p.detach().clone() for p in one.norms.parameters()]

    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    assert all(torch.equal(a, b) for a, b in zip(norms, one.norms.parameters(), strict=True))
    moved, shift = one.head.weight.detach()[:2] - weight, one.head.bias.detach()[:2] - bias
    assert moved.norm() > 1e-2  # it did learn
    assert (moved @ mean + shift).abs().max() < 1e-3 * moved.norm() * mean.norm()
    moved, shift = adapter.fc1.weight.detach() - fc1[0], adapter.fc1.bias.detach() - fc1[1]
    assert moved.norm() > 1e-4
    assert (moved @ position + shift).abs().max() < 1e-3 * moved.norm() * position.norm()


def test_the_first_task_is_learned_freely() -> None:
    one = learner()
    norms = [p.detach().clone() for p in one.norms.parameters()]
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    assert any(not torch.equal(a, b) for a, b in zip(norms, one.norms.parameters(), strict=True))
    assert len(one.projectors) == 2 * len(one.network.adapters) + 1
    assert all(not torch.equal(p.P, torch.eye(len(p.P), dtype=p.P.dtype)) for p in one.projectors)
    assert len(one.memory) == 0
