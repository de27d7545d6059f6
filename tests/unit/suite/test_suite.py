"""Suites: planning runs from a file, recognising finished runs, running processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

from morecl.data import load_recipe, recipe_names
from morecl.errors import InputError
from morecl.files import write_json
from morecl.locking import BUSY
from morecl.methods import METHODS, method_class
from morecl.records import write_record
from morecl.report import paper
from morecl.run import RESULT, RUN, RunRequest, inputs, launch
from morecl.run.inputs import InputsNow
from morecl.suite import child, here
from morecl.suite import run as run_suite
from morecl.suite.here import Here, visible_cards
from morecl.suite.plan import Group, PlannedRun, Suite, kept_settings, load_suite, number_list, plan, suite_names
from synthetic import make_record
from tiny import BACKBONE
from waiting import until

OUT = Path("out")
RESULTS = Path(__file__).resolve().parents[3] / "results"
PAPERS_FIVE = ["cifar10-5t", "cifar100-10t", "cifar100-20t", "tinyimagenet-5t", "tinyimagenet-10t"]


def suite_of(*groups: dict[str, Any], **values: Any) -> Suite:
    return Suite(name="mine", description="a test", runs=[Group(**group) for group in groups], **values)


def one(method: str = "finetune", benchmark: str = "digits-5t", **values: Any) -> dict[str, Any]:
    return {"methods": [method], "benchmarks": [benchmark], **values}


def folders(runs: list[PlannedRun]) -> list[str]:
    return [str(run.folder.relative_to(OUT)) for run in runs]


# ---- planning ----------------------------------------------------------------------------------------------------


def test_every_method_on_every_benchmark_first_seed_first() -> None:
    group = {"methods": ["ncm", "finetune"], "benchmarks": ["digits-5t", "mnist-5t"]}
    runs = plan(suite_of(group, seeds=[0, 3]), OUT, data_root=Path("data"))
    assert folders(runs) == [
        f"{benchmark}/{method}/order-{k}-seed-{k}"
        for k in (0, 3)
        for benchmark in ("digits-5t", "mnist-5t")
        for method in ("ncm", "finetune")
    ]
    assert runs[-1].request == RunRequest(
        method="finetune", benchmark="mnist-5t", class_order="3", seed=3, data_root="data"
    )


def test_class_order_may_be_fixed_or_random() -> None:
    for order in ("2", "random"):
        runs = plan(suite_of(one(), seeds=[0, 9], class_order=order), OUT)
        assert [run.request.class_order for run in runs] == [order, order]
        assert folders(runs)[1] == f"digits-5t/finetune/order-{order}-seed-9"
    with pytest.raises(InputError, match=r"no class order '9'.*random"):
        plan(suite_of(one(), seeds=[9]), OUT)


def test_settings_go_to_the_methods_that_have_them_and_a_variant_keeps_its_own() -> None:
    suite = suite_of(
        {"methods": ["ncm", "finetune"], "benchmarks": ["digits-5t"]},
        one(variant="slow", settings={"lr": 0.1}, tasks=2),
        settings={"bottleneck": 7, "lr": 0.2},
    )
    ncm, plain, slow = plan(suite, OUT, settings={"bottleneck": 3, "lr": 0.3, "device": "cpu"})
    assert ncm.request.settings == {"device": "cpu"}  # it trains nothing
    assert plain.request.settings == {"bottleneck": 3, "lr": 0.3, "device": "cpu"}
    assert slow.request.settings == {"bottleneck": 3, "lr": 0.1, "device": "cpu"}
    assert (plain.request.tasks, slow.request.tasks) == (None, 2)
    assert slow.folder == OUT / "digits-5t" / "finetune-slow" / "order-0-seed-0"


def test_the_same_run_named_twice_is_one_run() -> None:
    assert len(plan(suite_of(one(), one()), OUT)) == 1
    with pytest.raises(InputError, match="two different runs"):
        plan(suite_of(one(variant="a", tasks=2), one(variant="a", tasks=3)), OUT)


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        (one("finetun"), {}, "unknown method 'finetun'; did you mean 'finetune'"),
        (one(benchmark="digit-5t"), {}, "unknown benchmark 'digit-5t'; did you mean 'digits-5t'"),
        (one(), {"epoch": 1}, "unknown setting 'epoch'; did you mean 'epochs'"),
        (one("ncm"), {"bottleneck": 1}, "unknown setting 'bottleneck'"),
        (one("ncm", variant="a", settings={"bottleneck": 1}), {}, "'ncm' has no setting bottleneck"),
        (one(), {"epochs": 0}, "bad setting: epochs=0"),
        (one(), {"seed": 1}, "--seeds"),
        (one(settings={"epochs": 1}, tasks=2), {}, "sets epochs, tasks but has no `variant`"),
    ],
)
def test_mistakes_are_named_before_anything_runs(group: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(suite_of(group), OUT, settings=settings)


RUNS = "description = 'a'\n[[runs]]\nmethods = ['ncm']\nbenchmarks = ['digits-5t']\nvariant = 'x'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("description = ", "not valid TOML"),
        ("description = 'a'\nruns = []", r"runs = \[\]; expected at least one table \[\[runs\]\]"),
        ("description = 'a'\nruns = 3", "runs = 3; expected at least one table"),
        ("description = 'a'\nseed = [1]\n[[runs]]", "unknown key in .*'seed'; did you mean 'seeds'"),
        ("description = 'a'\n[[runs]]\nmethod = ['more']", "unknown key in .*'method'; did you mean 'methods'"),
        ("description = 'a'\n[[runs]]\nmethods = 'more'", "number 1: methods = 'more'; expected a list"),
        ("description = 'a'\nruns = [3]", r"\[\[runs\]\] number 1: expected a table$"),
        ("description = 'a'\n[[runs]]\nmethods = ['ncm']", "number 1: benchmarks is missing; expected a list"),
        (f"{RUNS}tasks = [4, 0]", r"^\S+: \[\[runs\]\] number 1: tasks = \[4, 0\]; expected a whole number of [^;]*$"),
        (f"{RUNS}validation = 1", "number 1: validation = 1; expected a number between 0 and 1"),
        (f"methods = ['ncm']\n{RUNS}", r"methods = \['ncm'\]; expected settings of one method"),
        (f"methods = {{ncm = 3}}\n{RUNS}", r"methods = {'ncm': 3}; expected settings of one method"),
        (f"seeds = [0.5]\n{RUNS}", r"seeds = \[0.5\]; expected a list of whole numbers"),
        (f"class_order = 1.0\n{RUNS}", 'class_order = 1.0; expected "seed", a whole number from 0 to 4, or "random"'),
        (f"class_order = true\n{RUNS}", 'class_order = True; expected "seed", a whole number from 0 to 4, or "random"'),
        (RUNS.replace("'x'", "'../x'"), "number 1: variant = '../x'; expected small"),
        ("[[runs]]\nmethods = ['ncm']\nbenchmarks = ['a']", "description is missing; expected one line of text"),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_suite(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("order", ["3", "'3'"])
def test_a_number_as_class_order_is_the_same_as_its_text(tmp_path: Path, order: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"class_order = {order}\nseeds = [0, 1]\n{RUNS}")
    assert [run.request.class_order for run in plan(load_suite(str(file)), OUT)] == ["3", "3"]
    file.write_text(f"class_order = 7\n{RUNS}")
    with pytest.raises(InputError, match="no class order '7'"):
        plan(load_suite(str(file)), OUT)


def test_unknown_suites_name_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown suite 'table-mian'; did you mean 'table-main'"):
        load_suite("table-mian")
    with pytest.raises(InputError, match=r"unknown suite 'nope'\. Known"):
        load_suite("nope")
    with pytest.raises(InputError, match=r"no suite file nowhere\.toml"):
        load_suite("nowhere.toml")


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    (tmp_path / "own.toml").write_text('dataset = "digits"\ntasks = 2\n')
    file = tmp_path / "mine.toml"
    file.write_text('description = "a"\n[[runs]]\nmethods = ["ncm"]\nbenchmarks = ["folder:photos", "own.toml"]\n')
    photos, own = plan(load_suite(str(file)), OUT)
    assert photos.request.benchmark == f"folder:{tmp_path / 'photos'}"
    assert own.request.benchmark == str(tmp_path / "own.toml")
    assert folders([photos, own]) == ["folder_photos/ncm/order-0-seed-0", "own/ncm/order-0-seed-0"]


def test_the_file_of_a_backbone_is_relative_to_the_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "suites", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        shutil.copy(BACKBONE, place / "net.safetensors")
    (folder / "mine.toml").write_text("""
