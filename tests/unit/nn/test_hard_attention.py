"""Masks as vectors: rounding, splitting, and what the mask of a finished task protects."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from morecl.nn import hard_attention as hat

EMBEDDINGS = arrays(np.float32, (4, 6), elements=st.floats(-6, 6, width=32))


def masks(width: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, width, elements=st.sampled_from([0.0, 1.0]))


@given(EMBEDDINGS)
def test_rounded_is_the_limit_of_attention(e: np.ndarray) -> None:
    embedding = torch.from_numpy(e)
    mask = hat.rounded(embedding)
    assert set(mask.flatten().tolist()) <= {0.0, 1.0}
    clear = embedding.abs() > 0.1
    hard = hat.attention(embedding, torch.tensor(500.0), 500.0)
    assert torch.equal(hard.round()[clear], mask[clear])
    assert torch.allclose(hard[clear], mask[clear], atol=1e-6)


def test_zero_is_closed() -> None:
    assert hat.rounded(torch.tensor([-1e-30, 0.0, 1e-30])).tolist() == [0, 0, 1]


@given(st.lists(EMBEDDINGS, min_size=1, max_size=4))
def test_accumulated_only_grows(embeddings: list[np.ndarray]) -> None:
    finished = [hat.rounded(torch.from_numpy(e)) for e in embeddings]
    before = torch.zeros(4, 6)
    for k in range(1, len(finished) + 1):
        now = hat.accumulated(finished[:k], before)
        assert (now >= before).all() and (now >= finished[k - 1]).all()
        assert torch.equal(now, torch.maximum(before, finished[k - 1]))
        before = now


def test_split_gives_m1_and_m2_of_each_adapter() -> None:
    m1, m2 = hat.split(torch.arange(21).view(3, 7), bottleneck=2)
    assert m1.tolist() == [[0, 1], [7, 8], [14, 15]]
    assert m2[0].tolist() == [2, 3, 4, 5, 6]


@given(masks(3), masks(4))
def test_what_a_task_uses_is_protected(m1: np.ndarray, m2: np.ndarray) -> None:
    """An adapter under masks m1, m2: if its output depends on a weight, updates of that weight are blocked."""
    generator = torch.Generator().manual_seed(0)
    w1, b1, w2, b2 = (torch.rand(s, generator=generator).requires_grad_() for s in ((3, 4), (3,), (4, 3), (4,)))
    hidden = torch.relu(torch.from_numpy(m1) * (torch.ones(4) @ w1.T + b1))
    output = torch.from_numpy(m2) * (hidden @ w2.T + b2)
    output.sum().backward()
    guards = hat.protection(torch.from_numpy(m1)[None], torch.from_numpy(m2)[None])
    for parameter, guard in zip((w1, b1, w2, b2), guards, strict=True):
        assert parameter.grad is not None
        gate = guard[0].expand_as(parameter)
        assert (gate[parameter.grad != 0] == 0).all()
        if parameter is w2 or parameter is b2:  # and nowhere else
            assert (gate[parameter.grad == 0] == 1).all()
