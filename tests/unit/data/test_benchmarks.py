"""Recipes, class orders and the streams made from them."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from morecl.data import Recipe, build_stream, check_stream, class_order, load_recipe, recipe_names
from morecl.data.datasets import count_classes
from morecl.data.stream import task_sizes
from morecl.errors import InputError

PAPER = {  # Training Details: dataset, tasks, epochs, lr, bottleneck, memory size, back-update
    "cifar10-5t": ("cifar10", 5, 20, 0.005, 64, 200, True),
    "cifar100-10t": ("cifar100", 10, 40, 0.001, 128, 2000, True),
    "cifar100-20t": ("cifar100", 20, 40, 0.005, 128, 2000, True),
    "tinyimagenet-5t": ("tinyimagenet", 5, 15, 0.005, 128, 2000, False),
    "tinyimagenet-10t": ("tinyimagenet", 10, 10, 0.005, 128, 2000, False),
    "svhn-5t": ("svhn", 5, 20, 0.005, 64, 200, True),
    "mnist-5t": ("mnist", 5, 20, 0.005, 64, 200, True),
    "fashionmnist-5t": ("fashionmnist", 5, 20, 0.005, 64, 200, True),
    "cifar10-5t-1k": ("cifar10", 5, 20, 0.005, 64, 200, True),
}
UNEQUAL = {  # the classes of each task; settings as in the second
    "digits-unequal": ([1, 3, 1, 4, 1], "digits-5t"),
    "digits-one-by-one": ([1] * 10, "digits-5t"),
    "cifar100-unequal": ([10, 1, 1, 20, 5, 1, 30, 2, 10, 20], "cifar100-10t"),
    "cifar100-first-one": ([1, 9, *[10] * 9], "cifar100-10t"),
    "cifar100-uneven-40": ([40, 1, 5, 1, 20, 2, 1, 10, 15, 5], "cifar100-10t"),
}
TOY = Recipe("toy", "cifar10", 5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A made-up cifar10.npz: 20 + 5 images per class, interleaved; pixel (0, 0) is label, index in its class, split."""
    arrays: dict[str, Any] = {"classes": np.array([f"c{i}" for i in range(10)])}
    for flag, (split, count) in enumerate((("train", 20), ("test", 5))):
        y = np.tile(np.arange(10), count)
        x = np.zeros((len(y), 2, 2, 3), np.uint8)
        x[:, 0, 0] = np.stack([y, np.repeat(np.arange(count), 10), np.full(len(y), flag)], 1)
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    return tmp_path


# --- recipes


def test_every_benchmark_of_the_paper_is_there_with_its_settings() -> None:
    assert recipe_names() == sorted([*PAPER, *UNEQUAL, "digits-5t", "tinyimagenet88-8t"])
    for name, (dataset, tasks, epochs, lr, bottleneck, memory, back_update) in PAPER.items():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.dataset, recipe.tasks) == (name, dataset, tasks)
        expected = {"epochs": epochs, "lr": lr, "bottleneck": bottleneck, "memory_size": memory}
        assert recipe.settings == expected == recipe.settings_for("ncm", included=False)
        own = recipe.settings_for("more", included=False)
        assert own == expected | {"lr": own["lr"]} | ({} if back_update else {"back_update": False})
    assert load_recipe("digits-5t").dataset == "digits"
    small = load_recipe("cifar10-5t-1k")
    assert (small.train_per_class, small.test_per_class) == (1000, 400)


@pytest.mark.parametrize("name", UNEQUAL)
def test_streams_of_unequal_tasks(name: str) -> None:
    sizes, like = UNEQUAL[name]
    recipe, usual = load_recipe(name), load_recipe(like)
    assert task_sizes(recipe.tasks, sum(sizes), recipe.dataset) == sizes
    assert (recipe.dataset, recipe.settings) == (usual.dataset, usual.settings)
    assert (recipe.methods, recipe.included) == (usual.methods, usual.included)
    assert sum(sizes) == {"digits": 10, "cifar100": 100}[recipe.dataset]


