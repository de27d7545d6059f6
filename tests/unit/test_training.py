"""The only epoch loop, its batches, and the optimiser with protected weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from morecl import training
from morecl.errors import DivergedError
from morecl.progress import EpochDone, silent
from morecl.training import (
    Batch,
    ProtectedSGD,
    equal_batches,
    fit,
    paired_batches,
    repeated_shuffles,
    row_batches,
    shuffled_batches,
)


def parameter(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_without_gates_it_is_torchs_sgd() -> None:
    ours, theirs = parameter(1.0, -2.0, 3.0), parameter(1.0, -2.0, 3.0)
    one, other = ProtectedSGD([ours], 0.1, 0.9), torch.optim.SGD([theirs], 0.1, 0.9)
    for step in range(6):
        for p in (ours, theirs):
            p.grad = torch.sin(p.detach() + step)
        one.step(), other.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gates", [None, [torch.ones(3)]], ids=["no gate", "open gate"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.9, 0.05), (0.5, 0.01)])
def test_nesterov_and_weight_decay_are_torchs(
    momentum: float, weight_decay: float, gates: list[torch.Tensor] | None
) -> None:
    ours, theirs = parameter(1.0, -2.0, 3.0), parameter(1.0, -2.0, 3.0)
    one = ProtectedSGD([ours], 0.1, momentum, gates, weight_decay=weight_decay, nesterov=True)
    other = torch.optim.SGD([theirs], 0.1, momentum, weight_decay=weight_decay, nesterov=True)
    for step in range(6):
        for p in (ours, theirs):
            p.grad = torch.sin(p.detach() + step)
        one.step(), other.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_closed_gate_holds_against_weight_decay(nesterov: bool) -> None:
    p, free = parameter(1.0, 2.0, 0.3), parameter(1.0)
    before = p.detach().clone()
    gates = [torch.tensor([0.0, 1.0, 0.0])]
    optimizer = ProtectedSGD([p, free], 0.1, 0.9, gates, weight_decay=0.5, nesterov=nesterov)
    for _ in range(3):
        p.grad, free.grad = torch.zeros(3), torch.zeros(1)
        optimizer.step()
    assert torch.equal(p.detach()[[0, 2]], before[[0, 2]])
    assert p.detach()[1] < 0.9 * before[1] and free.detach() < 0.9


def test_a_closed_gate_holds_against_momentum() -> None:
    """Momentum first built up with an open gate's gradients; masking gradients alone would go on moving."""
    p, free = parameter(1.0, 2.0, 0.3), parameter(1.0)
    before = p.detach().clone()
    optimizer = ProtectedSGD([p, free], lr=0.1, momentum=0.9, gates=[torch.tensor([0.0, 1.0, 0.0])])
    free.grad = torch.ones(1)
    for _ in range(3):
        p.grad = torch.full((3,), 7.0)
        optimizer.step()
    for _ in range(3):  # gradients are gone, momentum is not
        p.grad = torch.zeros(3)
        optimizer.step()
    assert torch.equal(p.detach()[[0, 2]], before[[0, 2]])
    assert p.detach()[1] < before[1] - 0.1 * 7 * 5


def test_gates_are_broadcast_and_every_parameter_may_have_one() -> None:
    p = torch.ones(2, 3, requires_grad=True)
    optimizer = ProtectedSGD([p], lr=1.0, momentum=0.0, gates=[torch.tensor([[0.0], [1.0]])])
    p.grad = torch.ones(2, 3)
    optimizer.step()
    assert p.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_a_parameter_without_gradient_is_an_error() -> None:
    p, q = parameter(1.0), parameter(1.0)
    optimizer = ProtectedSGD([p, q], 0.1, 0.9)
    p.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step()


