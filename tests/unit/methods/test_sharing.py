"""Images that want different networks: every one is computed once, with its own network."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from morecl.methods import sharing
from morecl.methods.sharing import Shared

COUNTS = [[1], [5, 1, 2], [1] * 9, [3, 0, 3, 3], [31, 1, 17], [0, 0, 4], [2, 64, 65]]


def seen(parts: Iterable[Shared], networks: int, at_most: int) -> list[list[int]]:
    """The images that each network gets, repetitions left out."""
    found: list[list[int]] = [[] for _ in range(networks)]
    for part in parts:
        groups, size = part.images.shape
        assert len(part.networks) == groups and part.images.numel() <= at_most
        true = set(part.true.tolist())
        for group, network in enumerate(part.networks.tolist()):
            mine = part.images[group].tolist()
            kept = [image for i, image in enumerate(mine) if group * size + i in true]
            assert kept and mine == kept + [kept[-1]] * (size - len(kept))  # filled up with its last
            found[network] += kept
    return found


def numbered(counts: list[int]) -> list[list[int]]:
    return [list(range(sum(counts[:k]), sum(counts[: k + 1]))) for k in range(len(counts))]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("batch", [1, 3, 8, 128])
def test_passes_hold_every_image_once(counts: list[int], batch: int) -> None:
    parts = sharing.for_passes(counts, [True] * len(counts), batch)
    assert seen(parts, len(counts), batch) == numbered(counts)


def test_a_network_that_is_not_wanted_is_left_out_and_others_keep_their_images() -> None:
    counts = [3, 40, 2]
    assert seen(sharing.for_passes(counts, [True, False, True], 16), 3, 16) == [[0, 1, 2], [], [43, 44]]
    assert not list(sharing.for_passes(counts, [False] * 3, 16))
    assert not list(sharing.for_passes([0, 0], [True, True], 16))


def test_heads_that_are_not_wanted_are_left_out() -> None:
    assert seen(sharing.for_heads([3, 40, 2], [True, False, True], 16), 3, 16) == [[0, 1, 2], [], [43, 44]]


def test_powers_of_two() -> None:
    assert [sharing.power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("at_most", [1, 5, 64, 10_000])
def test_heads_hold_every_image_once(counts: list[int], at_most: int) -> None:
    parts = list(sharing.for_heads(counts, [True] * len(counts), at_most))
    assert seen(parts, len(counts), at_most) == numbered(counts)
    if at_most == 10_000:
        assert len(parts) <= 8  # not one for each network
        assert sum(part.images.numel() for part in parts) < 2 * sum(counts)