@pytest.mark.parametrize("name", [*PAPER, *UNEQUAL, "digits-5t"])
def test_the_head_of_a_recipe_says_command_time_and_target(name: str) -> None:
    head = (files("morecl.data") / "recipes" / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for part in (f"#     morecl run {name}\n", "\n# Takes: ", "\n# Should reach: ", "\n# Paper"):
        assert part in head


def test_own_recipe_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'dataset = "folder:pictures"\ntasks = 2\nfolder_size = 8\ndescription = "My pictures"\n'
        "[settings]\nepochs = 1\n[methods.more]\nlr = 1.0\n"
    )
    recipe = load_recipe(str(file))
    assert recipe.name == "mine" and recipe.dataset == f"folder:{tmp_path / 'pictures'}" and recipe.folder_size == 8
    assert recipe.where == str(file) and recipe.summary == "My pictures"
    assert recipe.settings_for("more", included=True) == {"epochs": 1, "lr": 1.0}
    assert recipe.settings_for("ncm", included=True) == {"epochs": 1}


def test_the_included_backbone_has_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("""
        dataset = "cifar10"
        tasks = 5
        settings = { epochs = 9, lr = 0.1, bottleneck = 3 }
        methods.more = { lr = 0.2 }
        included.settings = { epochs = 5 }
        included.methods.more = { lr = 0.3 }
        included.methods.hat = { epochs = 6 }
    """)
    recipe = load_recipe(str(tmp_path / "mine.toml"))
    assert recipe.settings_for("more", included=False) == {"epochs": 9, "lr": 0.2, "bottleneck": 3}
    assert recipe.settings_for("more", included=True) == {"epochs": 5, "lr": 0.3, "bottleneck": 3}
    assert recipe.settings_for("hat", included=True) == {"epochs": 6, "lr": 0.1, "bottleneck": 3}
    assert recipe.settings_for("eeil", included=False) == {"epochs": 9, "lr": 0.1, "bottleneck": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('dataset = "cifar10"\ntask = 5', "unknown key in .*mine.toml 'task'; did you mean 'tasks'"),
        ('dataset = "cifar10"\nname = "x"\ntasks = 5', "unknown key in .*mine.toml 'name'"),
        ("", "mine.toml: dataset is missing; expected the name of a data set"),
        ("tasks = 5", "dataset is missing"),
        ('dataset = "cifar10"', "tasks is missing; expected a whole number"),
        ('dataset = "cifar11"\ntasks = 5', "mine.toml: unknown data set 'cifar11'; did you mean 'cifar10'"),
        ('dataset = "cifar10"\ntasks = 5\ndescription = 3', "description = 3; expected one line of text"),
        ('dataset = "cifar10"\ntasks = 5\ndescription = "a\\nb"', "description = .*; expected one line of text"),
        ('dataset = "cifar10"\ntasks = 5\nsource = "x"', "unknown key in .* 'source'"),
        ('dataset = "cifar10"\ntasks = 0', "tasks = 0"),
        ('dataset = "cifar10"\ntasks = 1\nclasses = [1, 1]', "classes = .* each once"),
        ('dataset = "cifar10"\ntasks = 1\nclasses = [-1]', "classes = .*expected labels"),
        ('dataset = "cifar10"\ntasks = 1\nclasses = []', "classes = .*expected labels"),
        ('dataset = "cifar10"\ntasks = true', "tasks = True"),
        ('dataset = "cifar10"\ntasks = "4,1,5"', "tasks = '4,1,5'; expected .* such as \\[4, 1, 5\\]"),
        ('dataset = "cifar10"\ntasks = []', r"tasks = \[\]; expected"),
        ('dataset = "cifar10"\ntasks = [4, 0, 6]', r"tasks = \[4, 0, 6\]; expected"),
        ('dataset = "cifar10"\ntasks = [4, true, 5]', r"tasks = \[4, True, 5\]; expected"),
        ('dataset = "cifar10"\ntasks = [4.0, 6]', r"tasks = \[4.0, 6\]; expected"),
        ('dataset = "cifar10"\ntasks = 5\ntrain_per_class = 1.5', "train_per_class = 1.5"),
        ('dataset = "cifar10"\ntasks = 5\nsettings = 3', "settings = 3"),
        ('dataset = "cifar10"\ntasks = 5\n[methods]\nlr = 3', "one table per method"),
        ('dataset = "cifar10"\ntasks = 5\nincluded = 3', r"included = 3; expected tables \[included.settings\]"),
        ('dataset = "cifar10"\ntasks = 5\n[included]\nlr = 3', "included = {'lr': 3}; expected tables"),
        ('dataset = "cifar10"\ntasks = 5\n[included]\nsettings = 3', "included.settings = 3; expected a table"),
        ('dataset = "cifar10"\ntasks = 5\n[included.methods]\nlr = 3', r"such as \[included.methods.more\]"),
        ('dataset = "digits"\ntasks = 5\nfolder_size = 32', "folder_size = 32; expected a data set of one's own"),
        ("dataset = ", "mine.toml is not valid TOML"),
    ],
)
def test_wrong_recipe_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_recipe(str(tmp_path / "mine.toml"))


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('dataset = "digits"\ntasks = 5\n', encoding="utf-8-sig")
    assert load_recipe(str(tmp_path / "mine.toml")).dataset == "digits"


