from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny
from morecl.methods.owm import Owm, Projector, information
from morecl.random import generator


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def test_projector_is_the_regularised_inverse() -> None:
    first, second = random(3, 6), random(2, 6, seed=1)
    projector = Projector(1, 6)
    projector.store(information(first[None], torch.tensor([0.5])))
    projector.store(information(second[None], torch.tensor([0.1])))
    X, Y = with_one(first), with_one(second)
    expected = torch.linalg.inv(torch.eye(7, dtype=X.dtype) + X.mT @ X / 0.5 + Y.mT @ Y / 0.1)
    assert torch.allclose(projector.P[0], expected, atol=1e-12)


def test_inputs_stored_together_are_rank_one_steps_in_turn() -> None:
    inputs = random(4, 5)
    together = Projector(1, 5)
    together.store(information(inputs[None], torch.tensor([0.2])))
    P = torch.eye(6, dtype=inputs.dtype)
    for x in with_one(inputs):  # k = P x / (alpha + x P x); P <- P - k x P
        k = P @ x / (0.2 + x @ P @ x)
        P = P - torch.outer(k, x @ P)
    assert torch.allclose(together.P[0], P, atol=1e-12)


def step_changes(projector: Projector | None, stored: Tensor, fresh: Tensor) -> tuple[float, float]:
    """How much one gradient step on ``fresh`` inputs changes a layer's outputs on stored and on fresh inputs."""
    layer = nn.Linear(8, 3).double()
    old, new = layer(stored).detach(), layer(fresh).detach()
    layer(fresh).square().sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    if projector:
        projector.project(layer.weight.grad[None], layer.bias.grad[None])
    with torch.no_grad():
        for p in layer.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
        return float((layer(stored) - old).norm()), float((layer(fresh) - new).norm())


def test_a_step_keeps_the_outputs_on_stored_inputs() -> None:
    stored, fresh = random(4, 8), random(4, 8, seed=1)
    projector = Projector(1, 8)
    projector.store(information(stored[None], torch.tensor([1e-6])))
    torch.manual_seed(0)
    free, _ = step_changes(None, stored, fresh)
    kept, learned = step_changes(projector, stored, fresh)
    assert kept < 1e-4 * free
    assert learned > 0.1  # five directions are left to learn in


def test_gradients_are_multiplied_by_the_projector() -> None:
    projector = Projector(1, 8)
    projector.store(information(random(1, 4, 8), torch.tensor([0.3])))
    weight, bias = random(1, 3, 8, seed=1), random(1, 3, seed=2)
    expected = torch.cat([weight[0], bias[0, :, None]], 1) @ projector.P[0]
    projector.project(weight, bias)
    assert torch.allclose(weight[0], expected[:, :-1]) and torch.allclose(bias[0], expected[:, -1])


def learner(**changes: object) -> Owm:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Owm.Config.model_fields}
    return Owm(Owm.Config.parse(settings | {"epochs": 2, "batch_size": 64} | changes))


def test_the_second_task_keeps_what_layers_said_of_the_first() -> None:
    one = learner(alpha=1e-6, alpha_decay=1.0, lr=0.1, epochs=4, bottleneck=16)
    images, labels = tiny.task([0, 1], ["a", "b"], 8)
    one.learn_task(images, labels)
    tokens = one.prepare(images)
    mean = one.embed(tokens, "").mean(0)  # the only input of the head that was stored: 16 images, one batch
    inputs = one._mean_inputs(tokens.range(0, 16))
    layers = {"fc1": (one.adapters.w1, one.adapters.b1), "fc2": (one.adapters.w2, one.adapters.b2)}
    weight, bias = one.head.weight.detach().clone(), one.head.bias.detach().clone()
    before = {name: [p.detach().clone() for p in layer] for name, layer in layers.items()}
    norms = [p.detach().clone() for p in one.norms.parameters()]

    one.learn_task(*tiny.task([2, 3], ["c", "d"], 8))
    assert all(torch.equal(a, b) for a, b in zip(norms, one.norms.parameters(), strict=True))
    moved, shift = one.head.weight.detach()[:2] - weight, one.head.bias.detach()[:2] - bias
    assert moved.norm() > 1e-2  # it did learn
    assert (moved @ mean + shift).abs().max() < 1e-3 * moved.norm() * mean.norm()
    for name, layer in layers.items():
        for place in (0, 2 * tiny.DEPTH - 1):
            moved, shift = (p.detach()[place] - then[place] for p, then in zip(layer, before[name], strict=True))
            position = inputs[name][place][0, 0]  # of the class token
            assert moved.norm() > 1e-5
            assert (moved @ position + shift).abs().max() < 1e-2 * moved.norm() * position.norm(), (name, place)


