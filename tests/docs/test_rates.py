"""The learning rates in the recipes are those that the records of the searches say, and the tables used them."""

from __future__ import annotations

from pathlib import Path

import pytest

from morecl.catalogue import METHODS
from morecl.data import load_recipe
from morecl.records import Record, read_record
from morecl.suite.plan import load_suite, plan

ROOT = Path(__file__).resolve().parents[2] / "results"
# the best rate on held-out images makes training fail on another class order, or in 20 tasks: the next lower is used
LOWERED = {
    ("cifar100-10t", "more"),
    ("cifar100-10t", "more-paper"),
    ("cifar100-10t", "row"),
    ("svhn-5t", "more"),
    ("digits-5t", "icarl"),
    ("tinyimagenet88-8t", "ranpac"),
}
# at the next higher rate training diverged, so there is no record of it
HIGHEST = {
    ("cifar100-10t", "more"),
    ("cifar100-10t", "more-paper"),
    ("cifar100-10t", "row"),
    ("svhn-5t", "more"),
    ("svhn-5t", "tpl"),
    ("svhn-5t", "hat"),
    ("svhn-5t", "more-paper"),
    ("svhn-5t", "more-authors"),
    ("digits-5t", "derpp"),
    ("digits-5t", "gd"),
    ("tinyimagenet88-8t", "more"),
    ("tinyimagenet88-8t", "row"),
    ("tinyimagenet88-8t", "ranpac"),
}
# how often training diverged in a search in which it counts as a try, at rates above those that are recorded
DIVERGED = {"icarl": 1, "more": 1, "morerp": 1, "row": 1, "ranpac": 1, "tpl": 2}
FOLDERS = {"digits-5t": "digits-rates", "tinyimagenet88-8t": "tinyimagenet88-rates"}  # others: shipped-rates
PRESETS = {"more-paper": "paper", "more-authors": "authors"}  # MORE with other back-updates, by folder


