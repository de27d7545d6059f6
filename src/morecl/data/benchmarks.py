"""Benchmarks: a recipe names the data set, the tasks and the settings; ``build_stream`` makes the tasks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from morecl.data import orders
from morecl.data.datasets import FOLDER, check_dataset_name, count_classes, load_dataset
from morecl.data.folder import FOLDER_SIZE, find_classes
from morecl.data.stream import Dataset, Division, Labels, TaskStream, task_sizes
from morecl.errors import InputError, placed, unknown_name
from morecl.pictures import some

LARGEST_SIDE = 4096
_INCLUDED = "tables [included.settings] and [included.methods.NAME]"
_DEFAULTS = "cifar10-5t"  # its settings are used for folders


@dataclass(frozen=True)
class Recipe:
    """A benchmark: ``settings`` apply to every method, ``methods[name]`` overrides them for one method.

    With the included backbone, ``included`` overrides both: it has ``settings`` and ``methods`` of its own. Weak
    features want other learning rates.

    ``tasks`` is a number of equal tasks, or the number of classes of each task.
    ``classes`` are the labels of the data set that take part, all if not given; they are numbered anew.
    ``train_per_class`` and ``test_per_class`` keep the first N images of each class, or all if there are fewer.
    ``folder_size`` is the side in pixels of the images of a ``folder:PATH``; by default what the backbone needs.
    ``description`` is one line for lists. ``source`` is the user's file, if the recipe comes from one.
    """

    name: str
    dataset: str
    tasks: Division
    classes: list[int] | None = None
    train_per_class: int | None = None
    test_per_class: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    included: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder_size: int | None = None
    description: str = ""
    source: str = ""

    @property
    def where(self) -> str:
        """What messages call the place of its settings."""
        return self.source or f"benchmark {self.name}"

    @property
    def summary(self) -> str:
        """One line for lists: its description, or data set, tasks and limits per class."""
        if self.description:
            return self.description
        limits = {"training": self.train_per_class, "test": self.test_per_class}
        parts = [f"{count:,} {kind}" for kind, count in limits.items() if count]
        images = f", {' and '.join(parts)} images per class" if parts else ""
        if self.classes is not None:
            images = f", {len(self.classes)} of its classes{images}"
        if isinstance(self.tasks, int):
            return f"{self.dataset}, {self.tasks} {'task' if self.tasks == 1 else 'tasks'}{images}"
        return f"{self.dataset}, tasks of {', '.join(map(str, self.tasks))} classes{images}"

    def settings_for(self, method: str, *, included: bool) -> dict[str, Any]:
        """``included``: with the included backbone."""
        of_all = [self.settings, self.methods.get(method, {})]
        if included:
            of_all += [self.included.get("settings", {}), self.included.get("methods", {}).get(method, {})]
        return {key: value for table in of_all for key, value in table.items()}

    def has_own(self, key: str, method: str, *, included: bool) -> bool:
        """Whether :meth:`settings_for` has ``key`` from a table of ``method``, not from one for all methods."""
        last = None  # the later table wins
        for place, owner, table in self.tables():
            if key in table and owner in (None, method) and (included or not place.startswith("included")):
                last = owner
        return last is not None

    def tables(self) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
        """Name of each table of settings, the method that it is for (or ``None``), and the table."""
        for prefix, settings, methods in (
            ("", self.settings, self.methods),
            ("included.", self.included.get("settings", {}), self.included.get("methods", {})),
        ):
            yield f"{prefix}settings", None, settings
            yield from ((f"{prefix}methods.{name}", name, table) for name, table in methods.items())


def recipe_names() -> list[str]:
    """The packaged benchmarks, sorted."""
    return sorted(p.name.removesuffix(".toml") for p in _packaged().iterdir() if p.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """A packaged benchmark, a user's ``.toml`` file, or ``folder:PATH``.

    A folder gets the settings of CIFAR10-5T and one task per two classes, at most five. In a file, the path of a folder
    is relative to that file.
    """
    if name in recipe_names():
        return _parse(name, (_packaged() / f"{name}.toml").read_text(encoding="utf-8"), f"benchmark {name}")
    if name.startswith(FOLDER):
        path = Path(name.removeprefix(FOLDER)).expanduser()
        if name == FOLDER:
            raise InputError(f"{FOLDER} needs a folder with one sub-folder per class, such as {FOLDER}photos.")
        tasks = min(5, len(find_classes(path)) // 2)
        usual = load_recipe(_DEFAULTS).settings  # not the rates that were chosen for its images
        return Recipe(f"{FOLDER}{path.resolve().name}", name, tasks, settings=usual)
    if not name.endswith(".toml"):
        unknown = unknown_name("benchmark", name, (*recipe_names(), f"{FOLDER}PATH", "FILE.toml"))
        if name and Path(name).expanduser().is_dir():
            raise InputError(f"{unknown} For the images in the folder {name}, give {FOLDER}{name}.")
        raise unknown
    file = Path(name).expanduser()
    if not file.is_file():
        raise InputError(f"there is no recipe file {file}; packaged benchmarks: {', '.join(recipe_names())}.")
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not a text file in UTF-8 ({error}).") from error
    recipe = replace(_parse(file.stem, text, str(file)), source=str(file))
    if recipe.dataset.startswith(FOLDER):
        folder = file.parent / Path(recipe.dataset.removeprefix(FOLDER)).expanduser()
        return replace(recipe, dataset=f"{FOLDER}{folder}")
    return recipe


def check_stream(
    recipe: Recipe,
    *,
    class_order: str = "0",
    seed: int = 0,
    tasks: Division | None = None,
    validation: float | None = None,
) -> None:
    """Raise :class:`InputError` as :func:`build_stream` does, as far as can be told without the images."""
    _check_seed(seed)
    classes = count_classes(recipe.dataset)
    orders.class_order(recipe.dataset, classes, class_order, seed)
    name = recipe.dataset
    if name.startswith(FOLDER):
        name = f"{FOLDER}{Path(name.removeprefix(FOLDER)).expanduser().resolve().name}"
    if recipe.classes is not None:
        _check_labels(name, classes, recipe.classes)
    chosen = classes if recipe.classes is None else len(recipe.classes)
    task_sizes(recipe.tasks if tasks is None else tasks, chosen, name)
    if validation is not None:
        _check_share(validation)


def build_stream(
    recipe: Recipe,
    *,
    data_root: Path | None = None,
    class_order: str = "0",
    seed: int = 0,
    tasks: Division | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    folder_size: int | None = None,
    validation: float | None = None,
    download: bool = True,
    progress: bool = False,
) -> TaskStream:
    """The tasks of ``recipe``; ``tasks``, ``*_per_class`` and ``folder_size`` override its values.

    With ``validation`` that share of each class's training images (after ``train_per_class``), drawn from ``seed``, is
    held out of training and scored instead of the test split. The test split and ``test_per_class`` are then unused,
    and ``stream.scored_on`` is "validation".
    """
    _check_seed(seed)
    dataset = load_dataset(
        recipe.dataset,
        data_root,
        download=download,
        progress=progress,
        folder_size=next(size for size in (folder_size, recipe.folder_size, FOLDER_SIZE) if size is not None),
    )
    dataset = replace(dataset, chosen_side=recipe.folder_size is not None)
    order = orders.class_order(recipe.dataset, len(dataset.classes), class_order, seed)
    if recipe.classes is not None:
        dataset, order = _only(dataset, order, recipe.classes)
    dataset = _limited(
        dataset,
        recipe.train_per_class if train_per_class is None else train_per_class,
        recipe.test_per_class if test_per_class is None else test_per_class,
    )
    if validation is not None:
        dataset = _hold_out(dataset, validation, seed)
    return TaskStream(
        dataset,
        order,
        recipe.tasks if tasks is None else tasks,
        scored_on="test" if validation is None else "validation",
    )


def _packaged() -> Any:
    return files("morecl.data") / "recipes"


def _parse(name: str, text: str, where: str) -> Recipe:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is not valid TOML: {error}.") from error
    known = {f.name for f in fields(Recipe)} - {"name", "source"}
    for key in values:
        if key not in known:
            raise unknown_name(f"key in {where}", key, known)

    def check(ok: bool, key: str, expected: str) -> None:
        if not ok:
            found: Any = values
            for part in key.split("."):
                found = found.get(part)
            what = f"{key} is missing" if found is None else f"{key} = {found!r}"  # TOML has no null
            raise InputError(f"{where}: {what}; expected {expected}.")

    check(isinstance(values.get("dataset"), str), "dataset", 'the name of a data set or "folder:PATH"')
    with placed(where):
        check_dataset_name(values["dataset"])
    description = values.get("description", "")
    check(isinstance(description, str) and description.isprintable(), "description", "one line of text")
    tasks = values.get("tasks")
    sizes = isinstance(tasks, list) and len(tasks) > 0 and all(map(_positive, tasks))
    expected = "a whole number of at least 1, or the number of classes of each task, such as [4, 1, 5]"
    check(_positive(tasks) or sizes, "tasks", expected)
    classes = values.get("classes")
    distinct = isinstance(classes, list) and all(map(_label, classes)) and len({*classes}) == len(classes) > 0
    check("classes" not in values or distinct, "classes", "labels of the data set, each once, such as [0, 3, 7]")
    for key in ("train_per_class", "test_per_class"):
        check(key not in values or _positive(values[key]), key, "a whole number of at least 1")
    side = values.get("folder_size", 1)
    check(_positive(side) and side <= LARGEST_SIDE, "folder_size", f"a whole number from 1 to {LARGEST_SIDE}")
    folder = values["dataset"].startswith(FOLDER)
    check("folder_size" not in values or folder, "folder_size", f"a data set of one's own, {FOLDER}PATH; leave it out")
    included = values.get("included", {})
    check(isinstance(included, Mapping) and {*included} <= {"settings", "methods"}, "included", _INCLUDED)
    for part, prefix in ((values, ""), (included, "included.")):
        settings, methods = part.get("settings", {}), part.get("methods", {})
        check(isinstance(settings, Mapping), f"{prefix}settings", f"a table, [{prefix}settings]")
        tables = isinstance(methods, Mapping) and all(isinstance(table, Mapping) for table in methods.values())
        check(tables, f"{prefix}methods", f"one table per method, such as [{prefix}methods.more]")
    return Recipe(name=name, **values)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _label(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, not {seed}.")


def _check_labels(name: str, classes: int, labels: list[int]) -> None:
    if beyond := [label for label in labels if label >= classes]:
        raise InputError(f"{name} has {classes} classes, so there is no label {beyond[0]}.")


def _only(dataset: Dataset, order: list[int], labels: list[int]) -> tuple[Dataset, list[int]]:
    """The images of these ``labels``, which become 0, 1, ... in the data set's order, and ``order`` without others."""
    _check_labels(dataset.name, len(dataset.classes), labels)
    number = {label: place for place, label in enumerate(sorted(labels))}
    train, test = (np.isin(y, labels) for y in (dataset.y_train, dataset.y_test))
    renumbered = np.array([number.get(label, -1) for label in range(len(dataset.classes))], np.int64)
    dataset = replace(
        dataset,
        x_train=some(dataset.x_train, train),
        y_train=renumbered[dataset.y_train[train]],
        x_test=some(dataset.x_test, test),
        y_test=renumbered[dataset.y_test[test]],
        classes=tuple(dataset.classes[label] for label in number),
    )
    return dataset, [number[label] for label in order if label in number]


