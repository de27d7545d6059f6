"""Every draw has its own generator, made from the seed and its name."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from morecl.random import generator

SEEDS = st.integers(0, 2**63 - 1)
NAMES = st.lists(st.one_of(st.text(max_size=8), st.integers(0, 2**31)), min_size=1, max_size=3)


def draw(seed: int, *name: str | int) -> list[float]:
    return torch.rand(4, generator=generator(seed, *name), dtype=torch.float64).tolist()


@settings(max_examples=20)
@given(SEEDS, NAMES)
def test_same_name_same_draw_whatever_was_drawn_before(seed: int, name: list[str | int]) -> None:
    first = draw(seed, *name)
    draw(seed, "something else", 1)
    torch.rand(3)
    assert draw(seed, *name) == first


def test_names_and_seeds_do_not_share_draws() -> None:
    names: list[tuple[str | int, ...]] = [("epoch", k, e) for k in range(4) for e in range(4)]
    names += [("task", k) for k in range(4)] + [("memory", k) for k in range(4)] + [("epoch",), ("epoch", 0)]
    draws = [tuple(draw(seed, *name)) for seed in (0, 1, 2**40) for name in names]
    assert len(set(draws)) == len(draws)


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draw(0, "x")
    assert torch.equal(before, torch.get_rng_state())


def test_draws_are_pinned() -> None:
    """A change here changes every result there is."""
    assert torch.randperm(6, generator=generator(0, "epoch", 1, 2)).tolist() == [2, 3, 4, 5, 1, 0]
    assert torch.randperm(6, generator=generator(1, "task", 1)).tolist() == [2, 5, 1, 3, 0, 4]
