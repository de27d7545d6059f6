"""Suites: a TOML file names methods x benchmarks x seeds; ``plan`` turns it into a list of runs.

    description = "one line for `morecl list suites`"
    seeds = [0, 1, 2, 3, 4]
    class_order = "seed"        # class order k for seed k, as in the paper's five runs; or 0 to 4, or "random"

    [settings]                  # used by every method that has the setting, as in a benchmark's recipe
    epochs = 5

    [methods.hat]               # overrides them for one method
    lr = 0.001

    [[runs]]                    # every method on every benchmark with every seed; repeatable
    methods = ["more", "hat"]
    benchmarks = ["cifar10-5t"]
    variant = "no-coefficient"  # part of the folder's name; required if this [[runs]] sets anything below
    settings = { coefficient = false }
    tasks = 1                   # or the classes of each, [4, 1, 5]; also: train_per_class, test_per_class, validation

A run's folder is OUT/BENCHMARK/METHOD[-VARIANT]/order-K-seed-S. It does not depend on the suite, so suites with the
same OUT share runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from morecl.data import ORDERS
from morecl.errors import InputError, placed, unknown_name
from morecl.methods import method_class
from morecl.run import RunRequest, default_folder
from morecl.run.request import resolve_backbone

WITH_SEED = "seed"

_Number = TypeVar("_Number", int, float)
_Count = Annotated[int, Field(ge=1)]
_Order = Annotated[str, BeforeValidator(lambda order: str(order) if type(order) is int else order)]
_COUNT = "a whole number of at least 1"
_SEEDS = "a list of whole numbers, such as [0, 1, 2]"


class Group(BaseModel):
    """One ``[[runs]]`` of a suite. ``seeds``: only those of the suite's seeds, for runs in which chance has no part.

    Here and in :class:`Suite`, a field's description is what a message says that it expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    methods: list[str] = Field(min_length=1, description='a list of methods, such as ["more", "hat"]')
    benchmarks: list[str] = Field(min_length=1, description='a list of benchmarks, such as ["cifar10-5t"]')
    variant: str | None = Field(
        None, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description='small letters and digits, such as "lr-3" or "no-memory"'
    )
    settings: dict[str, Any] = Field({}, description="a table, such as { epochs = 5 }")
    seeds: list[int] | None = Field(None, min_length=1, description=_SEEDS)
    tasks: _Count | Annotated[list[_Count], Field(min_length=1)] | None = Field(
        None, description="a whole number of at least 1, or the number of classes of each task, such as [4, 1, 5]"
    )
    train_per_class: _Count | None = Field(None, description=_COUNT)
    test_per_class: _Count | None = Field(None, description=_COUNT)
    validation: float | None = Field(None, gt=0, lt=1, description="a number between 0 and 1, such as 0.1")

    def options(self) -> dict[str, Any]:
        """What is passed to each run besides its settings."""
        return self.model_dump(include={"tasks", "train_per_class", "test_per_class", "validation"})


