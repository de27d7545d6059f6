"""The ridge classifier against independent float64 computations with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from morecl.random import generator
from morecl.ridge import RELATIVE_STRENGTHS, Ridge, best_sharpness, descend, held_out_errors, held_out_errors_in_chunks
from morecl.symmetric import packed, unpacked

DIM, WIDTH = 6, 40


def images(count: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    columns = rng.permutation(np.arange(count) % classes)
    features = rng.normal(size=(classes, DIM))[columns] + 0.7 * rng.normal(size=(count, DIM))
    return torch.from_numpy(features).float(), torch.from_numpy(columns)


def ridge(classes: int, forgets: bool = False) -> Ridge:
    made = Ridge(DIM, WIDTH, generator(0, "ridge"), forgets=forgets)
    made.grow(classes)
    return made


def random_features(made: Ridge, features: torch.Tensor) -> np.ndarray:
    """phi, from float32 products (as the classifier has them) to float64."""
    return np.maximum(features.numpy() @ made.projection.numpy() / np.float32(made.scale), 0).astype(np.float64)


def solved(phi: np.ndarray, columns: np.ndarray, classes: int, strength: float) -> np.ndarray:
    """W of all images at once."""
    onehot = np.eye(classes)[columns]
    gram = phi.T @ phi
    return np.linalg.solve(gram + strength * gram.diagonal().mean() * np.eye(phi.shape[1]), phi.T @ onehot)


def left_out(phi: np.ndarray, columns: np.ndarray, classes: int, strength: float) -> np.ndarray:
    """Outputs of each image by a classifier that was solved without it, with the strength of all."""
    onehot, unit = np.eye(classes)[columns], (phi**2).sum(0).mean()
    rows = []
    for i in range(len(phi)):
        rest = np.delete(np.arange(len(phi)), i)
        gram = phi[rest].T @ phi[rest] + strength * unit * np.eye(phi.shape[1])
        rows.append(phi[i] @ np.linalg.solve(gram, phi[rest].T @ onehot[rest]))
    return np.array(rows)


@pytest.mark.parametrize("tasks", [1, 3, 5])
def test_weights_are_those_of_all_images_at_once(tasks: int) -> None:
    features, columns = images(200, 5)
    made = ridge(0)
    for k in range(tasks):
        first, last = 5 * k // tasks, 5 * (k + 1) // tasks
        made.grow(last - first)
        own = (columns >= first) & (columns < last)
        made.add(features[own], columns[own])
    made.solve(features, columns)
    phi = random_features(made, features)
    errors = [((left_out(phi, columns.numpy(), 5, r) - np.eye(5)[columns]) ** 2).sum() for r in RELATIVE_STRENGTHS]
    expected = solved(phi, columns.numpy(), 5, RELATIVE_STRENGTHS[int(np.argmin(errors))])
    assert np.abs(made.weight.numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


def test_the_unit_is_the_standard_deviation_of_what_comes_first() -> None:
    z, y = images(30, 2)
    made = ridge(2)
    made.add(5 * z, y)
    made.add(z, y)
    assert float(made.scale) == pytest.approx(5 * np.std(z.double().numpy(), ddof=1))
    constant = ridge(1)
    constant.add(torch.full((4, DIM), 3.0), torch.zeros(4, dtype=torch.int64))
    assert float(constant.scale) == 1.0


def test_sums_do_not_depend_on_order_or_pieces() -> None:
    features, columns = images(150, 3)
    whole, pieces = ridge(3), ridge(3)
    whole.add(features, columns)
    order = np.random.default_rng(1).permutation(150)
    pieces.scale.copy_(whole.scale)
    for part in np.array_split(order, 7):
        pieces.add(features[part], columns[part])
    assert torch.allclose(whole.gram, pieces.gram, rtol=1e-12, atol=1e-9)
    assert torch.allclose(whole.cross, pieces.cross, rtol=1e-12, atol=1e-9)


def test_sharpness_is_chosen_on_images_left_out() -> None:
    features, columns = images(120, 4, seed=3)
    made = ridge(4)
    made.add(features, columns)
    made.solve(features, columns)
    phi = random_features(made, features)
    tried = {r: left_out(phi, columns.numpy(), 4, r) for r in RELATIVE_STRENGTHS}
    best = min(tried, key=lambda r: float(((tried[r] - np.eye(4)[columns]) ** 2).sum()))
    assert float(made.sharpness) == best_sharpness(torch.from_numpy(tried[best]), columns)[0]
    inside = best_sharpness(torch.from_numpy(phi @ made.weight.numpy()).double(), columns)[0]
    assert inside > float(made.sharpness)  # images that are in the sums look surer than they are


def test_forgotten_classes_have_no_say_in_the_sharpness() -> None:
    z, y = images(60, 3)
    made = ridge(3, forgets=True)
    made.add(z, y)
    made.drop(2)
    known = y != 2
    sharpness = []
    for without in (torch.tensor([False, False, True]), None):
        made.solve(z[known], y[known], without=without)
        sharpness.append(float(made.sharpness))
    phi = torch.from_numpy(random_features(made, z[known]))
    gram = unpacked(made.gram, WIDTH)
    strength = float(RELATIVE_STRENGTHS[int(made.place)] * gram.diagonal().mean())
    onehot = torch.nn.functional.one_hot(y[known], 3).double()
    outputs = made._left_out(gram, strength, phi, onehot, torch.ones(int(known.sum())).double()).outputs
    assert sharpness == [best_sharpness(outputs[:, :2], y[known])[0], best_sharpness(outputs, y[known])[0]]
    assert sharpness[0] != sharpness[1]


def test_weights_count_images_several_times() -> None:
    features, columns = images(60, 3)
    doubled, weighted = ridge(3), ridge(3)
    doubled.add(features, columns)
    doubled.add(features, columns)
    weighted.add(features, columns, torch.full((60,), 2.0))
    assert torch.allclose(doubled.gram, weighted.gram, rtol=1e-12)
    assert torch.allclose(doubled.cross, weighted.cross, rtol=1e-12)


@pytest.mark.parametrize("case", ["one image", "one class", "equal images", "200 classes"])
def test_small_and_large_cases(case: str) -> None:
    features, columns = images(400, 200) if case == "200 classes" else images(20, 1)
    if case == "one image":
        features, columns = features[:1], columns[:1]
    if case == "equal images":
        features = torch.zeros_like(features)
    made = ridge(200 if case == "200 classes" else 1)
    made.add(features, columns)
    made.solve(features, columns)
    outputs = made(features)
    assert outputs.shape == (len(features), made.classes)
    assert outputs.isfinite().all() and (made.sharpness * made(features)).isfinite().all()


def test_the_classifier_comes_back_from_its_state() -> None:
    features, columns = images(100, 4)
    made, again = ridge(4), ridge(4)
    made.add(features, columns)
    made.solve(features, columns)
    assert "projection" not in made.state_dict()
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(features), made(features))


@pytest.mark.parametrize("chunk", [4096, 7])
def test_a_forgotten_class_that_is_taught_again_counts_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morecl.ridge.CHUNK", chunk)
    features, columns = images(90, 3)
    made = ridge(3, forgets=True)
    weights = torch.where(columns == 1, 2.5, 1.0)
    made.add(features, columns, weights)
    phi = random_features(made, features)
    exact = 1e-12 if chunk > len(features) else 1e-5  # float32 features of few images may round differently
    assert np.allclose(made.gram, packed(torch.from_numpy(phi.T * weights.numpy() @ phi)), rtol=exact)
    made.drop(1)
    assert not made.cross[:, 1].any()
    made = loaded(made, 3)
    made.grow(1)
    own = np.flatnonzero(columns == 1)
    nearly = features[own[:-2]] * (1 + 1e-4 * torch.randn(len(own) - 2, DIM, generator=generator(0, "rounding")))
    made.add(nearly, torch.full((len(nearly),), 3))  # all but two, as another batch computes them
    counted = weights.numpy()  # those that stood in for others do so again, the last two as examples of no class
    onehot = np.eye(4)[np.where(columns == 1, 3, columns)]
    onehot[own[-2:]] = 0
    gram, cross = (phi.T * counted) @ phi, (phi.T * counted) @ onehot
    assert np.abs(unpacked(made.gram, WIDTH).numpy() - gram).max() <= 1e-3 * gram.max()
    assert np.abs(made.cross.numpy() - cross).max() <= 1e-3 * cross.max()
    assert np.bincount(made.columns + 1).tolist() == [2, *np.bincount(columns)[[0]], 0, 30, 28]


def test_sums_stay_positive_when_images_that_stood_in_for_many_come_again() -> None:
    features, columns = images(90, 3)
    made = ridge(3, forgets=True)
    made.add(features, columns, torch.where(columns == 1, 20.0, 1.0))
    made.drop(1)
    noise = torch.randn(int((columns == 1).sum()), DIM, generator=generator(0, "rounding"))
    made.grow(1)
    again, column = features[columns == 1] * (1 + 1e-2 * noise), torch.full((len(noise),), 3)
    made.add(again, column)
    eigenvalues = torch.linalg.eigvalsh(unpacked(made.gram, WIDTH))
    assert eigenvalues.min() > -1e-9 * eigenvalues.max()
    made.solve(again, column, torch.full((len(noise),), 20.0), torch.tensor([False, True, False, False]))
    assert (made(again).argmax(1) == 3).float().mean() > 0.9


def test_of_many_images_some_choose_the_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    features, columns = images(90, 3)
    all_, some = ridge(3), ridge(3)
    for made in (all_, some):
        made.add(features, columns)
    some.solve(features[::3], columns[::3])
    monkeypatch.setattr("morecl.ridge.LEFT_OUT", 30)
    all_.solve(features, columns)
    assert all_.place == some.place and all_.sharpness == some.sharpness
    assert torch.equal(all_.weight, some.weight)


def test_images_like_forgotten_ones_are_added_to_them() -> None:
    features, columns = images(60, 2)
    made = ridge(2, forgets=True)
    made.add(features, columns)
    made.drop(1)
    before = unpacked(made.gram, WIDTH).numpy()
    similar = features[columns == 1] * 1.1
    made.add(similar, torch.zeros(len(similar), dtype=torch.int64))
    phi = random_features(made, similar)
    assert np.allclose(unpacked(made.gram, WIDTH).numpy(), before + phi.T @ phi, rtol=1e-12)
    assert len(made.columns) == 60 + len(similar)
    made.clear()
    assert len(made.columns) == 0 and not made.gram.any()


def test_sums_of_classes_that_do_not_exist_are_not_loaded() -> None:
    made = ridge(2, forgets=True)
    made.add(*images(60, 2))
    with pytest.raises(ValueError, match="classes that do not exist"):
        loaded(made, 1)


def loaded(made: Ridge, classes: int) -> Ridge:
    """The same, saved and loaded."""
    again = ridge(classes, made.forgets)
    again.load_state_dict(made.state_dict())
    return again


@pytest.mark.parametrize("count", [20, 90])  # fewer and more images than random features
def test_held_out_errors_are_those_of_each_classifier(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    phi, onehot = rng.normal(size=(count, WIDTH)), np.eye(3)[rng.integers(0, 3, count)]
    other, other_onehot = rng.normal(size=(11, WIDTH)), np.eye(3)[rng.integers(0, 3, 11)]
    strengths = (1e-3, 1.0, 1e3)
    expected = []
    for r in strengths:
        weight = np.linalg.solve(phi.T @ phi + r * np.eye(WIDTH), phi.T @ onehot)
        expected.append(((other @ weight - other_onehot) ** 2).sum())
    tensors = [torch.from_numpy(part) for part in (phi, onehot, other, other_onehot)]
    assert held_out_errors(*tensors, strengths) == pytest.approx(expected, rel=1e-8)
    monkeypatch.setattr("morecl.ridge.CHUNK", 7)
    assert held_out_errors_in_chunks(lambda z: z, *tensors, strengths) == pytest.approx(expected, rel=1e-8)


def test_a_strength_can_be_given() -> None:
    features, columns = images(80, 3)
    made = ridge(3)
    made.add(features, columns)
    made.solve_with(2.5)
    phi = random_features(made, features)
    expected = np.linalg.solve(phi.T @ phi + 2.5 * np.eye(WIDTH), phi.T @ np.eye(3)[columns])
    assert np.abs(made.weight.numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


def test_a_strength_lost_in_rounding_is_raised() -> None:
    """G of rank 1, to which 1e-8 adds nothing in float64: the matrix is singular, and the least weights are wanted."""
    made = ridge(1)
    gram = torch.full((WIDTH, WIDTH), 1e10, dtype=torch.float64)
    lost = gram + 1e-8 * torch.eye(WIDTH, dtype=torch.float64)
    assert torch.equal(lost, gram) and torch.linalg.solve_ex(lost, gram).info != 0
    made.gram.copy_(packed(gram))
    made.cross.fill_(1e10)
    made.solve_with(1e-8)
    # the condition number is 4e13, so a hundredth may be rounding, and how much depends on the machine
    assert made.weight.flatten().tolist() == pytest.approx([1 / WIDTH] * WIDTH, rel=0.1)
    made.solve_with(1e8)  # strengths that count are taken as they are
    assert made.weight.flatten().tolist() == pytest.approx([1e10 / (WIDTH * 1e10 + 1e8)] * WIDTH, rel=1e-6)


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("valley", range(6))
def test_the_descent_ends_in_the_valley(start: int, valley: int) -> None:
    asked: list[int] = []

    def evaluate(place: int) -> tuple[float, str]:
        asked.append(place)
        return float(abs(place - valley)), f"at {place}"

    assert descend(evaluate, start, 6) == (valley, f"at {valley}")
    assert len(asked) == len(set(asked)) <= abs(start - valley) + 3
