"""Linear classifiers: how they start, and what stays when they grow."""

from __future__ import annotations

import pytest
import torch

from morecl.nn.heads import GrowingHead, task_head


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grown(dim: int, classes: int) -> GrowingHead:
    head = GrowingHead(dim)
    head.grow(classes, draw())
    return head


@pytest.mark.parametrize(
    "make", [lambda: task_head(200, 100, draw()), lambda: grown(200, 100)], ids=["task", "growing"]
)
def test_weights_start_small_and_biases_at_zero(make: object) -> None:
    """20,000 weights: their standard deviation is known to half a percent."""
    head = make()  # type: ignore[operator]
    weight = head.weight.detach()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02) and abs(float(weight.mean())) < 0.001
    assert not head.bias.any()


def test_known_classes_keep_their_weights() -> None:
    head = grown(6, 3)
    with torch.no_grad():
        head.bias += torch.arange(3)
    x = torch.randn(5, 6, generator=draw(1))
    before = head(x).detach()
    head.grow(2, draw(2))
    expected = torch.cat([before, x @ head.weight[3:].T], 1)  # the new biases are zero
    torch.testing.assert_close(head(x), expected)
    assert head.weight.is_leaf and head.weight.requires_grad and head.bias.is_leaf and head.bias.requires_grad