description = "a"
[settings]
backbone = "net.safetensors"
[methods.slda]
backbone = "deit_tiny_patch16_224@net.safetensors"
[[runs]]
methods = ["ncm", "slda"]
benchmarks = ["digits-5t"]
[[runs]]
methods = ["ncm"]
benchmarks = ["digits-5t"]
variant = "other"
settings = { backbone = "../suites/other.pt" }
[[runs]]
methods = ["ncm"]
benchmarks = ["digits-5t"]
variant = "named"
settings = { backbone = "deit_tiny_patch16_224" }
""")
    monkeypatch.chdir(elsewhere)
    suite = load_suite("../suites/mine.toml")
    assert [run.request.settings["backbone"] for run in plan(suite, OUT)] == [
        f"{folder}/net.safetensors",
        f"deit_tiny_patch16_224@{folder}/net.safetensors",
        f"{folder}/../suites/other.pt",
        "deit_tiny_patch16_224",
    ]
    given = plan(suite, OUT, settings={"backbone": "net.safetensors"})[0].request.resolve()
    assert given.config.backbone == str(elsewhere / "net.safetensors")  # of the command line


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RUNS, encoding="utf-8-sig")
    assert load_suite(str(file)).description == "a"


def test_tasks_of_unequal_size_reach_the_command_line() -> None:
    (run,) = plan(suite_of(one(variant="unequal", tasks=[1, 7, 2])), OUT)
    command = child.command(run)
    assert command[command.index("--tasks") + 1] == "1,7,2" and run.request.tasks == [1, 7, 2]
    for wrong in ([], [0, 10], 0, [1.5]):
        with pytest.raises(ValueError, match="tasks"):
            suite_of(one(variant="unequal", tasks=wrong))


def test_number_list() -> None:
    assert number_list("--seeds", "0,2,0,1", int) == [0, 2, 1]
    assert number_list("--lr", "1e-3, 0.5", float) == [0.001, 0.5]
    with pytest.raises(InputError, match=r"--seeds wants whole numbers.*'0;1'"):
        number_list("--seeds", "0;1", int)


# ---- packaged suites --------------------------------------------------------------------------------------------


PAPERS_TABLES = (
    "table-main",
    "table-ood",
    "table-half-memory",
    "table-ablation",
    "table-transfer",
    "figure-reduction",
    "asymmetry",
    "svhn",
)


def planned(name: str) -> dict[Path, RunRequest]:
    suite = load_suite(name)
    missing = sorted({method for group in suite.runs for method in group.methods} - set(METHODS))
    if missing:
        pytest.skip(f"not registered: {', '.join(missing)}")
    return {run.folder: run.request for run in plan(suite, OUT)}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_suites_in_results_can_be_planned(file: Path) -> None:
    assert plan(load_suite(str(file)), OUT)


@pytest.mark.parametrize("name", suite_names())
def test_packaged_suites_name_what_there_is(name: str) -> None:
    suite = load_suite(name)
    assert {method for group in suite.runs for method in group.methods} <= set(paper.METHODS)
    assert {benchmark for group in suite.runs for benchmark in group.benchmarks} <= set(recipe_names())
    known = [
        group.model_copy(update={"methods": [method for method in group.methods if method in METHODS]})
        for group in suite.runs
    ]
    assert plan(suite.model_copy(update={"runs": known}), OUT)  # checks every setting


@pytest.mark.parametrize(
    ("name", "methods", "benchmarks", "runs"),
    [
        ("table-main", 10, 5, 265),
        ("table-ood", 10, 5, 265),
        ("table-half-memory", 10, 5, 265),
        ("table-ablation", 1, 3, 90),
        ("table-entries", 10, 5, 50),
        ("table-frozen", 2, 3, 6),
        ("table-transfer", 5, 2, 55),
        ("figure-reduction", 10, 3, 165),
        ("asymmetry", 1, 1, 15),
        ("svhn", 3, 1, 20),
        ("smoke", 20, 1, 20),
        ("unequal", 6, 2, 12),
        ("unequal-cifar100", 6, 3, 18),
        ("frontier", 10, 5, 153),
        ("tinyimagenet88", 19, 1, 100),
        ("shipped", 20, 4, 671),
    ],
)
def test_packaged_suites_have_the_size_that_their_heads_say(
    name: str, methods: int, benchmarks: int, runs: int
) -> None:
    suite = load_suite(name)
    assert len({method for group in suite.runs for method in group.methods}) == methods
    assert len({benchmark for group in suite.runs for benchmark in group.benchmarks}) == benchmarks
    assert sum(len(g.methods) * len(g.benchmarks) * len(g.seeds or suite.seeds) for g in suite.runs) == runs


def test_all_packaged_suites_are_covered_and_smoke_has_every_method() -> None:
    assert len(suite_names()) == 16
    assert set(load_suite("smoke").runs[0].methods) == set(paper.METHODS) >= set(METHODS)


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("table-ood", "table-main"),
        ("table-entries", "table-main"),
        ("figure-reduction", "table-main"),
        ("asymmetry", "table-ablation"),
    ],
)
def test_suites_share_runs(part: str, whole: str) -> None:
    assert planned(part).items() <= planned(whole).items()


def test_runs_without_chance_have_fewer_seeds(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("""
        description = "x"
        seeds = [0, 1, 2]
        runs = [
            { methods = ["more"], benchmarks = ["digits-5t"] },
            { methods = ["ncm"], benchmarks = ["digits-5t"], seeds = [0] },
        ]
    """)
    found = [(run.request.method, run.request.seed) for run in plan(load_suite(str(file)), OUT)]
    assert sorted(found) == [("more", 0), ("more", 1), ("more", 2), ("ncm", 0)]
    assert [run.request.method for run in plan(load_suite(str(file)), OUT, seeds=[1])] == ["more"]
    file.write_text(file.read_text().replace("seeds = [0] }", "seeds = [0, 4] }"))
    with pytest.raises(InputError, match=r"has seeds = \[4\], which are not among the suite's"):
        plan(load_suite(str(file)), OUT)


def test_half_memory_is_half_of_each_recipes_memory() -> None:
    suite = load_suite("table-half-memory")
    for variant in ("half-memory", "half-memory-paper"):
        halved = [group for group in suite.runs if group.variant == variant]
        for group in halved:
            for benchmark in group.benchmarks:
                assert 2 * group.settings["memory_size"] == load_recipe(benchmark).settings["memory_size"]
        wanted = PAPERS_FIVE if variant == "half-memory" else PAPERS_FIVE[:3]  # elsewhere the paper has no back-update
        assert sorted(b for group in halved for b in group.benchmarks) == sorted(wanted)
    for group in suite.runs:
        for method in set(group.methods) & set(METHODS):
            has_memory = "memory_size" in method_class(method).Config.model_fields
            assert has_memory == str(group.variant).startswith("half-memory")


@pytest.mark.parametrize("name", PAPERS_TABLES)
def test_the_papers_own_more_is_in_every_table_beside_ours(name: str) -> None:
    """On the same benchmarks and seeds, with nothing else changed; on Tiny-ImageNet both have no back-update."""
    suite = load_suite(name)

    def settings_of(group: Group) -> dict[str, Any]:
        return {key: value for key, value in group.settings.items() if key != "preset"}

    ours = [
        g for g in suite.runs if "more" in g.methods and "preset" not in g.settings and "back_update" not in g.settings
    ]
    papers = [g for g in suite.runs if g.settings.get("preset") == "paper"]
    assert all(group.methods == ["more"] for group in papers)
    without = {
        name
        for name in PAPERS_FIVE
        if load_recipe(name).settings_for("more", included=False).get("back_update") is False
    }
    assert without == {name for name in PAPERS_FIVE if not paper.paper_settings(name)["back_update"]}
    assert {(b, str(settings_of(g))) for g in ours for b in g.benchmarks if b not in without} == {
        (b, str(settings_of(g))) for g in papers for b in g.benchmarks
    }


def test_settings_of_a_suite_are_left_out_where_they_change_nothing() -> None:
    """As those that a method does not have; one of the variant itself is a mistake."""
    off = one("more", variant="off", settings={"back_update": False})
    suite = suite_of(one("more"), off, settings={"back_update_lr": 0.5})
    plain, without = plan(suite, OUT)
    assert plain.request.settings == {"back_update_lr": 0.5} and without.request.settings == {"back_update": False}
    wrong = one("more", variant="off", settings={"back_update": False, "back_update_lr": 0.1})
    message = "suite mine, more on digits-5t, variant off: back_update_lr would change nothing with"
    with pytest.raises(InputError, match=message):
        plan(suite_of(wrong), OUT)


@pytest.mark.parametrize(
    ("suite", "given", "message"),
    [
        ({"settings": {"epochs": 3}}, {}, r"suite mine, \[settings\]: epochs would change nothing in any of its runs"),
        ({}, {"lr": 0.1, "image_size": 8}, "suite mine, --set: lr would change nothing"),
        ({"methods": {"ncm": {"lr": 0.1}}}, {}, r"suite mine, \[methods.ncm\]: lr would change nothing"),
        ({"settings": {"freeze_backbone": False, "epochs": 3, "image_size": 8}}, {}, None),
    ],
)
def test_settings_that_change_nothing_in_any_run_are_refused(
    suite: dict[str, Any], given: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(InputError, match=message) if message else nullcontext():
        assert len(plan(suite_of(one("ncm"), **suite), OUT, settings=given)) == 1


def test_a_variant_keeps_its_settings_and_says_so() -> None:
    """Whatever is given for all runs: it would no longer be what its name says."""
    suite = suite_of(one(), one(variant="few", settings={"epochs": 5}), one(variant="many", settings={"epochs": 9}))
    given = {"epochs": 9, "lr": 0.1}
    assert [run.request.settings["epochs"] for run in plan(suite, OUT, settings=given)] == [9, 5, 9]
    assert kept_settings(suite, given) == ["variant few keeps its own epochs=5"]
    assert kept_settings(suite, {"lr": 0.1}) == []
    alone = suite_of(one(variant="few", settings={"epochs": 5}), one("ncm"))  # ncm has no epochs
    with pytest.raises(InputError, match=r"--set: every \[\[runs\]\] that could use epochs has a value of its own$"):
        plan(alone, OUT, settings=given)
    assert plan(alone, OUT, settings={"epochs": 5})


def test_a_bad_value_names_the_run_that_cannot_have_it() -> None:
    suite = suite_of(one("more"), one("icarl"))
    with pytest.raises(InputError, match="suite mine, icarl on digits-5t: bad setting: memory_size=0"):
        plan(suite, OUT, settings={"memory_size": 0})


def test_what_the_runs_of_other_seeds_need_is_not_refused() -> None:
    suite = suite_of(one("more", seeds=[0]), one("ncm"), settings={"epochs": 3}, seeds=[0, 1])
    assert [run.request.settings for run in plan(suite, OUT)] == [{"epochs": 3}, {}, {}]
    assert [run.request.settings for run in plan(suite, OUT, seeds=[1])] == [{}]


def test_a_suite_without_a_run_is_a_mistake() -> None:
    with pytest.raises(InputError, match=r"suite mine has no run with seed 0, 1$"):
        plan(suite_of(one(seeds=[2]), seeds=[0, 1, 2]), OUT, seeds=[0, 1])


def test_what_is_not_there_is_said_before_any_run_begins(tmp_path: Path) -> None:
    unknown = "unknown backbone 'deit_smal_patch16_224'; did you mean 'deit_small_patch16_224'"
    with pytest.raises(InputError, match=unknown):
        plan(suite_of(one()), OUT, settings={"backbone": "deit_smal_patch16_224"})
    for number, (settings, message) in enumerate(
        [
            ({"backbone": str(tmp_path / "no.safetensors")}, "backbone file .*no.safetensors does not exist"),
            ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ]
    ):
        before = RunRequest(method="finetune", benchmark="digits-5t", settings=settings)
        folder = tmp_path / f"before {number}"
        leave(folder, before, finished=True)
        finished = PlannedRun(before, folder, "before")  # wherever it was made
        assert [o.status for o in run_suite.run_suite([finished], quiet(), Here(1))] == ["skipped"]
        with pytest.raises(InputError, match=message):
            run_suite.run_suite(plan(suite_of(one()), tmp_path / "new", settings=settings), quiet(), Here(1))
        assert not (tmp_path / "new").exists()


# ---- what counts as finished ------------------------------------------------------------------------------------


EPOCHS = load_recipe("digits-5t").settings["epochs"]
REQUEST = RunRequest(method="finetune", benchmark="digits-5t", seed=1, data_root="here")


def leave(folder: Path, request: RunRequest, *, finished: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN, request.model_dump(mode="json"))
    if finished:
        config = request.resolve().config.record()
        record = make_record(request.method, request.benchmark, request.seed)
        write_record(folder / RESULT, record.model_copy(update={"config": config, "seconds": {"total": 12.0}}))


def changed(**settings: Any) -> RunRequest:
    return REQUEST.model_copy(update={"settings": settings})


def test_a_damaged_record_says_how_to_go_on(tmp_path: Path) -> None:
    leave(tmp_path, REQUEST, finished=True)
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(InputError, match=r"result\.json is not valid JSON .*; delete its folder to run it again"):
        run_suite.finished_record(REQUEST, tmp_path)
    (tmp_path / RESULT).write_text('{"schema": "morecl.result/99"}')
    with pytest.raises(InputError, match=r"a newer morecl is needed$"):
        run_suite.finished_record(REQUEST, tmp_path)


def test_nothing_there_or_only_begun_is_not_finished(tmp_path: Path) -> None:
    assert run_suite.finished_record(REQUEST, tmp_path / "nothing") is None
    leave(tmp_path / "begun", REQUEST, finished=False)
    assert run_suite.finished_record(REQUEST, tmp_path / "begun") is None


@pytest.mark.parametrize(
    "request_",
    [REQUEST, changed(epochs=EPOCHS), changed(device="meta"), REQUEST.model_copy(update={"data_root": None})],
    ids=["same", "its default, said", "another device", "another data root"],
)
def test_a_finished_run_is_found(tmp_path: Path, request_: RunRequest) -> None:
    leave(tmp_path, REQUEST, finished=True)
    record = run_suite.finished_record(request_, tmp_path)
    assert record is not None and record.seed == 1


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (changed(epochs=EPOCHS + 1), f"epochs = {EPOCHS}, not {EPOCHS + 1}"),
        (REQUEST.model_copy(update={"tasks": 1}), "tasks = 5, not 1"),
        (REQUEST.model_copy(update={"validation": 0.1}), "validation = None, not 0.1"),
        (REQUEST.model_copy(update={"class_order": "1"}), "class_order = '0', not '1'"),
    ],
)
def test_another_run_in_the_folder_is_refused(
    tmp_path: Path, request_: RunRequest, message: str, finished: bool
) -> None:
    leave(tmp_path, REQUEST, finished=finished)
    with pytest.raises(InputError, match=message):
        run_suite.finished_record(request_, tmp_path)


@pytest.mark.parametrize("finished", [True, False])
def test_a_recipe_that_was_changed_since_is_another_run(tmp_path: Path, finished: bool) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('dataset = "digits"\ntasks = 5\n')
    request = RunRequest(method="finetune", benchmark=str(recipe))
    plan = request.resolve().plan
    leave(tmp_path / "run", request.model_copy(update={"plan": plan}), finished=finished)
    assert (run_suite.finished_record(request, tmp_path / "run") is not None) == finished
    recipe.write_text('dataset = "digits"\ntasks = 2\n')
    with pytest.raises(InputError, match="tasks = 5, not 2"):
        run_suite.finished_record(request, tmp_path / "run")


@pytest.mark.parametrize("finished", [True, False])
def test_a_backbone_file_is_the_same_however_its_path_is_written(
    tmp_path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "run", changed(backbone="some/vit.safetensors"), finished=finished)
    for spec in ("./some/vit.safetensors", str(tmp_path / "some" / "vit.safetensors")):
        assert (run_suite.finished_record(changed(backbone=spec), tmp_path / "run") is not None) == finished
    with pytest.raises(InputError, match=r"backbone = '.*vit.safetensors', not '.*other.safetensors'"):
        run_suite.finished_record(changed(backbone="some/other.safetensors"), tmp_path / "run")


def test_an_unfinished_run_must_be_resumed_as_it_began(tmp_path: Path) -> None:
    leave(tmp_path, REQUEST, finished=False)
    with pytest.raises(InputError, match="device = 'auto', not 'cpu'"):
        run_suite.finished_record(changed(device="cpu"), tmp_path)
    with pytest.raises(InputError, match="data_root"):
        run_suite.finished_record(REQUEST.model_copy(update={"data_root": "there"}), tmp_path)


def test_a_recipe_that_has_changed_since_is_noticed(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('dataset = "digits"\ntasks = 2\n[settings]\nlr = 0.5\n')
    request = RunRequest(method="finetune", benchmark=str(recipe))
    leave(tmp_path / "run", request, finished=True)
    recipe.write_text('dataset = "digits"\ntasks = 2\n[settings]\nlr = 0.25\n')
    with pytest.raises(InputError, match=r"lr = 0\.5, not 0\.25"):
        run_suite.finished_record(request, tmp_path / "run")


def test_other_images_in_a_folder_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they have the same names and sizes; but a file that was only written again is the same image."""
    photos, rng = tmp_path / "photos", np.random.default_rng(0)
    for name in ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(photos / f"{name}.bmp")
    request = RunRequest(method="ncm", benchmark=f"folder:{photos}", settings={"image_size": 8, "device": "cpu"})
    made = launch.start(request, tmp_path / "run")
    assert run_suite.finished_record(request, tmp_path / "run") == made
    first, second = photos / "a" / "0.bmp", photos / "a" / "1.bmp"
    os.utime(first, (1, 1))
    assert run_suite.finished_record(request, tmp_path / "run") == made
    first.write_bytes(second.read_bytes())
    with pytest.raises(
        InputError, match=r"run holds a run on other images than folder:.*photos has now; choose another"
    ):
        run_suite.finished_record(request, tmp_path / "run")
    now, looked = InputsNow(), []
    for name in ("images_key", "build_stream"):
        original = getattr(inputs, name)
        monkeypatch.setattr(inputs, name, lambda *a, f=original, n=name, **k: looked.append(n) or f(*a, **k))
    for _ in range(3):
        with pytest.raises(InputError, match="other images"):
            run_suite.finished_record(request, tmp_path / "run", now)
    assert looked == ["images_key", "build_stream"], "once for all runs"
    noted = json.loads((tmp_path / "run" / RUN).read_text())
    del noted["plan"]["images"]  # an older run
    write_json(tmp_path / "run" / RUN, noted)
    assert run_suite.finished_record(request, tmp_path / "run") == made


