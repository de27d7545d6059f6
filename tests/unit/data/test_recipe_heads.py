"""The heads of recipes and suites promise what the records in results/ and the paper's tables say."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import pytest

from morecl.catalogue import METHODS, SHIPPED
from morecl.data import load_recipe, recipe_names
from morecl.records import Record, read_record
from morecl.report.paper import paper
from morecl.run import RunRequest

ROOT = Path(__file__).parents[3]
METHOD = "more"  # the default of `morecl run`
POINTS = 1.0
FACTOR = 2.0


def head(package: str, folder: str, name: str) -> str:
    """The comment at the top of a recipe or suite, as one line."""
    text = (files(package) / folder / f"{name}.toml").read_text(encoding="utf-8")
    lines = text.split("\n\n")[0].splitlines()
    return " ".join(" ".join(line.removeprefix("#") for line in lines).split())


def recipe_head(name: str) -> str:
    return head("morecl.data", "recipes", name)


@cache
def records(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.rglob("result.json"))]


def has_the_recipes_settings(record: Record) -> bool:
    """Whether ``record`` is of a plain ``morecl run BENCHMARK``; backbone, image size, seed and machine may differ."""
    if record.benchmark not in recipe_names() or record.method != METHOD or record.data.scored_on != "test":
        return False
    if record.class_order_name != "0":
        return False
    run = RunRequest(method=METHOD, benchmark=record.benchmark).resolve()
    free = {*type(run.config).with_role("repetition", "machine", "weights"), "precision", "compile"}
    free |= {"image_size"} if record.backbone.name != SHIPPED else set()
    plain = run.config.record()
    compared = (plain.keys() & record.config.keys()) - free  # a setting that one lacks is of another version
    return all(record.config[key] == plain[key] for key in compared)


def cited(name: str) -> tuple[dict[str, float], list[Record]] | None:
    """The numbers that a recipe's head promises, and the records it names for them."""
    promise = re.search(r"Should reach: (?P<numbers>ACA [^()]*)\((?P<path>results/[\w./-]+)\)", recipe_head(name))
    if promise is None:
        return None
    numbers = {key: float(value) for key, value in re.findall(r"(ACA|AIA) (\d+\.\d+)", promise["numbers"])}
    return numbers, records(ROOT / promise["path"])


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_promises_what_its_records_have(name: str) -> None:
    ours = [record for record in records(ROOT / "results") if record.benchmark == name]
    promise = cited(name)
    assert (promise is not None) == any(has_the_recipes_settings(record) for record in ours)
    if promise is None:
        return
    numbers, named = promise
    assert named and all(record.benchmark == name and has_the_recipes_settings(record) for record in named)
    assert numbers["ACA"] == pytest.approx(fmean(record.metrics.aca for record in named), abs=POINTS)
    assert numbers["AIA"] == pytest.approx(fmean(record.metrics.aia for record in named), abs=POINTS)


@pytest.mark.parametrize("name", recipe_names())
def test_the_time_on_a_cpu_is_that_of_the_records(name: str) -> None:
    promise = cited(name)
    measured = [r.seconds["total"] for r in promise[1] if r.device.startswith("cpu")] if promise else []
    promised = [int(seconds) for seconds in re.findall(r"(\d+) s on \d+ CPU core", recipe_head(name))]
    assert bool(promised) == bool(measured)
    for seconds in promised:
        assert fmean(measured) / FACTOR <= seconds <= fmean(measured) * FACTOR


@pytest.mark.parametrize("name", recipe_names())
def test_the_number_of_training_images_is_epochs_times_images(name: str) -> None:
    found = re.search(r"([\d,]+) training images \((\d+) epochs of ([\d,]+)\)", recipe_head(name))
    assert found is not None
    total, epochs, images = (int(number.replace(",", "")) for number in found.groups())
    assert epochs == load_recipe(name).settings_for(METHOD, included=True)["epochs"]
    assert total == epochs * images
    if promise := cited(name):
        assert {record.data.train_images for record in promise[1]} == {images}


@pytest.mark.parametrize("name", recipe_names())
def test_the_papers_numbers_are_those_of_its_tables(name: str) -> None:
    text = recipe_head(name).partition(" Paper")[2]
    table = paper()["numbers"]["main"]
    expected = []
    for metric in ("aca", "aia", "auc", "iauc"):
        if name in table[metric]:
            mean, deviation = table[metric][name][METHOD]
            expected.append((metric.upper(), f"{mean:.2f}", f"{deviation:.2f}" if deviation else ""))
    assert re.findall(r"\b(ACA|AIA|AUC|IAUC) (\d+\.\d+)(?: ± (\d+\.\d+))?", text) == expected


def test_the_smoke_suite_takes_as_long_as_its_records() -> None:
    text = head("morecl.suite", "suites", "smoke")
    found = re.search(r"about (\d+) minutes on 2 CPU cores; a run takes at most (\d+) minutes", text)
    assert found is not None
    together, longest = (60 * int(minutes) for minutes in found.groups())
    seconds = [record.seconds["total"] for record in records(ROOT / "results" / "smoke-digits")]
    assert len(seconds) == len(METHODS)
    assert sum(seconds) / 2 / FACTOR <= together <= sum(seconds) / 2 * FACTOR
    assert max(seconds) <= longest


def test_summaries_tell_recipes_of_the_same_data_apart() -> None:
    summaries = {name: load_recipe(name).summary for name in recipe_names()}
    assert summaries["cifar10-5t"] == "cifar10, 5 tasks"
    assert summaries["cifar10-5t-1k"] == "cifar10, 5 tasks, 1,000 training and 400 test images per class"
    assert len(set(summaries.values())) == len(summaries)