def test_unknown_recipe() -> None:
    with pytest.raises(InputError, match="unknown benchmark 'cifar10-5'; did you mean 'cifar10-5t'"):
        load_recipe("cifar10-5")
    with pytest.raises(InputError, match=r"there is no recipe file nowhere\.toml"):
        load_recipe("nowhere.toml")


def test_a_folder_without_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(InputError, match=r"unknown benchmark 'photos'\. Known: .* give folder:photos\.$"):
        load_recipe("photos")
    with pytest.raises(InputError) as caught:
        load_recipe("")
    assert "give folder:" not in str(caught.value)


@pytest.mark.parametrize(("classes", "tasks"), [(2, 1), (3, 1), (4, 2), (7, 3), (10, 5), (30, 5)])
def test_recipe_of_a_folder(tmp_path: Path, classes: int, tasks: int) -> None:
    for c in range(classes):
        (tmp_path / "mine" / f"{c:02d}").mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9), (c, i, 0)).save(tmp_path / "mine" / f"{c:02d}" / f"{i}.png")
    recipe = load_recipe(f"folder:{tmp_path / 'mine'}")
    assert recipe.name == "folder:mine" and recipe.tasks == tasks
    assert recipe.settings == load_recipe("cifar10-5t").settings
    stream = build_stream(recipe, class_order="3", folder_size=4)
    assert len(stream) == tasks and stream.dataset.x_train.shape[1:] == (4, 4, 3)
    assert sum(len(task.classes) for task in stream) == classes


# --- class orders


@pytest.mark.parametrize(("dataset", "classes"), [("cifar10", 10), ("cifar100", 100), ("tinyimagenet", 200)])
def test_the_orders_of_the_paper(dataset: str, classes: int) -> None:
    shipped = json.loads((files("morecl") / "assets" / "class_orders.json").read_text())
    assert class_order(dataset, classes, "0", seed=3) == list(range(classes))
    for k in "01234":
        assert class_order(dataset, classes, k, seed=3) == shipped[dataset][k]
    if dataset == "cifar10":
        assert class_order(dataset, classes, "1", seed=0) == [3, 9, 1, 8, 0, 2, 6, 4, 5, 7]


@pytest.mark.parametrize(
    ("dataset", "classes"), [("digits", 10), ("mnist", 10), ("fashionmnist", 10), ("svhn", 10), ("folder:x", 37)]
)
def test_the_orders_of_the_other_data_sets_are_fixed_and_distinct(dataset: str, classes: int) -> None:
    found = [class_order(dataset, classes, k, seed=0) for k in "01234"]
    assert found[0] == list(range(classes)) and len({tuple(order) for order in found}) == 5
    assert all(sorted(order) == list(range(classes)) for order in found)
    assert found == [class_order(dataset, classes, k, seed=9) for k in "01234"]
    pinned = {10: [8, 4, 6, 7, 0, 3, 9, 5, 2, 1], 37: [30, 29, 27, 35, 33, 7, 11, 4, 8, 17]}
    assert found[1][:10] == pinned[classes]


