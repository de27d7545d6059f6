"""Times of training steps on the page on speed and in the table that chooses who trains are those of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from morecl.nn import fused

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
NAMES = {"ViT-S/16": "vit-small", "ViT-B/16": "vit-base"}
COMPILED = {"vit-small-224-step": "deit-small-224-step-compiled"}  # measured with a backbone of the same shape

Shape = tuple[int, int]


def read(name: str) -> Any:
    return json.loads((BENCHMARKS / f"h200-{name}.json").read_text())


def recorded_ms(backbone: str, bottleneck: int, who: str) -> float:
    """A step of 128 images that was recorded without a profile."""
    (ms,) = (
        step["ms"]
        for step in read("vit-tiny-latency")["training steps"]
        if (step["backbone"], step["bottleneck"], step["images per step"], step["with"])
        == (backbone, bottleneck, 128, who)
    )
    return float(ms)


def share(record: Any) -> float:
    return float(100 * record["arithmetic_microseconds"] / record["step_microseconds"])


def parts(record: Any) -> dict[str, str]:
    """Microseconds of the kinds of kernels that a step has."""
    return {group["name"]: f"{group['microseconds']:,.0f}" for group in record["groups"] if group["calls"]}


@pytest.fixture(scope="module")
def rows() -> dict[Shape, tuple[str, list[str]]]:
    """By dimensions and neurons: the name of the records and the cells."""
    found = re.findall(r"^\| (ViT-\S+) \| (\d+) \| (\d+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(found) == 4
    return {
        (int(dim), int(k)): (f"{NAMES[name]}-224-step" + ("-128" if k == "128" else ""), cells)
        for name, dim, k, *cells in found
    }


def test_the_table_of_wide_backbones_is_that_of_the_records(rows: dict[Shape, tuple[str, list[str]]]) -> None:
    for (dim, k), (name, cells) in rows.items():
        records = [read(name)]
        assert records[0]["settings"]["bottleneck"] == k and records[0]["backbone"].startswith(f"vit_{name[4:8]}")
        assert any(kernel["name"] == "_adapt_wide" for kernel in records[0]["kernels"])
        if (dim, k) != (384, 128):
            records.append(read(COMPILED.get(name, f"{name}-compiled")))
            assert records[1]["settings"]["bottleneck"] == k
            assert not any(kernel["name"] == "_adapt_wide" for kernel in records[1]["kernels"])
        assert all(record["images"] == 128 and record["image_size"] == 224 for record in records)
        expected = [f"{record['step_microseconds'] / 1e3:.2f} ({share(record):.1f} %)" for record in records]
        if (dim, k) == (384, 128):
            expected.append(f"{recorded_ms('deit_small_patch16_224', 128, 'compiler'):.2f}")
        assert cells == expected


def test_the_table_of_steps_under_load_is_that_of_the_records() -> None:
    cells = PAGE.partition("| under load |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (ViT-\S+) \| ([\d.]+) \| (\d+) \| ([\d.]+) % \|$", cells, re.MULTILINE)
    assert [name for name, *_ in rows] == list(NAMES)
    for name, ms, rate, percent in rows:
        record = read(f"{NAMES[name]}-224-step-under-load")
        step, reached = record["sustained_step_microseconds"], record["sustained_matrix_tflops"]
        assert (ms, rate) == (f"{step / 1e3:.2f}", f"{reached:.0f}")
        work = record["arithmetic_microseconds"] * record["matrix_tflops"]
        assert percent == f"{100 * work / step / reached:.1f}"


def test_the_table_that_chooses_who_trains_is_that_of_the_records(rows: dict[Shape, tuple[str, list[str]]]) -> None:
    found = {shape: tuple(float(cell.split()[0]) for cell in cells) for shape, (_, cells) in rows.items()}
    found[192, 128] = (
        round(recorded_ms("vit_tiny_patch16_224", 128, "kernels"), 2),
        round(recorded_ms("vit_tiny_patch16_224", 128, "compiler"), 2),
    )
    kernels, compiler = fused.STEP_TIMES[192, 64]  # the compiler's time is in no record
    assert kernels == round(read("deit-tiny-224-step")["step_microseconds"] / 1e3, 2)
    assert found | {(192, 64): (kernels, compiler)} == fused.STEP_TIMES


def test_the_parts_of_a_step_are_those_of_the_records() -> None:
    records = [read(f"{name}-224-step") for name in NAMES.values()]
    cells = PAGE.partition("| | ViT-S | ViT-B |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|(]+?)(?: \(cuBLAS\))? \| ([\d,]+) \| ([\d,]+) \|$", cells, re.MULTILINE)
    for record, column in zip(records, (1, 2), strict=True):
        assert {row[0]: row[column] for row in rows} == parts(record)


def test_the_parts_of_a_step_of_narrow_tokens_are_those_of_the_record() -> None:
    record = read("deit-tiny-224-step")
    cells = PAGE.partition("| | us | kernels | what it is |")[2].partition("\n\n")[0]
    rows = re.findall(
        r"^\| (.+?)(?: and their neighbours)?(?: \((?:cuBLAS|ours)\))? \| ([\d,]+) \| (\d+) \|", cells, re.MULTILINE
    )
    assert {name: microseconds for name, microseconds, _ in rows} == parts(record)
    assert {name: int(calls) for name, _, calls in rows} == {
        group["name"]: round(group["calls"]) for group in record["groups"] if group["calls"]
    }
    assert f"takes {record['step_microseconds'] / 1e3:.2f} ms (`morecl bench --profile`" in PAGE


def test_the_first_step_is_that_of_its_record() -> None:
    record = read("first-step")
    text = " ".join(PAGE.split())
    assert f"first training step after {record['first_step_seconds']:.1f} s (`h200-first-step.json`" in text
    assert f"`h200-deit-tiny-224.json` has {read('deit-tiny-224')['first_step_seconds']:.1f})" in text
    phases = {phase["phase"]: phase["seconds"] for phase in record["timeline"]["phases"]}
    imports = sum(seconds for name, seconds in phases.items() if name.startswith("import "))
    assert f"imports took {imports:.1f} (torch {phases['import torch']:.1f}, timm {phases['import timm']:.1f})" in text
    assert f"the wait for kernels {phases['wait for kernels']:.1f}" in text


def test_what_fewer_small_kernels_changed_is_in_the_records() -> None:
    text = " ".join(PAGE.split())

    def ms(name: str) -> str:
        return f"{read(name)['step_microseconds'] / 1e3:.2f}"

    def small(name: str) -> int:
        return round(sum(g["microseconds"] for g in read(name)["groups"] if g["name"] in ("the rest", "copies")))

    def backward(name: str) -> int:
        (kernel,) = (k for k in read(name)["kernels"] if k["name"] == "_attend_backward")
        return round(kernel["microseconds"] / kernel["calls"])

    tiny, tiny_before, wide, wide_before = (
        f"{name}-224-step{when}" for name in ("deit-tiny", "vit-small") for when in ("", "-before")
    )
    assert f"DeiT-Ti takes {ms(tiny)} instead of {ms(tiny_before)} ms" in text
    assert f"ViT-S {ms(wide)} instead of {ms(wide_before)}" in text
    assert (
        f"took {small(tiny_before)} us, and take {small(tiny)} (ViT-S: {small(wide_before)} and {small(wide)})" in text
    )
    assert f"inside a step, {backward(wide)} instead of {backward(wide_before)}." in text


def test_the_table_against_the_number_of_tasks_is_what_the_benchmark_printed() -> None:
    printed = (BENCHMARKS / "h200-deit-tiny-224.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in printed.splitlines() if re.match(r" +\d", line)]
    expected = [
        (tasks, f"{train} s", f"{back} s", f"{one} ms", f"{plain} ms", batch, timm)
        for tasks, train, back, one, plain, _, batch, _, timm in lines
    ]
    cells = PAGE.partition("| tasks learned | train next task |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", cells, re.MULTILINE)
    assert [(tasks, *row.split(" | ")) for tasks, row in rows] == expected and len(expected) == 4


MLP_CASES = {
    "first product, GELU (and, behind it, slopes)": ("fc1, GELU", "descriptors"),
    "product of the gradient, GELU's gradient": ("d W2, GELU'", "descriptors, also to store"),
}


@pytest.mark.skipif(not fused.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("row", MLP_CASES)
def test_no_kernel_of_the_sweep_is_much_faster_than_those_of_the_mlp(row: str) -> None:
    from morecl.nn.kernels import mlp

    case, how = MLP_CASES[row]
    launch = f"w{mlp.LAUNCH['num_warps']} st{mlp.LAUNCH['num_stages']}"
    ours = f"{how} BM{mlp.ROWS} BN{mlp.COLUMNS} BK{mlp.CHUNK} {launch}"
    cells = re.search(rf"^\| {re.escape(row)} \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert cells
    for dim, cell in zip((192, 384, 768), cells.groups(), strict=True):
        times = read("descriptors-sweep")["cases"][f"{case}/{dim}"]
        fastest = min(us for name, us in times.items() if not name.startswith("product alone"))
        assert times[ours] <= 1.08 * fastest
        assert cell.split(", ")[-1] == f"{times[ours]:.0f}"


IN_STEPS = "ping-pong, tokens kept, groups of 8 warps, 4 slots", "program by program"  # those that steps chose from


def test_what_the_page_says_of_ping_pong_and_of_masks_is_in_the_record() -> None:
    cases = read("pingpong-sweep")["cases"]
    text = " ".join(PAGE.split())

    def change(case: str, after: str | tuple[str, ...]) -> str:
        fastest = min(min(times) for name, times in cases[case].items() if name.endswith(after))
        return f"{fastest:.0f} instead of {min(cases[case]['before']):.0f}"

    forward, backward, narrow, narrow_backward = (
        change(f"{case}/{dim}", IN_STEPS) for dim in (384, 192) for case in ("fc1, GELU", "d W2, GELU'")
    )
    assert f"takes {forward.replace(' ', ' us ', 1)} and the gradient's {backward}" in text
    assert f"with 192 dimensions {narrow} and {narrow_backward}" in text
    wide, small, large = (change(f"attention, backward/{dim}", "no masks in whole tiles") for dim in (384, 192, 768))
    assert f"takes {small.replace(' ', ' us ', 1)} with 192 dimensions, {wide} with 384, {large} with 768." in text


def test_the_times_on_amds_cpus_are_those_of_the_record() -> None:
    record = json.loads((BENCHMARKS / "cpu-linear.json").read_text())
    times = {way: {what: median(record[way][what]) for what in ("train", "predict")} for way in ("torch", "onednn")}
    pair = r"(\d+\.\d) s instead of (\d+\.\d)"
    said = re.search(f"takes MORE {pair}, to predict 512 images after two tasks {pair}", " ".join(PAGE.split()))
    assert said and record["images"] == 512
    shown = [times[way][what] for what in ("train", "predict") for way in ("onednn", "torch")]
    assert list(said.groups()) == [f"{seconds:.1f}" for seconds in shown]
    assert record["differ"] < 1e-4