def small_mnist(root: Path, seed: int) -> Path:
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(10), 3)
    root.mkdir()
    images = {f"x_{split}": rng.integers(0, 255, (30, 28, 28), np.uint8) for split in ("train", "test")}
    np.savez(root / "mnist.npz", **images, y_train=labels, y_test=labels, classes=list("0123456789"))
    return root


def test_other_data_in_another_data_root_are_noticed(tmp_path: Path) -> None:
    """And copies of the same are not; nor is a root without them, on a machine that has only the records."""
    roots = [small_mnist(tmp_path / str(seed), seed) for seed in (0, 1)]
    (tmp_path / "copy").mkdir()
    shutil.copyfile(roots[0] / "mnist.npz", tmp_path / "copy" / "mnist.npz")

    def request(root: Path) -> RunRequest:
        small = {"image_size": 8, "device": "cpu"}
        return RunRequest(method="ncm", benchmark="mnist-5t", settings=small, data_root=str(root))

    made = launch.start(request(roots[0]), tmp_path / "run")
    for same in (roots[0], tmp_path / "copy", tmp_path / "nothing"):
        assert run_suite.finished_record(request(same), tmp_path / "run") == made
    with pytest.raises(InputError, match="run holds a run on other images than mnist has now; choose another --out"):
        run_suite.finished_record(request(roots[1]), tmp_path / "run")
    shutil.copyfile(roots[1] / "mnist.npz", roots[0] / "mnist.npz")
    with pytest.raises(InputError, match="other images than mnist has now"):
        run_suite.finished_record(request(roots[0]), tmp_path / "run")