class Suite(BaseModel):
    """A suite as its file describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    description: str = Field(description="one line of text")
    seeds: list[int] = Field([0], min_length=1, description=_SEEDS)
    class_order: _Order = Field(WITH_SEED, description='"seed", a whole number from 0 to 4, or "random"')
    settings: dict[str, Any] = Field({}, description="a table, [settings]")
    methods: dict[str, dict[str, Any]] = Field(
        {}, description="settings of one method, such as [methods.hat]; the methods to run belong under [[runs]]"
    )
    runs: list[Group] = Field(min_length=1, description="at least one table [[runs]]")


@dataclass(frozen=True)
class PlannedRun:
    """A run and its folder."""

    request: RunRequest
    folder: Path
    title: str


def suite_names() -> list[str]:
    """The suites that come with the package, sorted."""
    return sorted(p.name.removesuffix(".toml") for p in _packaged().iterdir() if p.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """A packaged suite, or a user's ``.toml`` file.

    In a file, a benchmark that is a path (``folder:PATH`` or ``FILE.toml``) and the file of a backbone are relative to
    that file.
    """
    if name in suite_names():
        return _parse(name, (_packaged() / f"{name}.toml").read_text(encoding="utf-8"), f"suite {name}")
    if not name.endswith(".toml"):
        raise unknown_name("suite", name, (*suite_names(), "FILE.toml"))
    file = Path(name).expanduser()
    if not file.is_file():
        raise InputError(f"there is no suite file {file}; packaged suites: {', '.join(suite_names())}.")
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not a text file in UTF-8 ({error}).") from error
    suite = _parse(file.stem, text, str(file))
    here = file.resolve().parent
    with placed(str(file)):
        settings = resolve_backbone(suite.settings, here)
        methods = {method: resolve_backbone(values, here) for method, values in suite.methods.items()}
        groups = [_group_beside(here, group) for group in suite.runs]
    return suite.model_copy(update={"settings": settings, "methods": methods, "runs": groups})


def plan(
    suite: Suite,
    out: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    data_root: Path | None = None,
) -> list[PlannedRun]:
    """All runs of ``suite``, checked and without duplicates: first all runs of the first seed, then of the second, ...

    Args:
        out: folder of all runs.
        settings: override [settings] and [methods.NAME] of the file, for every method that has them; what a [[runs]]
            sets stays, since it is what makes the variant (:func:`kept_settings`).
        seeds: replace the file's seeds.
    """
    given = settings or {}
    own = {key for values in (*suite.methods.values(), *(group.settings for group in suite.runs)) for key in values}
    if "seed" in own | suite.settings.keys() | given.keys():
        raise InputError("a suite has no setting `seed`: use seeds = [...] in its file, or --seeds")
    seeds = suite.seeds if seeds is None else seeds
    used = {method for group in suite.runs for method in group.methods}
    if idle := sorted(suite.methods.keys() - used):
        raise InputError(f"suite {suite.name}: [methods.{idle[0]}] has settings of a method that it does not run")
    for method, values in suite.methods.items():
        method_class(method).Config.parse(values)
    known = {
        key for group in suite.runs for method in group.methods for key in method_class(method).Config.model_fields
    }
    for key in (*suite.settings, *given):
        if key not in known:
            raise unknown_name("setting", key, known)
    for group in suite.runs:
        if beyond := sorted({*(group.seeds or ())} - {*suite.seeds}):
            raise InputError(
                f"suite {suite.name}: [[runs]] has seeds = {beyond}, which are not among the suite's seeds"
            )
    planned: dict[Path, PlannedRun] = {}
    left_out = False
    for seed in seeds:
        for group in suite.runs:
            _check_variant(suite, group)
            if group.seeds is not None and seed not in group.seeds:
                left_out = True
                continue
            for benchmark in group.benchmarks:
                for method in group.methods:
                    common = {**suite.settings, **suite.methods.get(method, {}), **given}
                    run = _planned(suite, group, benchmark, method, seed, common, out, data_root)
                    before = planned.setdefault(run.folder, run)
                    if before.request != run.request:
                        raise InputError(
                            f"suite {suite.name}: two different runs would go to {run.folder}; give one a `variant`"
                        )
    if not planned:
        raise InputError(f"suite {suite.name} has no run with seed {', '.join(map(str, seeds))}")
    if not left_out:  # else one of those may need what seems to have no effect
        _refuse_idle(suite, given, list(planned.values()))
    return list(planned.values())


def kept_settings(suite: Suite, given: Mapping[str, Any]) -> list[str]:
    """A line for each variant that has other values than those ``given`` for all runs, and keeps them."""
    lines: dict[str, None] = {}
    for group in suite.runs:
        kept = [f"{key}={value}" for key, value in group.settings.items() if key in given and given[key] != value]
        if kept:
            lines[f"variant {group.variant} keeps its own {', '.join(kept)}"] = None
    return list(lines)


def _refuse_idle(suite: Suite, given: Mapping[str, Any], runs: Sequence[PlannedRun]) -> None:
    """Refuse settings that none of the runs uses; where only some do not use one, it is left out there."""
    values_of = {key: [run.request.settings[key] for run in runs if key in run.request.settings] for key in given}
    if kept := [key for key, found in values_of.items() if found and given[key] not in found]:
        raise InputError(
            f"suite {suite.name}, --set: every [[runs]] that could use {', '.join(kept)} has a value of its own"
        )
    tables = {"--set": given, "[settings]": suite.settings}
    tables |= {f"[methods.{method}]": values for method, values in suite.methods.items()}
    for place, values in tables.items():
        meant = [run for run in runs if place in ("--set", "[settings]", f"[methods.{run.request.method}]")]
        used = {key for run in meant for key in run.request.settings}
        if idle := [key for key in values if key not in used]:
            raise InputError(f"suite {suite.name}, {place}: {', '.join(idle)} would change nothing in any of its runs")


def number_list(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """``"0,1,2"`` as numbers, without duplicates."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        numbers = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} wants {numbers} separated by commas, not {text!r}") from error


