"""The kernel classifier against plain float64 computations in NumPy."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge as Reference

from morecl import kernel_ridge
from morecl.kernel_ridge import KERNEL_STRENGTHS, KernelRidge, gaussian_kernel
from morecl.random import generator
from morecl.ridge import SHARPNESS
from morecl.triangle import Triangle


def images(count: int, classes: int, dim: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(seed, "images")
    columns = torch.arange(count) % classes
    centres = 2 * torch.randn(classes, dim, generator=draw)
    features = centres[columns] + torch.randn(count, dim, generator=draw)
    return features.half().float(), columns  # nothing is lost when they are kept


def taught(parts: list[tuple[torch.Tensor, torch.Tensor]], dim: int = 6, capacity: int = 1000) -> KernelRidge:
    made = KernelRidge(dim, capacity, seed=0)
    made.scale.fill_(1.0)  # so that kept features are the given ones
    known = 0
    for features, columns in parts:
        made.grow(int(columns.max()) + 1 - known)
        known = int(columns.max()) + 1
        made.add(features, columns)
        made.solve()
    return made


def in_tasks(
    features: torch.Tensor, columns: torch.Tensor, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    bounds = np.cumsum([0, *sizes])
    chosen = [(columns >= a) & (columns < b) for a, b in itertools.pairwise(bounds)]
    return [(features[rows], columns[rows]) for rows in chosen]


def strength(made: KernelRidge) -> float:
    return KERNEL_STRENGTHS[int(made.place)]


def test_kernel_is_the_formula() -> None:
    a, b = images(7, 2)[0].double(), images(5, 2, seed=1)[0].double()
    expected = np.exp(-((a.numpy()[:, None] - b.numpy()[None]) ** 2).sum(-1) / 6)
    np.testing.assert_allclose(gaussian_kernel(a, b).numpy(), expected, rtol=1e-10)


def test_outputs_are_those_of_scikit_learn() -> None:
    z, y = images(90, 5)
    made = taught([(z, y)])
    other, _ = images(20, 5, seed=3)
    reference = Reference(alpha=strength(made), kernel="rbf", gamma=1 / 6).fit(z.double(), np.eye(5)[y.numpy()])
    np.testing.assert_allclose(made(other).numpy(), reference.predict(other.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_tasks_make_no_difference(sizes: list[int]) -> None:
    z, y = images(60, 5)
    parts = in_tasks(z, y, sizes)
    made = taught(parts)
    a, columns = torch.cat([part for part, _ in parts]).double().numpy(), torch.cat([part for _, part in parts])
    kernel = np.exp(-((a[:, None] - a[None]) ** 2).sum(-1) / 6)
    expected = np.linalg.solve(kernel + strength(made) * np.eye(60), np.eye(5)[columns.numpy()])
    assert torch.equal(made.columns, columns)
    np.testing.assert_allclose(made.dual.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_leaving_one_out_is_solving_without_it() -> None:
    z, y = images(40, 4)
    made = taught([(z, y)])
    made.weights[:10] = 3.0
    onehot = torch.nn.functional.one_hot(y, 4).double()
    rows = torch.arange(40)
    solved = made._solved(0.1, onehot, rows)
    for i in (0, 5, 39):
        rest = np.delete(np.arange(40), i)
        kernel = gaussian_kernel(z[rest].double(), z[rest].double()).numpy()
        dual = np.linalg.solve(kernel + np.diag(0.1 / made.weights[rest].numpy()), onehot[rest].numpy())
        expected = gaussian_kernel(z[i : i + 1].double(), z[rest].double()).numpy() @ dual
        np.testing.assert_allclose(solved.outputs[i : i + 1].numpy(), expected, rtol=1e-8, atol=1e-10)


def test_a_weight_counts_as_copies() -> None:
    z, y = images(30, 3)
    weighted, copied = taught([(z, y)]), taught([(torch.cat([z, z[:6], z[:6]]), torch.cat([y, y[:6], y[:6]]))])
    weighted.weights[:6] = 3.0
    onehot = torch.nn.functional.one_hot(weighted.columns, 3).double()
    twice = torch.nn.functional.one_hot(copied.columns, 3).double()
    rows = torch.arange(5)
    weighted.dual = weighted._solved(0.1, onehot, rows).dual.float()
    copied.dual = copied._solved(0.1, twice, rows).dual.float()
    other, _ = images(10, 3, seed=5)
    torch.testing.assert_close(weighted(other), copied(other), rtol=1e-4, atol=1e-5)


def test_float32_of_many_images_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = images(200, 5)
    exact = taught([(z, y)])
    monkeypatch.setattr(kernel_ridge, "EXACT", 10)
    single = taught([(z, y)])
    other, _ = images(30, 5, seed=3)
    assert strength(single) == strength(exact)
    torch.testing.assert_close(single(other), exact(other), rtol=1e-2, atol=1e-3)
    assert not torch.equal(single.dual, exact.dual)


def test_capacity_keeps_an_equal_part_of_each_class_and_its_weight() -> None:
    z, y = images(90, 3)
    more, other = images(40, 4, seed=2)
    made = taught([(z, y), (more[other == 3], other[other == 3])], capacity=40)
    assert torch.bincount(made.columns).tolist() == [10, 10, 10, 10]
    totals = torch.zeros(4).index_add(0, made.columns, made.weights)
    torch.testing.assert_close(totals, torch.tensor([30.0, 30.0, 30.0, 10.0]))


def test_what_is_kept_of_many_additions_is_a_random_sample_of_all_images() -> None:
    z, y = images(1000, 1)
    made = taught([(z, y)], capacity=100)
    slowly = KernelRidge(6, 100, seed=0)
    slowly.scale.fill_(1.0)
    slowly.grow(1)
    for part in z.split(10):
        slowly.add(part, torch.zeros(10, dtype=torch.int64))
    kept = [int((z == row).all(1).nonzero()[0]) for row in slowly.features.float()]
    assert sorted(kept) == sorted(int((z == row).all(1).nonzero()[0]) for row in made.features.float())
    torch.testing.assert_close(slowly.weights, torch.full((100,), 10.0))
    assert abs(np.mean(kept) - 500) < 3 * 1000 / np.sqrt(12 * 100)  # from the whole stream, not from its ends


def test_state_comes_back_with_any_number_of_images() -> None:
    z, y = images(25, 3)
    made = taught([(z, y)])
    again = KernelRidge(6, 1000, seed=0)
    again.grow(3)
    again.load_state_dict(made.state_dict())
    other, _ = images(10, 3, seed=5)
    assert torch.equal(again(other), made(other))
    forged = {**made.state_dict(), "columns": made.columns + 3}
    with pytest.raises(ValueError, match="classes that do not exist"):
        again.load_state_dict(forged)
    with pytest.raises(RuntimeError, match="size mismatch"):
        again.load_state_dict({**made.state_dict(), "features": made.features[:, :5]})


def test_dropping_a_class_leaves_the_outputs_of_others_as_they_are() -> None:
    z, y = images(40, 4)
    made = taught([(z, y)])
    other, _ = images(10, 4, seed=5)
    before = made(other)
    made.drop(1)
    assert torch.equal(made(other)[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert (made(other)[:, 1] == 0).all()
    made.solve(without=torch.tensor([False, True, False, False]))
    torch.testing.assert_close(made(other)[:, [0, 2, 3]], before[:, [0, 2, 3]], rtol=1e-6, atol=1e-7)


def test_forgotten_classes_have_no_say_in_strength_and_sharpness() -> None:
    """As if there had never been an output for the class, whose images are examples of none."""
    z, y = images(60, 3)
    y[::4] = y[::4].roll(1)  # classes overlap
    found = []
    for case in ("masked", "never there", "not masked"):
        made = taught([(z, y)])
        made.drop(2)
        if case == "never there":
            made.dual = made.dual[:, :2]
        made.solve(torch.tensor([False, False, True]) if case == "masked" else None)
        found.append((strength(made), float(made.sharpness)))
    assert found[0] == found[1] != found[2]


def test_classes_far_apart_have_one_strength_however_they_came() -> None:
    """Their cross-entropy is 0 at every strength; the squared error decides."""
    z, y = images(60, 3)
    z = (8.0 * torch.eye(6)[y] + z / 16).half().float()
    chosen = {strength(taught(in_tasks(z, y, sizes))) for sizes in ([3], [1, 2], [2, 1], [1, 1, 1])}
    assert len(chosen) == 1
    weak = KernelRidge(6, 1000, seed=0)
    weak.scale.fill_(1.0)
    weak.grow(3)
    weak.add(z, y)
    for start in range(len(KERNEL_STRENGTHS)):
        weak.place.fill_(start)
        weak.solve()
        assert {strength(weak)} == chosen
    onehot = torch.nn.functional.one_hot(y, 3).double()
    errors = [
        float((weak._solved(each, onehot, torch.arange(60)).outputs - onehot).square().sum())
        for each in KERNEL_STRENGTHS
    ]
    assert chosen == {KERNEL_STRENGTHS[int(np.argmin(errors))]}


def test_without_an_image_to_leave_out_strength_and_sharpness_stay() -> None:
    z, y = images(40, 2)
    made = taught([(z, y)])
    before = strength(made), float(made.sharpness)
    made.drop(0)
    made.drop(1)
    made.solve(without=torch.tensor([True, True]))
    assert (strength(made), float(made.sharpness)) == before


def test_a_forgotten_class_that_is_taught_again_is_as_good_as_new() -> None:
    z, y = images(60, 3)
    made = taught([(z, y)])
    made.drop(1)
    made.grow(1)
    rounded = z[y == 1] * (1 + 1e-4 * torch.randn(20, 6, generator=generator(0, "rounding")))  # another batch size
    made.add(rounded, torch.full((20,), 3))
    made.solve(without=torch.tensor([False, True, False, False]))
    assert len(made) == 60 and torch.bincount(made.columns).tolist() == [20, 0, 20, 20]
    fresh = taught([(z[y != 1], y[y != 1] // 2), (z[y == 1], torch.full((20,), 2))])
    other, _ = images(30, 3, seed=4)
    torch.testing.assert_close(made(other)[:, [0, 2, 3]], fresh(other), rtol=1e-2, atol=1e-2)


def test_images_like_forgotten_ones_do_not_replace_them() -> None:
    z, y = images(40, 2)
    made = taught([(z, y)])
    made.drop(1)
    made.add(z[y == 1] + 0.2, torch.zeros(20, dtype=torch.int64))
    assert len(made) == 60


@pytest.mark.parametrize("features", [torch.zeros(6, 6), torch.ones(1, 6), torch.full((3, 6), 60.0)])
def test_features_without_variance(features: torch.Tensor) -> None:
    made = KernelRidge(6, 1000, seed=0)
    made.grow(2)
    made.add(features, torch.arange(len(features)) % 2)
    made.solve()
    assert (made.sharpness * made(features)).isfinite().all()
    assert made(features[:0]).shape == (0, 2)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = images(90, 5)
    whole = taught([(z, y)])
    monkeypatch.setattr(kernel_ridge, "Triangle", functools.partial(Triangle, block=16))
    monkeypatch.setattr(kernel_ridge, "CHUNK", 5)
    made = taught([(z, y)])
    torch.testing.assert_close(made.dual, whole.dual, rtol=1e-5, atol=1e-7)
    assert made.sharpness == whole.sharpness


def test_strength_and_sharpness_are_those_with_the_least_cross_entropy_of_images_left_out() -> None:
    z, y = images(120, 8, seed=7)
    made = taught([(z, y)])
    a, onehot = z.double().numpy(), np.eye(8)[y.numpy()]
    kernel = np.exp(-((a[:, None] - a[None]) ** 2).sum(-1) / 6)
    losses, errors = {}, {}
    for r in KERNEL_STRENGTHS:
        outputs = np.empty((120, 8))
        for i in range(120):  # each image really left out
            rest = np.delete(np.arange(120), i)
            dual = np.linalg.solve(kernel[np.ix_(rest, rest)] + r * np.eye(119), onehot[rest])
            outputs[i] = kernel[i, rest] @ dual
        errors[r] = ((outputs - onehot) ** 2).sum()
        for t in SHARPNESS:
            logits = t * outputs
            losses[r, t] = -(logits[np.arange(120), y] - np.log(np.exp(logits).sum(1))).mean()
    assert (strength(made), float(made.sharpness)) == min(losses, key=losses.__getitem__)
    assert strength(made) != min(errors, key=errors.__getitem__)  # the squared error would have chosen another
