"""Heads in a stack compute and learn what each of them would alone."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from morecl.methods.stacked_heads import StackedHeads
from morecl.nn.heads import task_head

DIM = 5
CLASSES = [2, 3, 1]
TASKS = [0, 2, 1]
X = torch.randn(len(TASKS), 4, DIM, generator=torch.Generator().manual_seed(1))
COLUMNS = torch.tensor([1, 3, 5, 0])


def make_heads() -> list[torch.nn.Linear]:
    init = torch.Generator().manual_seed(0)
    heads = [task_head(DIM, classes + 1, init) for classes in CLASSES]
    for k, head in enumerate(heads):
        head.bias.data += 0.1 * (k + 1)
    return heads


def test_targets_are_the_own_classes_and_ood_for_all_others() -> None:
    stack = StackedHeads(make_heads(), TASKS)
    assert stack.ood.tolist() == [[2], [1], [3]]
    assert stack.targets(COLUMNS).tolist() == [[1, 2, 2, 0], [1, 1, 0, 1], [3, 1, 3, 3]]
    assert StackedHeads(make_heads(), range(1)).targets(COLUMNS).tolist() == [[1, 2, 2, 0]]


def test_errors_are_those_of_each_head() -> None:
    heads = make_heads()
    stack = StackedHeads(heads, TASKS)
    y = stack.targets(COLUMNS)
    found = stack.errors(X, y)
    for j, k in enumerate(TASKS):
        torch.testing.assert_close(found[j], F.cross_entropy(heads[k](X[j]), y[j], reduction="none"))


def test_a_step_moves_each_head_as_alone_and_only_when_written_back() -> None:
    heads, alone = make_heads(), make_heads()
    stack = StackedHeads(heads, TASKS[:2])
    y = stack.targets(COLUMNS)
    stack.errors(X[:2], y).sum().backward()
    assert stack.weight.grad is not None and stack.bias.grad is not None
    assert not stack.weight.grad[1, 2:].any() and not stack.bias.grad[1, 2:].any()  # what the narrower head lacks
    with torch.no_grad():
        stack.weight -= stack.weight.grad
        stack.bias -= stack.bias.grad
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(heads, alone, strict=True))
    stack.write_back()
    for j, k in enumerate(TASKS[:2]):
        F.cross_entropy(alone[k](X[j]), y[j], reduction="sum").backward()
        for now, then in zip(heads[k].parameters(), alone[k].parameters(), strict=True):
            assert then.grad is not None
            torch.testing.assert_close(now, then - then.grad)
    assert torch.equal(heads[1].weight, alone[1].weight)  # not one of the tasks


def test_one_head_is_copied_too() -> None:
    heads = make_heads()
    stack = StackedHeads(heads, [1])
    with torch.no_grad():
        stack.weight += 1
    assert torch.equal(heads[1].weight, make_heads()[1].weight)