def _planned(
    suite: Suite,
    group: Group,
    benchmark: str,
    method: str,
    seed: int,
    common: Mapping[str, Any],
    out: Path,
    data_root: Path | None,
) -> PlannedRun:
    order = str(seed) if suite.class_order == WITH_SEED else suite.class_order
    if order not in ORDERS:
        raise InputError(
            f"suite {suite.name}: there is no class order {order!r} (known: {', '.join(ORDERS)}). By default seed k "
            'uses class order k, so seeds are 0 to 4; class_order = "random" allows any seed.'
        )
    variant = f", variant {group.variant}" if group.variant else ""
    with placed(f"suite {suite.name}, {method} on {benchmark}{variant}"):
        chosen = method_class(method).Config.choose({**common, **group.settings})
        request = RunRequest(
            method=method,
            benchmark=benchmark,
            settings=chosen | group.settings,
            class_order=order,
            seed=seed,
            data_root=str(data_root) if data_root else None,
            **group.options(),
        )
        run = request.resolve()
        idle = (chosen.keys() & run.config.switched_off()) - group.settings.keys()
        if idle:  # as settings that the method does not have
            kept = {key: value for key, value in request.settings.items() if key not in idle}
            request = request.model_copy(update={"settings": kept})
            run = request.resolve()
        run.check()
        folder = default_folder(out, run.recipe.name, method, order, seed, group.variant)
        run.check_folder(folder)
    return PlannedRun(request, folder, f"{run.recipe.name} {folder.parent.name} order {order} seed {seed}")


def _check_variant(suite: Suite, group: Group) -> None:
    own = [*group.settings, *(key for key, value in group.options().items() if value is not None)]
    if own and not group.variant:
        raise InputError(
            f"suite {suite.name}: a [[runs]] sets {', '.join(own)} but has no `variant` to name its folders"
        )


def _packaged() -> Any:
    return files("morecl.suite") / "suites"


def _group_beside(folder: Path, group: Group) -> Group:
    """``group``, whose relative paths are relative to ``folder``."""
    benchmarks = [_beside(folder, benchmark) for benchmark in group.benchmarks]
    return group.model_copy(update={"benchmarks": benchmarks, "settings": resolve_backbone(group.settings, folder)})


def _beside(folder: Path, benchmark: str) -> str:
    """``benchmark``; if it is a relative path, relative to ``folder``."""
    if benchmark.startswith("folder:"):
        return f"folder:{folder / Path(benchmark.removeprefix('folder:')).expanduser()}"
    return str(folder / Path(benchmark).expanduser()) if benchmark.endswith(".toml") else benchmark


def _parse(name: str, text: str, where: str) -> Suite:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is not valid TOML: {error}.") from error
    groups = values.get("runs")
    tables = [(values, set(Suite.model_fields) - {"name"})]
    tables += [(group, set(Group.model_fields)) for group in groups] if isinstance(groups, list) else []
    for table, known in tables:
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                raise unknown_name(f"key in {where}", key, known)
    try:
        return Suite(name=name, **values)
    except ValidationError as error:
        problems = dict.fromkeys(_problem(values, e["loc"]) for e in error.errors())
        raise InputError(f"{where}: {'. '.join(problems)}") from error


def _problem(values: Mapping[str, Any], place: Sequence[int | str]) -> str:
    """What was expected at ``place``, where the model found an error."""
    table, fields, title = values, Suite.model_fields, ""
    if len(place) > 1 and place[0] == "runs":
        table, fields, title = values["runs"][place[1]], Group.model_fields, f"[[runs]] number {int(place[1]) + 1}: "
        if len(place) == 2:
            return f"{title}expected a table"
        place = place[2:]
    key = str(place[0])
    found = f"{key} = {table[key]!r:.60}" if key in table else f"{key} is missing"
    return f"{title}{found}; expected {fields[key].description}"