def test_random_order_comes_from_the_seed() -> None:
    drawn = [tuple(class_order("cifar10", 10, "random", seed)) for seed in range(5)]
    assert len(set(drawn)) == 5 and drawn[2] == tuple(np.random.default_rng(2).permutation(10))


def test_wrong_class_order() -> None:
    with pytest.raises(InputError, match="unknown class order '5'"):
        class_order("cifar10", 10, "5", seed=0)
    with pytest.raises(InputError, match="for 100 classes, the data has 10"):
        class_order("cifar100", 10, "1", seed=0)
    with pytest.raises(InputError, match="seed must be 0 or more"):
        class_order("cifar10", 10, "random", seed=-1)


# --- streams


@pytest.mark.parametrize("k", ["0", "1", "2", "3", "4"])
def test_label_counts_and_first_and_last_images_of_every_order(root: Path, k: str) -> None:
    stream = build_stream(TOY, data_root=root, class_order=k)
    order = json.loads((files("morecl") / "assets" / "class_orders.json").read_text())["cifar10"][k]
    assert len(stream) == 5 and stream.scored_on == "test" and list(stream.class_order) == order
    for t, task in enumerate(stream):
        pair = order[2 * t : 2 * t + 2]
        assert list(task.classes) == pair
        for c in pair:
            assert (task.y_train == c).sum() == 20 and (task.y_test == c).sum() == 5
            assert task.x_train[task.y_train == c][0, 0, 0].tolist() == [c, 0, 0]
            assert task.x_train[task.y_train == c][-1, 0, 0].tolist() == [c, 19, 0]
            assert task.x_test[task.y_test == c][0, 0, 0].tolist() == [c, 0, 1]
            assert task.x_test[task.y_test == c][-1, 0, 0].tolist() == [c, 4, 1]
        assert len(task.y_train) == 40 and len(task.y_test) == 10


def test_limits_take_the_first_in_file_order(root: Path) -> None:
    recipe = Recipe("toy", "cifar10", 5, train_per_class=7, test_per_class=2)
    data = build_stream(recipe, data_root=root).dataset
    assert sorted(map(tuple, data.x_train[:, 0, 0, :2])) == [(c, i) for c in range(10) for i in range(7)]
    assert sorted(map(tuple, data.x_test[:, 0, 0, :2])) == [(c, i) for c in range(10) for i in range(2)]
    assert data.x_train[0, 0, 0].tolist() == [0, 0, 0] and data.x_train[1, 0, 0].tolist() == [
        1,
        0,
        0,
    ]  # still interleaved
    data = build_stream(recipe, data_root=root, train_per_class=100, test_per_class=1).dataset
    assert len(data.y_train) == 200 and len(data.y_test) == 10
    with pytest.raises(InputError, match="train_per_class must be at least 1, not 0"):
        build_stream(recipe, data_root=root, train_per_class=0)


def test_tasks_can_be_replaced(root: Path) -> None:
    assert [len(task.classes) for task in build_stream(TOY, data_root=root, tasks=3)] == [4, 3, 3]
    with pytest.raises(InputError, match="cannot divide 10 classes into 11 tasks"):
        build_stream(TOY, data_root=root, tasks=11)