def test_other_weights_in_a_file_of_the_same_name_are_noticed(tmp_path: Path) -> None:
    body = load_file(BACKBONE)
    for name, factor in (("one", 1.0), ("other", 1.5)):
        (tmp_path / name).mkdir()
        save_file({**body, "norm.weight": factor * body["norm.weight"]}, tmp_path / name / "w.safetensors")

    def request(folder: str) -> RunRequest:
        settings = {"backbone": str(tmp_path / folder / "w.safetensors"), "device": "cpu"}
        return RunRequest(method="ncm", benchmark="digits-5t", settings=settings, train_per_class=2, test_per_class=2)

    made = launch.start(request("one"), tmp_path / "run")
    assert made.backbone.source_sha256
    assert run_suite.finished_record(request("one"), tmp_path / "run") == made
    with pytest.raises(InputError, match=r"run holds a run on other weights than w\.safetensors has now"):
        run_suite.finished_record(request("other"), tmp_path / "run")
    shutil.copyfile(tmp_path / "other" / "w.safetensors", tmp_path / "one" / "w.safetensors")
    with pytest.raises(InputError, match="other weights"):
        run_suite.finished_record(request("one"), tmp_path / "run")


# ---- how runs end -----------------------------------------------------------------------------------------------


def runs_in(folder: Path, *names: str) -> list[PlannedRun]:
    return [PlannedRun(RunRequest(method="ncm", benchmark="digits-5t"), folder / name, name) for name in names]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Python code by the title of the run whose process executes it, with the run's folder in ``argv[1]``."""
    code: dict[str, str] = {}

    def command(run: PlannedRun) -> list[str]:
        return [sys.executable, "-c", code[run.title], str(run.folder)]

    monkeypatch.setattr(child, "command", command)
    return code


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_failing_run_affects_no_other(tmp_path: Path, scripts: dict[str, str]) -> None:
    leave(tmp_path / "before", RunRequest(method="ncm", benchmark="digits-5t"), finished=True)
    good = (tmp_path / "before" / RESULT).read_text()
    scripts["crash"] = "import sys; print('some words'); sys.exit('error: no [such] data')"
    scripts["killed"] = "import os; os.kill(os.getpid(), 9)"
    scripts["silent"] = "import sys; sys.exit(3)"
    scripts["nothing"] = "pass"
    scripts["good"] = (
        "import pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(); "
        f"(folder / {RESULT!r}).write_text({good!r})"
    )
    for name in ("crash", "silent"):
        (tmp_path / f"{name}.log").write_text("the log of an earlier attempt\n")
    console = quiet()
    runs = runs_in(tmp_path, "crash", "before", "killed", "silent", "nothing", "good")
    outcomes = run_suite.run_suite(runs, console, Here(2))
    assert [(o.run.title, o.status) for o in outcomes] == [
        ("crash", "failed"),
        ("before", "skipped"),
        ("killed", "failed"),
        ("silent", "failed"),
        ("nothing", "failed"),
        ("good", "finished"),
    ]
    assert outcomes[0].reason == f"error: no [such] data (see {tmp_path / 'crash.log'})"
    assert outcomes[2].reason.startswith("killed by SIGKILL")
    assert outcomes[3].reason.startswith("exit code 3")
    assert RESULT in outcomes[4].reason
    assert (tmp_path / "crash.log").read_text().startswith("the log of an earlier attempt\nsome words\n")
    assert "6 runs, 1 finished before, 5 to do, 2 at once" in printed(console)

    table = quiet()
    run_suite.show(outcomes, table)
    lines = printed(table).splitlines()
    aca = make_record("ncm", "digits-5t").metrics.aca
    assert any("good" in line and "finished" in line and f"{aca:.2f}" in line for line in lines)
    assert sum("FAILED" in line for line in lines) == 4
    assert "crash: error: no [such] data" in printed(table)
    assert "4 of 6 runs failed; the same command tries them again" in printed(table)