def tried(folder: str, benchmark: str) -> dict[str, dict[float, tuple[float, float]]]:
    """ACA and AIA on held-out images by method and rate; AIA decides where ACA is the same."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for path in (ROOT / folder / benchmark).glob("*/lr-*/order-*/result.json"):
        record = read_record(path)
        assert record.data.scored_on == "validation"
        name = path.parts[-4]
        assert record.config.get("preset") == PRESETS.get(name)
        assert record.method == ("more" if name in PRESETS else name)
        found.setdefault(name, {})[record.config["lr"]] = record.metrics.aca, record.metrics.aia
    return found


def best_of(scores: dict[float, tuple[float, float]], benchmark: str, name: str) -> float:
    """The rate to be used. It is at no end of those tried, unless the next one fails."""
    best = max(scores, key=scores.__getitem__)
    assert min(scores) < best and (best < max(scores) or (benchmark, name) in HIGHEST), name
    if (benchmark, name) in LOWERED:
        return max(rate for rate in scores if rate < best)
    return best


@pytest.mark.parametrize("benchmark", ["cifar10-5t", "cifar100-10t", "svhn-5t", "digits-5t", "tinyimagenet88-8t"])
def test_rates_of_the_included_backbone_are_the_best(benchmark: str) -> None:
    recipe = load_recipe(benchmark)
    searches = tried(FOLDERS.get(benchmark, "shipped-rates"), benchmark)
    chosen = recipe.included["methods"]
    assert searches.keys() - PRESETS.keys() == chosen.keys() - {"single"}
    assert chosen.get("single", chosen["more"]) == chosen["more"]
    for method, scores in searches.items():
        if method == "pass" and benchmark not in FOLDERS:  # searched for together with a weight, see below
            continue
        best = best_of(scores, benchmark, method)
        assert recipe.settings_for("more" if method in PRESETS else method, included=True)["lr"] == best, method
        if benchmark == "tinyimagenet88-8t":  # all have had five tries
            assert len(scores) + DIVERGED.get(method, 0) == 5
        else:
            assert len(scores) >= (4 if (benchmark, method) in HIGHEST else 5)


def test_what_is_said_of_the_rates_on_cifar100_in_20_tasks() -> None:
    """The table has the rates of 10 tasks. Rates beside them were tried: what the page says that they would gain."""
    recipe, gains = load_recipe("cifar100-20t"), {}
    for method, scores in tried("shipped-rates", "cifar100-20t").items():
        used = recipe.settings_for("more" if method in PRESETS else method, included=True)["lr"]
        gain = round(max(scores.values())[0] - scores[used][0], 1)
        if len(scores) < 4 and gain:  # the best is the highest that trains
            assert max(scores, key=scores.__getitem__) == max(scores) == 0.2, method
        gains[method] = gain
    named = {"ranpac": 2.8, "gd": 1.4, "owm": 1.0, "more-paper": 0.9, "hal": 0.9, "hat": 0.9, "agem": 0.7, "more": 0.5}
    named |= {"joint": 0.2, "row": 0.1, "tpl": 0.1}
    assert {method: gain for method, gain in gains.items() if gain} == named
    assert len(gains) == 18


@pytest.mark.parametrize("benchmark", ["cifar10-5t", "cifar100-10t", "svhn-5t"])
def test_pass_has_the_highest_weight_at_which_no_rate_fails_and_its_best_rate(benchmark: str) -> None:
    """Of the weights with four rates or more. On CIFAR10-5T the next lower rate: at the best, a higher weight fails."""
    by_weight: dict[float, dict[float, float]] = {}
    for path in (ROOT / "pass-weights-rates" / benchmark).glob("*-proto-1-*/order-*/result.json"):
        record = read_record(path)
        assert record.data.scored_on == "validation"
        by_weight.setdefault(record.config["kd_weight"], {})[record.config["lr"]] = record.metrics.aca
    if benchmark == "cifar10-5t":
        by_weight[1000.0][0.005] = 0.0  # diverged, so there is no record of it
    best_of_all = max(aca for rates in by_weight.values() for aca in rates.values())
    sound = [
        weight for weight, rates in by_weight.items() if len(rates) >= 4 and min(rates.values()) > 0.6 * best_of_all
    ]
    assert len(sound) < len(by_weight)
    rates = by_weight[max(sound)]
    best = max(rates, key=rates.__getitem__)
    assert min(rates) < best < max(rates)
    if benchmark == "cifar10-5t":
        best = max(rate for rate in rates if rate < best)
    settings = load_recipe(benchmark).settings_for("pass", included=True)
    assert (settings["kd_weight"], settings["lr"]) == (max(sound), best)


def test_what_is_said_of_the_rates_of_cifar100_on_tiny_imagenet88() -> None:
    text = " ".join((ROOT / "tinyimagenet88-rates" / "README.md").read_text(encoding="utf-8").split())
    of_cifar, behind = load_recipe("cifar100-10t"), {}
    for method, scores in tried("tinyimagenet88-rates", "tinyimagenet88-8t").items():
        rate = of_cifar.settings_for(method, included=True)["lr"]
        if rate != max(scores, key=scores.__getitem__):
            behind[method] = round(max(scores.values())[0] - scores[rate][0], 1)
    assert behind == {
        "tpl": 1.9,
        "eeil": 1.2,
        "ranpac": 1.0,
        "derpp": 0.8,
        "agem": 0.7,
        "row": 0.7,
        "more": 0.2,
        "gd": 0.0,
    }
    assert "1.9 points (TPL), 1.2 (EEIL), 1.0 (RanPAC), 0.8 (DER++), 0.7 (A-GEM, ROW), 0.2 (MORE) and 0.0 (GD)" in text
    assert "are the best here, too, for eight of the sixteen methods" in text


@pytest.mark.parametrize("name", ["cifar100-20t", "cifar100-unequal", "cifar100-uneven-40", "cifar100-first-one"])
def test_other_streams_of_cifar100_have_the_same_rates(name: str) -> None:
    recipe, other = load_recipe(name), load_recipe("cifar100-10t")
    assert (recipe.methods, recipe.included["methods"]) == (other.methods, other.included["methods"])


@pytest.mark.parametrize("name", ["tinyimagenet-5t", "tinyimagenet-10t"])
def test_tiny_imagenet_has_the_rates_of_cifar100_with_vit_tiny_alone(name: str) -> None:
    recipe, other = load_recipe(name), load_recipe("cifar100-10t")
    assert recipe.methods.keys() == other.methods.keys()
    for method in recipe.methods:
        for backbone, lr in ((False, other.methods[method]["lr"]), (True, 0.005)):
            settings = recipe.settings_for(method, included=backbone)
            assert settings["lr"] == lr
            assert settings.get("back_update", True) == (method not in ("more", "morerp"))


def test_cifar10_with_few_images_has_the_rates_of_all_images_but_for_more() -> None:
    recipe, other = load_recipe("cifar10-5t-1k"), load_recipe("cifar10-5t")
    assert recipe.methods.keys() == other.methods.keys()
    for method in recipe.methods:
        papers = method in ("more", "morerp", "single")
        lr = recipe.settings_for(method, included=False)["lr"]
        assert lr == (0.005 if papers else other.methods[method]["lr"])
        assert recipe.settings_for(method, included=True)["lr"] == 0.005


def test_the_papers_more_has_the_rate_of_the_other_more() -> None:
    """Which is the best for it, too, by the searches above."""
    found = [run.request for run in plan(load_suite("shipped"), Path("runs")) if "preset" in run.request.settings]
    assert {request.benchmark for request in found} == {"cifar10-5t", "cifar100-10t", "cifar100-20t", "svhn-5t"}
    for request in found:
        settings = load_recipe(request.benchmark).settings_for("more", included=True)
        assert {key: request.settings[key] for key in ("lr", "epochs")} == {
            key: settings[key] for key in ("lr", "epochs")
        }


def test_rates_of_other_backbones_are_the_best_on_average() -> None:
    recipe = load_recipe("cifar10-5t")
    searches = [tried("frontier-rates", benchmark) for benchmark in ("cifar10-5t", "cifar100-10t")]
    for method in searches[0].keys() - {"slda"}:
        one, other = (search[method] for search in searches)
        for scores in (one, other):
            best_of(scores, "", method)
            assert 4 <= len(scores) <= 5
        means = {rate: one[rate][0] + other[rate][0] for rate in one.keys() & other.keys()}
        assert len(means) == 4
        assert recipe.settings_for(method, included=False)["lr"] == max(means, key=means.__getitem__), method


@pytest.mark.parametrize("benchmark", ["cifar10-5t", "cifar100-10t"])
def test_rates_of_the_other_methods_with_other_backbones_are_the_best_of_each_benchmark(benchmark: str) -> None:
    recipe, searches = load_recipe(benchmark), tried("strong-rates", benchmark)
    again = searches.keys() & tried("frontier-rates", benchmark).keys()  # with fewer images, for comparison
    assert again <= {"icarl", "gd"}
    for method in searches.keys() - again:
        assert len(searches[method]) >= 4
        best = best_of(searches[method], benchmark, method)
        assert recipe.settings_for(method, included=False)["lr"] == best, method
    untrained = {name for name, method in METHODS.items() if not method.trains}
    searched = (searches.keys() | tried("frontier-rates", benchmark).keys()) - untrained
    assert searched | {"morerp", "single"} == recipe.methods.keys() == METHODS.keys() - untrained


@pytest.mark.parametrize("name", ["digits-unequal", "digits-one-by-one"])
def test_other_streams_of_digits_have_the_same_rates(name: str) -> None:
    assert load_recipe(name).included["methods"] == load_recipe("digits-5t").included["methods"]


@pytest.mark.parametrize(
    ("folder", "included", "epochs"),
    [
        ("frontier", False, 5),
        ("shipped", True, 5),
        ("tinyimagenet88", True, 5),
        ("unequal-cifar100", True, 5),
        ("smoke-digits", True, 8),
        ("unequal-digits", True, 8),
    ],
)
def test_the_tables_have_the_rates_of_the_recipes(folder: str, included: bool, epochs: int) -> None:
    def wrong(record: Record) -> bool:
        settings = load_recipe(record.benchmark).settings_for(record.method, included=included)
        return any(record.config[key] != settings[key] for key in ("lr", "kd_weight") if key in settings)

    records = [read_record(path) for path in (ROOT / folder).rglob("result.json")]
    trained = [record for record in records if record.method not in ("slda", "ncm", "csc")]
    assert trained and {record.config["epochs"] for record in trained} == {epochs}
    assert not {(record.benchmark, record.method) for record in trained if wrong(record)}