def test_the_first_task_is_learned_freely() -> None:
    one = learner()
    norms = [p.detach().clone() for p in one.norms.parameters()]
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    assert any(not torch.equal(a, b) for a, b in zip(norms, one.norms.parameters(), strict=True))
    assert {name: tuple(p.P.shape) for name, p in one.projectors.items()} == {
        "fc1": (2 * tiny.DEPTH, tiny.DIM + 1, tiny.DIM + 1),
        "fc2": (2 * tiny.DEPTH, 5, 5),
        "head": (1, tiny.DIM + 1, tiny.DIM + 1),
    }
    assert all((p.P.diagonal(dim1=1, dim2=2) < 1).any(1).all() for p in one.projectors.values())
    assert len(one.memory) == 0


def test_mean_inputs_are_those_the_layers_see() -> None:
    """A layer's projector works only if what is stored is what the layer multiplies with."""
    one = learner(bottleneck=16)  # more directions than tokens
    one.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    with torch.no_grad():
        one.adapters.w2.copy_(random(*one.adapters.w2.shape) / 2)  # so that every layer has a say
    x = one.prepare(tiny.task([0, 1], ["a", "b"], 1)[0]).range(0, 1)  # one image: its inputs are the means
    means = one._mean_inputs(x)
    before = one._features(x).detach()
    assert torch.allclose(means["head"][0][0], before, atol=1e-6)
    for name, weight in (("fc1", one.adapters.w1), ("fc2", one.adapters.w2)):
        for place in (0, 3, 2 * tiny.DEPTH - 1):
            # a change of the weight at right angles to all of the layer's inputs changes nothing
            X = means[name][place][0].double()  # (L, in); behind the last attention the class token alone
            assert len(X) == (1 if place >= 2 * tiny.DEPTH - 2 else 5)
            change = random(weight.shape[1], weight.shape[2], seed=place)
            free = change - change @ torch.linalg.pinv(X) @ X
            for delta, same in ((free, True), (change, False)):
                with torch.no_grad():
                    weight[place] += delta.float()
                    close = torch.allclose(one._features(x), before, atol=1e-3)
                    weight[place] -= delta.float()
                assert close == same, (name, place)


def test_batches_that_go_through_the_network_together_are_stored_each_with_its_own_mean() -> None:
    one = learner(batch_size=3, alpha=0.7, alpha_decay=0.2, eval_batch_size=6)
    expected = torch.eye(tiny.DIM + 1, dtype=torch.float64)
    for k in range(2):  # what the first task stored stays
        images, labels = tiny.task([2 * k, 2 * k + 1], [2 * k, 2 * k + 1], 4)
        one.learn_task(images, labels)  # 8 images: two batches at once, then one of two images
        features, draw = one.embed(one.prepare(images), "").double(), generator(one.config.seed, "owm", k)
        for b, index in enumerate(torch.randperm(8, generator=draw).split(3)):
            x = with_one(features[index].mean(0)[None])
            expected += x.mT @ x / (0.7 * 0.2 ** (b / 3))
        assert torch.allclose(one.projectors["head"].P[0], torch.linalg.inv(expected), atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_projectors_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    """A batched solve with several threads failed on an AMD EPYC (torch 2.11)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        projector = Projector(4, 64)
        X = torch.randn(4, 100, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        projector.store(X.mT @ X)
    finally:
        torch.set_num_threads(before)
    expected = torch.stack([torch.linalg.inv(torch.eye(65, dtype=X.dtype) + x.mT @ x) for x in X])
    assert torch.allclose(projector.P, expected, atol=1e-10)