def _limited(dataset: Dataset, train: int | None, test: int | None) -> Dataset:
    """The first ``train`` and ``test`` images of each class, in file order."""
    if train is not None:
        keep = _first(dataset.y_train, train, "train_per_class")
        dataset = replace(dataset, x_train=some(dataset.x_train, keep), y_train=dataset.y_train[keep])
    if test is not None:
        keep = _first(dataset.y_test, test, "test_per_class")
        dataset = replace(dataset, x_test=some(dataset.x_test, keep), y_test=dataset.y_test[keep])
    return dataset


def _first(y: Labels, count: int, key: str) -> NDArray[np.intp]:
    """Indices of the first ``count`` images of each class, in file order."""
    if count < 1:
        raise InputError(f"{key} must be at least 1, not {count}.")
    return np.sort(np.concatenate([np.flatnonzero(y == label)[:count] for label in np.unique(y)]))


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise InputError(f"the validation share must be between 0 and 1, not {share}.")


def _hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """``share`` of each class's training images (rounded, at least one) as the test split, in file order."""
    _check_share(share)
    rng = np.random.default_rng([seed, 1])  # 1: independent of the draw of the random class order
    held = np.zeros(len(dataset.y_train), bool)
    for label, name in enumerate(dataset.classes):
        mine = rng.permutation(np.flatnonzero(dataset.y_train == label))
        count = max(1, round(share * len(mine)))
        if count >= len(mine):
            raise InputError(
                f"class {name!r} has {len(mine)} training image(s); holding out {share:g} of them for validation "
                "leaves none to train on."
            )
        held[mine[:count]] = True
    x, y = dataset.x_train, dataset.y_train
    return replace(dataset, x_train=some(x, ~held), y_train=y[~held], x_test=some(x, held), y_test=y[held])