@pytest.mark.parametrize("sizes", [[1, 3, 1, 4, 1], [10], [1] * 10, [1, 9]])
def test_tasks_of_given_sizes_take_the_classes_in_order(root: Path, sizes: list[int]) -> None:
    stream = build_stream(Recipe("toy", "cifar10", sizes), data_root=root, class_order="3")
    assert [len(group) for group in stream.groups] == sizes
    assert [c for group in stream.groups for c in group] == list(stream.class_order)
    seen = 0
    for task, size in zip(stream, sizes, strict=True):
        assert task.classes == stream.class_order[seen : seen + size]
        assert np.bincount(task.y_train, minlength=10).tolist() == [20 * (c in task.classes) for c in range(10)]
        assert len(task.y_test) == 5 * size
        seen += size
    assert build_stream(TOY, data_root=root, class_order="3", tasks=sizes).groups == stream.groups


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 1, 4], "tasks of 4, 1, 4 classes have 9 in all, but cifar10 has 10: give sizes that sum to 10"),
        ([11], "tasks of 11 classes have 11 in all"),
        ([5, 0, 5], "every task needs at least 1 class"),
        ([], "every task needs at least 1 class"),
        ([11, -1], "every task needs at least 1 class"),
    ],
)
def test_sizes_that_do_not_fit(root: Path, sizes: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_stream(TOY, data_root=root, tasks=sizes)


def test_a_number_of_tasks_gives_the_first_ones_more() -> None:
    for classes in range(1, 25):
        for tasks in range(1, classes + 1):
            parts = np.array_split(np.arange(classes), tasks)
            assert task_sizes(tasks, classes, "toy") == [len(part) for part in parts]


def test_validation_is_held_out_of_training_and_never_touches_test(root: Path) -> None:
    stream = build_stream(TOY, data_root=root, validation=0.1, seed=4)
    data = stream.dataset
    assert stream.scored_on == "validation"
    assert (data.x_test[:, 0, 0, 2] == 0).all(), "a test image was used"
    assert np.bincount(data.y_test).tolist() == [2] * 10 and np.bincount(data.y_train).tolist() == [18] * 10
    images = [tuple(p) for p in np.concatenate([data.x_train, data.x_test])[:, 0, 0, :2].tolist()]
    assert sorted(images) == [(c, i) for c in range(10) for i in range(20)]
    assert (data.x_test[:, 0, 0, 0] == data.y_test).all() and (data.x_train[:, 0, 0, 0] == data.y_train).all()
    again = build_stream(TOY, data_root=root, validation=0.1, seed=4, class_order="2")
    assert again.dataset.fingerprint == data.fingerprint
    assert build_stream(TOY, data_root=root, validation=0.1, seed=5).dataset.fingerprint != data.fingerprint


def test_validation_comes_after_the_limit(root: Path) -> None:
    data = build_stream(TOY, data_root=root, train_per_class=4, test_per_class=1, validation=0.5).dataset
    assert np.bincount(data.y_test).tolist() == np.bincount(data.y_train).tolist() == [2] * 10
    assert max(data.x_test[:, 0, 0, 1].max(), data.x_train[:, 0, 0, 1].max()) == 3


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 10.0, float("nan")])
def test_wrong_validation_share(root: Path, share: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        build_stream(TOY, data_root=root, validation=share)


def test_validation_needs_two_images_a_class(root: Path) -> None:
    with pytest.raises(InputError, match=r"class 'c0' has 1 training image.*leaves none"):
        build_stream(TOY, data_root=root, train_per_class=1, validation=0.1)


def test_digits_stream_on_validation() -> None:
    stream = build_stream(load_recipe("digits-5t"), validation=0.1)
    assert len(stream.dataset.y_train) + len(stream.dataset.y_test) == 1442


# --- some of the classes


def test_only_some_classes(root: Path) -> None:
    recipe = dataclasses.replace(TOY, tasks=2, classes=[7, 2, 4, 9])
    stream = build_stream(recipe, data_root=root, class_order="1", download=False)
    assert stream.dataset.classes == ("c2", "c4", "c7", "c9")
    order = [label for label in class_order("cifar10", 10, "1", seed=0) if label in (2, 4, 7, 9)]
    assert [[(2, 4, 7, 9)[c] for c in task.classes] for task in stream] == [order[:2], order[2:]]
    for task in stream:
        assert len(task.y_train) == 40 and len(task.y_test) == 10
        pixels = np.asarray(task.x_train)[:, 0, 0, 0]
        assert (pixels == np.array([2, 4, 7, 9])[task.y_train]).all()


def test_a_label_that_does_not_exist(root: Path) -> None:
    recipe = dataclasses.replace(TOY, tasks=1, classes=[3, 10])
    with pytest.raises(InputError, match="cifar10 has 10 classes, so there is no label 10"):
        build_stream(recipe, data_root=root, download=False)


def test_the_included_backbone_never_saw_these_88() -> None:
    recipe = load_recipe("tinyimagenet88-8t")
    assert recipe.classes is not None and len({*recipe.classes}) == 88
    assert 0 <= min(recipe.classes) <= max(recipe.classes) < 200
    assert recipe.summary == "tinyimagenet, 8 tasks, 88 of its classes"


# --- the real data, where it lies

COUNTS = {  # training and test images of every class
    "cifar10-5t": (5000, 1000),
    "cifar10-5t-1k": (1000, 400),
    "cifar100-10t": (500, 100),
    "cifar100-20t": (500, 100),
    "tinyimagenet-5t": (500, 50),
    "tinyimagenet-10t": (500, 50),
    "svhn-5t": (
        [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
        [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595],
    ),
    "mnist-5t": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashionmnist-5t": (6000, 1000),
}


@pytest.mark.parametrize("name", COUNTS)
def test_real_data(name: str) -> None:
    data_root, recipe = os.environ.get("MORECL_DATA"), load_recipe(name)
    if not data_root or not (path := Path(data_root) / f"{recipe.dataset}.npz").exists():
        pytest.skip(f"needs {recipe.dataset}.npz in the folder MORECL_DATA names")
    stream = build_stream(recipe, class_order="1", download=False)
    classes = len(stream.dataset.classes)
    train, test = (np.broadcast_to(count, classes) for count in COUNTS[name])
    with np.load(path) as raw:
        x, y = raw["x_train"], raw["y_train"]
    order = class_order(recipe.dataset, classes, "1", seed=0)
    assert isinstance(recipe.tasks, int)
    size = classes // recipe.tasks
    for t, task in enumerate(stream):
        assert list(task.classes) == order[t * size : (t + 1) * size]
        for c in task.classes:
            assert (task.y_train == c).sum() == train[c] and (task.y_test == c).sum() == test[c]
        for c in (task.classes[0], task.classes[-1]):
            mine = task.x_train[task.y_train == c]
            assert np.array_equal(mine[0], x[np.flatnonzero(y == c)[0]])
            assert np.array_equal(mine[-1], x[np.flatnonzero(y == c)[train[c] - 1]])


@pytest.mark.parametrize(
    "changes", [{"tasks": [3, 3]}, {"tasks": 11}, {"class_order": "9"}, {"validation": 1.5}, {"seed": -1}]
)
def test_what_cannot_be_built_is_found_without_the_images(changes: dict[str, Any]) -> None:
    recipe = load_recipe("digits-5t")
    check_stream(recipe)
    with pytest.raises(InputError) as built:
        build_stream(recipe, **changes)
    with pytest.raises(InputError) as found:
        check_stream(recipe, **changes)
    assert str(found.value) == str(built.value)


def test_a_label_that_does_not_exist_is_found_without_the_images() -> None:
    recipe = Recipe("few", "digits", [1, 1], classes=[0, 12])
    for attempt in (build_stream, check_stream):
        with pytest.raises(InputError, match="digits has 10 classes, so there is no label 12"):
            attempt(recipe)


def test_the_number_of_classes_is_known_without_the_images(tmp_path: Path) -> None:
    for name, classes in (("digits", 10), ("cifar100", 100), ("tinyimagenet", 200)):
        assert count_classes(name) == classes
    for name in "abc":
        (tmp_path / "own" / name).mkdir(parents=True)
    recipe = Recipe("own", f"folder:{tmp_path / 'own'}", [1, 1])
    with pytest.raises(InputError, match="but folder:own has 3: give sizes that sum to 3"):
        check_stream(recipe)
    check_stream(recipe, tasks=[1, 2])
    check_stream(Recipe("few", "cifar100", [2, 1], classes=[4, 8, 9]))