def run(loss: Any, epochs: int = 2, **hooks: Any) -> tuple[torch.Tensor, list[EpochDone]]:
    p, events = parameter(2.0), []

    def batches(epoch: int) -> Iterator[Batch]:
        return ((torch.tensor(float(x)),) for x in (epoch, epoch + 1))

    fit(
        lambda x: loss(p, x),
        batches,
        ProtectedSGD([p], lr=0.1, momentum=0.0),
        epochs=epochs,
        task=4,
        images=10,
        listener=hooks.pop("listener", events.append),
        **hooks,
    )
    return p.detach(), events


def test_fit_minimises_and_reports() -> None:
    p, events = run(lambda p, x: (p * x).sum())
    assert float(p) == pytest.approx(2.0 - 0.1 * (0 + 1) - 0.1 * (1 + 2))
    assert [(e.task, e.epoch, e.epochs) for e in events] == [(4, 1, 2), (4, 2, 2)]
    # epoch 1: p = 2 at x = 0 and at x = 1; epoch 2: p = 1.9 at x = 1, 1.8 at x = 2
    assert [e.loss for e in events] == pytest.approx([(0 + 2.0) / 2, (1.9 + 3.6) / 2])
    assert all(e.images_per_second is not None and e.images_per_second > 0 for e in events)


def fit_once(p: torch.Tensor, **hooks: Any) -> None:
    """One step of one batch, x = 3."""
    fit(
        lambda x: (p * x).sum(),
        lambda epoch: iter([(torch.tensor(3.0),)]),
        ProtectedSGD([p], lr=0.1, momentum=0.0),
        epochs=1,
        task=0,
        images=1,
        listener=silent,
        **hooks,
    )


def test_hooks_come_between_backward_and_step_and_after_it() -> None:
    calls: list[str] = []
    p = parameter(1.0)

    def after_backward(x: torch.Tensor) -> None:
        assert p.grad is not None and float(p.grad) == 3.0
        p.grad.zero_()
        calls.append("backward")

    fit_once(p, after_backward=after_backward, after_step=lambda: calls.append("step"))
    assert calls == ["backward", "step"]
    assert float(p.detach()) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_at_the_end_of_its_epoch(value: float) -> None:
    events: list[EpochDone] = []
    with pytest.raises(DivergedError, match=r"task 5 is (nan|inf) in epoch 2 of 3.*lr"):
        run(lambda p, x: (p * (value if x == 2 else x)).sum(), epochs=3, listener=events.append)
    assert len(events) == 1