def test_a_run_at_which_another_process_is_at_work_is_left_to_it(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is found in use before it is started, one finished when its turn comes, one taken and finished meanwhile."""
    request = RunRequest(method="ncm", benchmark="digits-5t")
    leave(tmp_path / "source", request, finished=True)
    asked: list[str] = []

    def is_claimed(folder: Path) -> bool:
        asked.append(folder.name)
        if folder.name == "used" and asked.count("used") == 3:
            leave(folder, request, finished=True)
        return folder.name == "used" and asked.count("used") < 3

    monkeypatch.setattr(run_suite, "is_claimed", is_claimed)
    scripts["source"] = scripts["used"] = "raise AssertionError('it is started')"
    scripts["taken"] = (
        "import pathlib, shutil, sys; folder = pathlib.Path(sys.argv[1])\n"
        "shutil.copytree(folder.with_name('source'), folder); sys.exit('error: another process is at work')"
    )
    scripts["failing"] = (  # first another process is faster, by a moment
        "import pathlib, sys; folder = pathlib.Path(sys.argv[1]); file = folder.with_name('tried')\n"
        "again = file.exists(); file.touch()\n"
        f"sys.exit('error: no' if again else 'error: {BUSY} {{folder}} (process 7); wait for it')"
    )
    console = quiet()
    place = Here(1)
    monkeypatch.setattr(place, "poll_seconds", 0.01)
    found = run_suite.run_suite(runs_in(tmp_path, "used", "taken", "failing"), console, place)
    assert [(o.run.title, o.status) for o in found] == [
        ("used", "skipped"),
        ("taken", "skipped"),
        ("failing", "failed"),
    ]
    assert found[2].reason.startswith("error: no")
    assert printed(console).count("failing: another process is at work there") == 1
    assert printed(console).count("used: another process is at work there; waiting for it to end") == 1


def test_a_suite_says_for_what_it_runs_no_rate_was_searched(tmp_path: Path, scripts: dict[str, str]) -> None:
    before = RunRequest(method="hal", benchmark="mnist-5t")
    leave(tmp_path / "before", before, finished=True)
    scripts["to do"] = "pass"
    runs = [
        PlannedRun(before, tmp_path / "before", "before"),
        PlannedRun(RunRequest(method="owm", benchmark="mnist-5t"), tmp_path / "to do", "to do"),
    ]
    console = quiet()
    run_suite.run_suite(runs, console, Here(1))
    assert printed(console).splitlines()[:2] == [
        "2 runs, 1 finished before, 1 to do, 1 at once",
        "no rate was searched for owm on mnist-5t with this backbone: it trains at 0.005",
    ]


def test_jobs_run_at_once_with_their_share_of_the_cores(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(here, "usable_cores", lambda: 7)
    for name, other in (("a", "b"), ("b", "a")):  # each waits for the other: alone, it would fail
        scripts[name] = (
            "import os, pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent\n"
            f"(here / '{name}.txt').write_text(os.environ['OMP_NUM_THREADS'])\n"
            f"until = time.time() + 10\n"
            f"while not (here / '{other}.txt').exists() and time.time() < until: time.sleep(0.01)\n"
            f"print('met' if (here / '{other}.txt').exists() else 'alone'); sys.exit(1)"
        )
    outcomes = run_suite.run_suite(runs_in(tmp_path, "a", "b"), quiet(), Here(2))
    assert [outcome.reason.split()[0] for outcome in outcomes] == ["met", "met"]
    assert [(tmp_path / f"{name}.txt").read_text() for name in "ab"] == ["3", "3"]


def test_threads_are_left_alone_for_one_job_or_when_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in Here(1)._environment
    assert Here(1000)._environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert Here(2)._environment["OMP_NUM_THREADS"] == "5"
    with pytest.raises(InputError, match="--jobs is 1 or more, not 0"):
        Here(0)


CARD = (
    "import os, pathlib, sys, time; folder = pathlib.Path(sys.argv[1]); here = folder.parent\n"
    "(here / f'{folder.name}.card').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'not set'))\n"
    "(here / f'{folder.name}.shared').write_text(os.environ.get('MORECL_SHARED', ''))\n"
    "until = time.time() + 10\n"
    "while len(list(here.glob('*.card'))) < 4 and time.time() < until: time.sleep(0.01)\n"
    "sys.exit(1)"
)


@pytest.mark.parametrize(
    ("given", "count", "device", "cards"),
    [
        (None, 2, "auto", ["0", "0", "1", "1"]),
        (None, 3, "cuda", ["0", "0", "1", "2"]),
        (None, 1, "auto", ["not set"] * 4),
        (None, 0, "auto", ["not set"] * 4),
        (None, 2, "cpu", ["not set"] * 4),
        (None, 2, "cuda:1", ["not set"] * 4),
        ("5,GPU-7a", 2, "auto", ["5", "5", "GPU-7a", "GPU-7a"]),
        ("5", 1, "auto", ["5"] * 4),
        ("", 0, "auto", [""] * 4),
    ],
)
def test_runs_are_spread_over_the_cards(
    tmp_path: Path,
    scripts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    count: int,
    device: str,
    cards: list[str],
) -> None:
    monkeypatch.setattr(run_suite, "check_machine", lambda _: None)
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    request = RunRequest(method="ncm", benchmark="digits-5t", settings={"device": device})
    scripts.update(dict.fromkeys("abcd", CARD))
    runs = [PlannedRun(request, tmp_path / name, name) for name in "abcd"]
    run_suite.run_suite(runs, quiet(), Here(4, count_cards=lambda: count))
    assert sorted((tmp_path / f"{name}.card").read_text() for name in "abcd") == cards
    assert {(tmp_path / f"{name}.shared").read_text() for name in "abcd"} == {"1"}  # four runs, three cards at most


def test_the_next_run_goes_to_the_card_that_became_free(tmp_path: Path, scripts: dict[str, str]) -> None:
    release = "while not (here / 'last.card').exists() and time.time() < until: time.sleep(0.01)\n"
    note = CARD.split("until")[0]
    scripts |= {"long": f"{note}until = time.time() + 10\n{release}", "short": note, "last": note}
    place = Here(2, count_cards=lambda: 2)
    run_suite.run_suite(runs_in(tmp_path, "long", "short", "last"), quiet(), place)
    assert [(tmp_path / f"{name}.card").read_text() for name in ("long", "short", "last")] == ["0", "1", "1"]
    assert {path.read_text() for path in tmp_path.glob("*.shared")} == {""}  # each had a card for itself


def test_a_run_that_chose_its_card_may_share_it(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_suite, "check_machine", lambda _: None)
    scripts |= dict.fromkeys("ab", CARD.replace("< 4", "< 2"))
    chosen, any_card = (
        RunRequest(method="ncm", benchmark="digits-5t", settings={"device": device}) for device in ("cuda:0", "auto")
    )
    runs = [PlannedRun(chosen, tmp_path / "a", "a"), PlannedRun(any_card, tmp_path / "b", "b")]
    run_suite.run_suite(runs, quiet(), Here(2, count_cards=lambda: 2))
    assert [(tmp_path / f"{name}.shared").read_text() for name in "ab"] == ["1", "1"]


@pytest.mark.parametrize(
    ("given", "count", "cards"),
    [
        (None, 3, ["0", "1", "2"]),
        ("2, 0", 2, ["2", "0"]),
        ("1,-1,0", 1, ["1"]),
        ("-1", 0, []),
        ("", 0, []),
        ("0,9", 1, ["0"]),  # there is no card 9
    ],
)
def test_the_cards_are_those_that_cuda_sees(given: str | None, count: int, cards: list[str]) -> None:
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_cards(environment, lambda: count) == cards


LONG = (
    "import os, pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent\n"
    "from morecl.interrupts import sigterm_as_interrupt\n"
    "try:\n"
    "    with sigterm_as_interrupt():\n"  # as `morecl run` does
    "        (here / 'pid.txt').write_text(str(os.getpid())); time.sleep(60)\n"
    "except KeyboardInterrupt: (here / 'tidy.txt').write_text('tidied up')\n"
)


def wait_for_text(file: Path) -> None:
    until(lambda: file.exists() and file.read_text())


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def sigint(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets the handler of SIGINT, which processes inherit if it is to ignore it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "sigint"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # as in a script's `&` jobs, under nohup and in cron
    ],
    indirect=["sigint"],
)
@pytest.mark.usefixtures("sigint")
def test_an_interruption_stops_the_processes(tmp_path: Path, scripts: dict[str, str], number: signal.Signals) -> None:
    scripts["long"] = LONG
    scripts["next"] = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()"

    def interrupt() -> None:
        wait_for_text(tmp_path / "pid.txt")
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_suite.run_suite(runs_in(tmp_path, "long", "next"), quiet(), Here(1))
    assert (tmp_path / "tidy.txt").exists()
    assert not (tmp_path / "next").exists()
    assert has_ended(int((tmp_path / "pid.txt").read_text()))
    assert signal.getsignal(signal.SIGTERM) is before


SUITE = """
import io, pathlib, sys
from rich.console import Console
from morecl.run import RunRequest
from morecl.suite import child, run
from morecl.suite.here import Here
from morecl.suite.plan import PlannedRun
child.command = lambda planned: [sys.executable, "-c", sys.argv[1], str(planned.folder)]
request = RunRequest(method="ncm", benchmark="digits-5t")
folder = pathlib.Path(sys.argv[2])
try:
    run.run_suite([PlannedRun(request, folder, "long")], Console(file=io.StringIO()), Here())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_suite_that_was_started_with_sigint_ignored_can_be_stopped(tmp_path: Path) -> None:
    suite = subprocess.Popen(
        [sys.executable, "-c", SUITE, LONG, str(tmp_path / "long")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for_text(tmp_path / "pid.txt")
    suite.terminate()
    assert suite.wait(timeout=30) == 130
    assert (tmp_path / "tidy.txt").exists()
    assert has_ended(int((tmp_path / "pid.txt").read_text()))


def test_a_process_that_does_not_end_is_killed(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts["deaf"] = (
        "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(pathlib.Path(sys.argv[1]).parent / 'pid.txt').write_text(str(os.getpid())); time.sleep(60)\n"
    )
    monkeypatch.setattr(child, "_GRACE_SECONDS", 0.5)

    def interrupt() -> None:
        wait_for_text(tmp_path / "pid.txt")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_suite.run_suite(runs_in(tmp_path, "deaf"), quiet(), Here(1))
    assert has_ended(int((tmp_path / "pid.txt").read_text()))


def test_a_second_interruption_kills_at_once(
    tmp_path: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts["slow"] = (
        "import os, pathlib, signal, sys, time; here = pathlib.Path(sys.argv[1]).parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: (here / 'asked.txt').write_text('to end'))\n"
        "(here / 'pid.txt').write_text(str(os.getpid()))\n"
        "while True: time.sleep(60)\n"
    )
    monkeypatch.setattr(child, "_GRACE_SECONDS", 60.0)

    def interrupt() -> None:
        for name in ("pid.txt", "asked.txt"):
            wait_for_text(tmp_path / name)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_suite.run_suite(runs_in(tmp_path, "slow"), quiet(), Here(1))
    assert time.monotonic() - begin < 30
    assert has_ended(int((tmp_path / "pid.txt").read_text()))


def test_nothing_starts_when_one_folder_holds_something_else(tmp_path: Path, scripts: dict[str, str]) -> None:
    scripts["first"] = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()"
    leave(tmp_path / "second", REQUEST, finished=True)
    with pytest.raises(InputError, match="second holds a run with"):
        run_suite.run_suite(runs_in(tmp_path, "first", "second"), quiet(), Here())
    assert not (tmp_path / "first").exists()


def test_the_live_display_shows_what_runs(tmp_path: Path, scripts: dict[str, str]) -> None:
    scripts["talk"] = (
        "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent\n"
        "print('digits-5t ncm task 1/5', flush=True)\n"
        "while not (here / 'seen.txt').exists(): time.sleep(0.05)\n"
        "sys.exit(1)\n"
    )
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)

    def look() -> None:
        until(lambda: "task 1/5" in printed(console))
        (tmp_path / "seen.txt").touch()

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    run_suite.run_suite(runs_in(tmp_path, "talk"), console, Here())
    watching.join()
    assert "all runs" in printed(console) and "0/1" in printed(console)


def test_settings_of_one_method(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    text = """
    description = "two rates"
    [settings]
    lr = 0.002
    epochs = 3
    [methods.eeil]
    lr = 0.001
    [[runs]]
    methods = ["more", "eeil", "slda"]
    benchmarks = ["digits-5t"]
    """
    file.write_text(text)
    rates = {run.request.method: run.request.settings.get("lr") for run in plan(load_suite(str(file)), tmp_path)}
    assert rates == {"more": 0.002, "eeil": 0.001, "slda": None}
    runs = plan(load_suite(str(file)), tmp_path, settings={"lr": 0.1})
    assert [run.request.settings.get("lr") for run in runs] == [0.1, 0.1, None]
    for wrong, message in (
        ("[methods.hat]\nlr = 1.0\n", "method that it does not run"),
        ("[methods.more]\nseed = 1\n", "a suite has no setting `seed`"),
        ("[[runs]]\nmethods = ['ncm']\nbenchmarks = ['digits-5t']\nsettings = { seed = 1 }\n", "no setting `seed`"),
        ("[methods.more]\nlrr = 1.0\n", "unknown setting 'lrr'"),
    ):
        file.write_text(text.replace("[[runs]]", wrong + "[[runs]]"))
        with pytest.raises(InputError, match=message):
            plan(load_suite(str(file)), tmp_path)
