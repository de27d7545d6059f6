from __future__ import annotations

import numpy as np
import pytest
import torch

from morecl.errors import InputError
from morecl.memory import LogitReservoir, ReplayMemory, herding, herding_order, last_of_each, reservoir_slots


def images(count: int, first: int = 0, side: int = 4) -> np.ndarray:
    """Images that tell their number by their colour."""
    return np.broadcast_to(np.arange(first, first + count)[:, None, None, None], (count, side, side, 3)).astype(
        np.uint8
    )


def numbers(memory: ReplayMemory) -> list[int]:
    return [int(image[0, 0, 0]) for image in memory.images]


def memory(size: int) -> ReplayMemory:
    return ReplayMemory(size, [f"class {c}" for c in range(20)], side=4)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_balanced_memory_gives_every_class_its_share_and_cuts_the_old_ones() -> None:
    m = memory(12)
    m.update(images(20), np.repeat([0, 1], 10), draw())
    assert np.bincount(m.columns).tolist() == [6, 6]
    before = numbers(m)
    m.update(images(20, first=20), np.repeat([2, 3], 10), draw(1))
    assert np.bincount(m.columns).tolist() == [3, 3, 3, 3]
    assert numbers(m)[:6] == before[:3] + before[6:9]
    assert all(number // 10 == column for number, column in zip(numbers(m), m.columns, strict=True))
    assert m.labels[0] == "class 0"


def test_a_class_with_few_images_keeps_them_all() -> None:
    m = memory(10)
    m.update(images(7), np.array([0, 0, 1, 1, 1, 1, 1]), draw())
    assert np.bincount(m.columns).tolist() == [2, 5]


def test_ranked_update_takes_the_first_of_the_order_and_cuts_from_its_end() -> None:
    m = memory(6)
    m.update_ranked(images(10), np.repeat([0, 1], 5), np.array([4, 9, 2, 7, 0, 5, 1, 6, 3, 8]), draw())
    assert numbers(m) == [4, 2, 0, 9, 7, 5]
    m.update_ranked(images(4, first=10), np.array([2, 2, 2, 2]), np.array([3, 1, 0, 2]), draw())
    assert numbers(m) == [4, 2, 9, 7, 13, 11]


def test_further_images_of_a_class_get_only_the_place_that_it_has() -> None:
    """Of 200 draws, the one place of class 0 goes to one of three new images in 150 +- 4 standard deviations (6.1)."""
    new = 0
    for seed in range(200):
        m = ReplayMemory(2, ["a", "b", "c"], side=4)
        m.replace(images(2), np.array([0, 2]))  # the second class has no place
        m.add(images(9, first=10), np.repeat([0, 1, 2], 3), np.array([1, 1, 1]), draw(seed))
        assert sorted(m.columns.tolist()) == [0, 2]
        of_first = numbers(m)[m.columns.tolist().index(0)]
        assert of_first in (0, 10, 11, 12)
        new += of_first != 0
    assert abs(new - 150) < 25
    m = ReplayMemory(3, ["a", "b", "c"], side=4)
    m.replace(images(2), np.array([0, 2]))
    m.add(images(3, first=10), np.array([1, 1, 1]), np.array([1, 0, 1]), draw())
    assert sorted(m.columns.tolist()) == [0, 1, 2]  # one was free


def greedy_herding(features: np.ndarray, count: int) -> list[int]:
    """Algorithm 4 of iCaRL by plain search."""
    mean, chosen = features.mean(0), []
    for k in range(1, count + 1):
        best, nearest = -1, np.inf
        for i in range(len(features)):
            distance = np.linalg.norm(mean - features[[*chosen, i]].sum(0) / k)
            if i not in chosen and distance < nearest:
                best, nearest = i, distance
        chosen.append(best)
    return chosen


def test_herding_follows_the_greedy_rule() -> None:
    features = np.random.default_rng(0).normal(size=(30, 5))
    assert herding(torch.from_numpy(features), 12).tolist() == greedy_herding(features, 12)


def test_herding_never_picks_twice_and_is_capped() -> None:
    same = torch.zeros(4, 3)
    assert sorted(herding(same, 9).tolist()) == [0, 1, 2, 3]
    assert herding(same, 0).tolist() == []


def test_herding_order_herds_each_class_by_itself() -> None:
    features = np.random.default_rng(1).normal(size=(20, 3))
    columns = np.array([5, 3] * 10)
    order = herding_order(torch.from_numpy(features), columns, 4)
    odd, even = np.arange(1, 20, 2), np.arange(0, 20, 2)
    expected = [*odd[greedy_herding(features[odd], 4)], *even[greedy_herding(features[even], 4)]]
    assert order.tolist() == expected


def test_of_two_images_a_reservoir_of_one_keeps_either() -> None:
    """400 draws with probability 1/2: standard deviation 10."""
    assert abs(sum(reservoir_slots(1, 1, 1, draw(seed))[0] == 0 for seed in range(400)) - 200) < 45


def test_images_of_different_sizes_are_brought_to_one() -> None:
    m = memory(100)
    m.update_ranked(images(2, side=8), np.array([0, 0]), np.arange(2), draw())
    m.update_ranked(images(3, first=2, side=4), np.array([1, 1, 1]), np.arange(3), draw())
    assert m.images.shape == (5, 4, 4, 3) and numbers(m) == [0, 1, 2, 3, 4]
    assert m.followed_by(images(1, side=6)).shape == (6, 4, 4, 3)


def test_state_and_restore_are_complete() -> None:
    m, other = memory(5), memory(5)
    m.replace(images(5, first=3), np.arange(5), logits=np.arange(10, dtype=np.float32).reshape(5, 2))
    m.seen = 9
    other.restore(m.state())
    assert numbers(other) == numbers(m) and other.columns.tolist() == m.columns.tolist() and other.seen == 9
    assert np.array_equal(other.extras["logits"], m.extras["logits"])


@pytest.mark.parametrize("rule", ["update", "replace"])
def test_what_is_stored_does_not_change_with_the_arrays_it_came_from(rule: str) -> None:
    m = memory(50)
    x, columns, tags = images(6).copy(), np.array([0, 0, 0, 1, 1, 1]), np.arange(6, dtype=np.float32)
    if rule == "update":
        m.update(x, columns, draw())
    else:
        m.replace(x, columns, tag=tags)
    before = (numbers(m), m.columns.tolist(), [rows.tolist() for rows in m.extras.values()])
    x[:], columns[:], tags[:] = 99, 7, -1
    assert (numbers(m), m.columns.tolist(), [rows.tolist() for rows in m.extras.values()]) == before


# ---- DER++'s reservoir ----------------------------------------------------------------------------------------------


def test_of_two_images_sent_to_one_slot_the_last_stays() -> None:
    assert last_of_each(torch.tensor([3, -1, 5, 3, -1]), 9).tolist() == [9, 9, 5, 3, 9]


def test_reservoir_fills_up_and_then_keeps_each_image_with_equal_probability() -> None:
    assert reservoir_slots(0, 5, 5, draw()).tolist() == [0, 1, 2, 3, 4]
    kept = np.zeros(40)
    for seed in range(400):
        m = memory(10)
        for k, start in enumerate((0, 20)):  # two tasks of one class each, in batches of 8, 8 and 4
            own, columns = images(20, first=start), np.full(20, k)
            reservoir = LogitReservoir(m, own, columns, [1] * (k + 1), torch.device("cpu"))
            for index, slots, _, _ in reservoir.epoch(0, 8, 1, draw(1000 * seed + start)):
                reservoir.write(index, slots, torch.zeros(len(index), k + 1))
            reservoir.store(epochs=1)
        assert len(m) == 10 and m.seen == 40
        kept[numbers(m)] += 1
    # 400 draws with probability 1/4: standard deviation 8.7
    assert np.abs(kept - 100).max() < 4.5 * 8.7


def filled_reservoir(memory: ReplayMemory) -> LogitReservoir:
    """Two tasks of two classes each, eight images per task; the second one is being learned."""
    images = np.arange(16, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    for k in range(2):
        own, columns = images[8 * k :][:8], np.repeat([2 * k, 2 * k + 1], 4)
        reservoir = LogitReservoir(memory, own, columns, [2] * (k + 1), torch.device("cpu"))
        if k == 0:
            said = torch.arange(8.0)[:, None] + torch.tensor([0.0, 0.5])  # tells of which image it is said
            for index, slots, _, _ in reservoir.epoch(0, 4, 3, torch.Generator().manual_seed(k)):
                reservoir.write(index, slots, said[index])
            reservoir.store(epochs=1)
    return reservoir


def test_a_reservoir_of_logits_keeps_images_and_logits_together() -> None:
    memory = ReplayMemory(5, range(4), 4)
    reservoir = filled_reservoir(memory)
    assert (memory.seen, len(memory)) == (8, 5)
    assert memory.extras["logits"][:, 0].tolist() == memory.images[:, 0, 0, 0].tolist()
    index, logits, known = reservoir.read(torch.arange(5))
    assert index.tolist() == list(range(5))  # what was stored comes first
    assert logits[:, :2].numpy().tolist() == memory.extras["logits"].tolist()
    assert known.tolist() == [[True, True, False, False]] * 5


def test_a_reservoir_keeps_its_size() -> None:
    memory = ReplayMemory(5, range(4), 4)
    filled_reservoir(memory)
    with pytest.raises(InputError, match="create a new learner"):
        memory.resize(3, draw())
    assert (memory.size, len(memory)) == (5, 5)


def test_writing_the_same_twice_changes_nothing_more() -> None:
    """As a step does that is warmed up before it is captured."""
    reservoir = filled_reservoir(ReplayMemory(5, range(4), 4))
    index, slots, _, _ = next(reservoir.epoch(0, 8, 3, torch.Generator().manual_seed(1)))
    logits = torch.randn(8, 4)
    reservoir.write(index, slots, logits)
    once = [part.clone() for part in reservoir.read(torch.arange(5))]
    reservoir.write(index, slots, logits)
    assert all(torch.equal(a, b) for a, b in zip(once, reservoir.read(torch.arange(5)), strict=True))
    entered = slots < 5
    assert entered.any() and torch.equal(reservoir.read(slots[entered])[1], logits[entered])
    assert reservoir.read(slots[entered])[2].all()


def test_a_pass_shows_each_image_once_and_draws_without_repetition() -> None:
    reservoir = filled_reservoir(ReplayMemory(5, range(4), 4))
    steps = list(reservoir.epoch(0, 3, 4, torch.Generator().manual_seed(1)))
    assert sorted(torch.cat([own for own, _, _, _ in steps]).tolist()) == list(range(5, 13))
    for _, _, first, second in steps:
        assert len(set(first.tolist())) == len(set(second.tolist())) == 4
        assert max(*first.tolist(), *second.tolist()) < 5