def test_a_loss_that_explodes_stops_although_it_is_finite() -> None:
    """Such a network knows nothing, but would be saved and scored as if it did."""
    events: list[EpochDone] = []

    def growing(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (p * 0).sum() + 2.0 * 100.0 ** len(events)  # 2, 200, 20,000: the third epoch's

    with pytest.raises(DivergedError, match=r"loss of task 5 grew from 2 to 2e\+04 in epoch 3 of 4; lower .*lr"):
        run(growing, epochs=4, listener=events.append)
    assert [event.loss for event in events] == [2.0, 200.0]
    run(lambda p, x: (p * 0).sum() + 5000.0 * (1 + len(events)), epochs=2)  # large from the beginning
    run(lambda p, x: (p * 0).sum() + 900.0 * (len(events) > 0), epochs=2, listener=events.append)  # from 0


@pytest.mark.parametrize("factor", [float("nan"), 1e9])
def test_a_stage_that_diverges_is_named(factor: float) -> None:
    """Its rate is a setting of its own, such as back_update_lr."""
    with pytest.raises(DivergedError, match=r"in epoch \d of 2 of the stage 'back-update'; lower its learning rate$"):
        run(lambda p, x: (p * 0).sum() + (factor if x == 2 else 1.0), epochs=2, stage="back-update")


def test_a_last_step_that_blows_up_is_no_result() -> None:
    """The loss of an epoch is that of the weights before each step; what the last one made of them counts, too."""
    with pytest.raises(DivergedError, match="task 5 left numbers that are not finite"):
        run(lambda p, x: (p - p.detach()).sqrt().sum() if x == 2 else (p * x).sum(), epochs=2)  # 0, of infinite slope


def test_no_gradients_are_left_behind() -> None:
    p = parameter(1.0)
    fit_once(p)
    assert p.grad is None


def test_only_shapes_that_come_twice_in_a_row_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy alone, with a recorder in place of the CUDA graph: which batches run singly, which are replayed."""
    ran: list[str] = []

    class Recorder:
        def __init__(self, step: Any, batch: Batch, changed: Any):
            self.shapes, self.step = [part.shape for part in batch], step
            ran.append(f"capture {len(batch[0])}")

        def __call__(self, batch: Batch) -> torch.Tensor:
            assert [part.shape for part in batch] == self.shapes
            ran.append(f"replay {len(batch[0])}")
            return self.step(batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(training, "CapturedStep", Recorder)
    p = parameter(0.0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        ran.append(f"step {len(x)}")
        return (p * x).sum()

    def batches(epoch: int) -> Iterator[Batch]:
        yield from ((torch.ones(n),) for n in (4, 4, 4, 1))

    optimizer = ProtectedSGD([p], lr=1.0, momentum=0.0)
    fit(loss, batches, optimizer, epochs=2, task=0, images=13, listener=silent, capture=True)
    first = ["step 4", "capture 4", "replay 4", "step 4", "replay 4", "step 4", "step 1"]
    assert ran == [*first, *["replay 4", "step 4"] * 3, "step 1"]
    assert float(p.detach()) == -26.0  # every batch was run once


@pytest.mark.parametrize("replayed", [0, 5])
def test_paired_batches_cover_all_once_and_replay_in_turn(replayed: int) -> None:
    pairs = paired_batches(10, 4, replayed, 3, torch.Generator().manual_seed(1), torch.device("cpu"))
    assert [len(own) for own, _ in pairs] == [4, 4, 2]
    assert sorted(torch.cat([own for own, _ in pairs]).tolist()) == list(range(10))
    drawn = torch.cat([other for _, other in pairs]).tolist()
    assert sorted(drawn[:5]) == list(range(replayed)) and len(drawn) == (9 if replayed else 0)


def test_every_kind_of_batches_comes_in_an_order_of_chance() -> None:
    """Images of a task come class by class as a rule; what is trained on a batch of one class is soon forgotten."""
    cpu, numbers = torch.device("cpu"), torch.arange(30)

    def orders(seed: int) -> list[list[int]]:
        draws = [torch.Generator().manual_seed(seed) for _ in range(5)]
        rows = list(row_batches(numbers, [10 * numbers], 4, draws[0]))
        assert all(torch.equal(row, 10 * own) for own, row in rows)
        equal, pairs = equal_batches(30, 4, draws[1], cpu, fill=False), paired_batches(30, 4, 30, 4, draws[2], cpu)
        kinds = [[own for own, _ in rows], [own for own, _ in equal], [own for own, _ in pairs]]
        kinds += [[other for _, other in pairs], shuffled_batches(30, 4, draws[3])]
        return [torch.cat(parts).tolist()[:30] for parts in kinds] + [repeated_shuffles(30, 30, draws[4]).tolist()]

    for one, other in zip(orders(0), orders(1), strict=True):
        assert sorted(one) == sorted(other) == list(range(30))
        assert one != other and list(range(30)) not in (one, other)


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 100))
def test_shuffled_batches_cover_all_once(count: int, size: int, seed: int) -> None:
    parts = shuffled_batches(count, size, torch.Generator().manual_seed(seed))
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size


@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 100))
def test_repeated_shuffles_use_up_all_before_repeating(count: int, length: int, seed: int) -> None:
    drawn = repeated_shuffles(count, length, torch.Generator().manual_seed(seed))
    assert len(drawn) == length
    for start in range(0, length, count):
        part = drawn[start : start + count].tolist()
        assert len(set(part)) == len(part) and set(part) <= set(range(count))
