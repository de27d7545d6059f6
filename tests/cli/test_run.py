"""``morecl run``, ``resume`` and ``list`` from the command line, with real but small runs.

Kill -9 is real too: a separate process kills itself at a chosen point of a chosen task, so the outcome does not depend
on the speed of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import morecl
from calling import exit_code
from morecl.methods import METHODS
from morecl.methods.more import More
from morecl.records import read_record

SMALL = ["--train-per-class", "6", "--test-per-class", "4", "--device", "cpu", "--memory-size", "20"]
for assignment in ("image_size=8", "bottleneck=4", "epochs=2", "batch_size=8", "back_update_epochs=2"):
    SMALL += ["--set", assignment]

Call = Callable[..., tuple[int, str, str]]


def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code = exit_code(monkeypatch, *arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs ``morecl ARGUMENTS`` in this process: exit code, stdout, stderr."""
    return lambda *arguments: invoke(monkeypatch, capsys, *arguments)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", ".claim"))


def measured(folder: Path) -> dict[str, Any]:
    """The record without times."""
    value = read_record(folder / "result.json").model_dump()
    del value["seconds"]
    return value


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of MORE."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    from morecl.config import parse_assignments
    from morecl.run import RunRequest, start

    settings = parse_assignments(SMALL[SMALL.index("--set") + 1 :: 2])
    request = RunRequest(
        method="more",
        benchmark="digits-5t",
        settings=settings | {"device": "cpu", "memory_size": 20},
        train_per_class=6,
        test_per_class=4,
    )
    start(request, folder)
    return folder


# ---- a run and its record -----------------------------------------------------------------------------------------


def test_run_writes_a_complete_record(call: Call, finished: Path, tmp_path: Path) -> None:
    code, out, _ = call("run", "digits-5t", *SMALL, "--out", tmp_path / "run")
    assert code == 0
    assert [line.count("accuracy on all seen") for line in out.splitlines()].count(1) == 5
    assert str(tmp_path / "run" / "result.json") in out.replace("\n", "")
    assert names(tmp_path / "run") == ["model", "result.json", "run.json"]
    value = json.loads((tmp_path / "run" / "result.json").read_text())
    table = next(line for line in out.splitlines() if "Digits-5T" in line)
    assert "MORE (memory size 20)" in table
    assert f"{value['metrics']['aca']:.2f}" in table and f"{value['metrics']['iauc']:.2f}" in table
    assert value["schema"] == "morecl.result/1"
    assert (value["method"], value["benchmark"], value["seed"]) == ("more", "digits-5t", 0)
    assert value["class_order"] == list(range(10))
    assert value["config"]["epochs"] == 2 and value["config"]["lr"] == 0.03
    assert value["backbone"]["name"] == "vit_mini_patch4_32" and len(value["backbone"]["sha256"]) == 64
    assert {"morecl", "torch", "timm", "numpy", "python"} <= value["versions"].keys()
    assert value["device"].startswith("cpu")
    assert {"aca", "aia", "reduction_rate", "auc", "iauc", "til_accuracy"} <= value["metrics"].keys()
    assert all(0 <= value["metrics"][key] <= 100 for key in ("aca", "aia", "auc", "iauc", "til_accuracy"))
    matrix = value["accuracy_matrix"]
    assert [[entry is not None for entry in row] for row in matrix] == [[j <= i for j in range(5)] for i in range(5)]
    assert value["metrics"]["aca"] == pytest.approx(np.mean(matrix[4]))  # all tasks have as many test images
    steps = [np.mean(row[: i + 1]) for i, row in enumerate(matrix)]
    assert value["metrics"]["aia"] == pytest.approx(np.mean(steps))
    drops = [matrix[k][k] - matrix[4][k] for k in range(4)]
    assert value["metrics"]["reduction_rate"] == pytest.approx(np.mean(drops))
    assert len(value["auc_per_step"]) == 4
    assert value["metrics"]["iauc"] == pytest.approx(np.mean(value["auc_per_step"]))
    assert value["metrics"]["auc"] == value["auc_per_step"][-1]
    assert {"train", "back_update", "evaluate", "total"} <= value["seconds"].keys()
    parts = ("backbone", "adapters", "norms", "embeddings", "heads", "statistics")
    assert value["entries"]["total"] == sum(value["entries"][part] for part in parts)
    # the same command in another folder, the same numbers
    assert measured(tmp_path / "run") == measured(finished)


def test_the_model_of_a_run_can_be_used(finished: Path) -> None:
    learner = morecl.load(finished / "model")
    record = read_record(finished / "result.json")
    from morecl.data import build_stream, load_recipe

    stream = build_stream(load_recipe("digits-5t"), train_per_class=6, test_per_class=4)
    predicted = learner.predict(stream.dataset.x_test).labels
    assert set(predicted) <= set(stream.dataset.classes)  # by name
    truth = np.array(stream.dataset.classes)[stream.dataset.y_test]
    assert 100 * np.mean(np.array(predicted) == truth) == pytest.approx(record.metrics.aca)


def test_a_run_says_that_no_rate_was_searched_for(call: Call, tmp_path: Path) -> None:
    tiny = ["--train-per-class", "4", "--test-per-class", "2", "--tasks", "2", "--device", "cpu"]
    tiny += ["--set", "image_size=8", "--set", "epochs=1", "--method", "finetune"]
    said = "no rate was searched for finetune on digits-5t with this backbone: it trains at 0.005"
    for name, more, expected in (
        ("trained", ["--set", "freeze_backbone=false"], True),
        ("given", ["--set", "freeze_backbone=false", "--set", "lr=0.005"], False),
        ("included", [], False),
    ):
        code, out, err = call("run", "digits-5t", *tiny, *more, "--out", tmp_path / name)
        assert code == 0, err
        assert (said in " ".join(out.split())) == expected, name


def test_other_seed_other_numbers_and_other_methods(call: Call, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ncm"
    small = ["--train-per-class", "5", "--test-per-class", "5", "--set", "image_size=8", "--device", "cpu"]
    assert call("run", "--method", "ncm", "--seed", 7, *small, "--out", folder)[0] == 0
    record = read_record(folder / "result.json")
    assert (record.method, record.benchmark, record.seed) == ("ncm", "digits-5t", 7)  # digits-5t is the default
    assert record.data.train_images == 50
    # one more with the same folder: refused, then replaced
    code, _, err = call("run", "--method", "ncm", *small, "--out", folder)
    assert code == 2 and "holds a finished run" in err and "--overwrite" in err and "--out" in err
    assert read_record(folder / "result.json") == record
    assert call("run", "--method", "ncm", *small, "--out", folder, "--overwrite")[0] == 0
    assert read_record(folder / "result.json").seed == 0


def test_tasks_of_unequal_size(call: Call, tmp_path: Path) -> None:
    small = ["--train-per-class", "4", "--test-per-class", "2", "--set", "image_size=8", "--device", "cpu"]
    code, out, _ = call("run", "--method", "ncm", "--tasks", "1,7, 2", *small, "--out", tmp_path / "run")
    assert code == 0 and "task 3/3" in out
    record = read_record(tmp_path / "run" / "result.json")
    assert record.task_sizes == [1, 7, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan"]["tasks"] == [1, 7, 2]
    seen = [1, 8, 10]  # every class has as many test images
    for after, total in enumerate(seen):
        weighted = np.dot(record.accuracy_matrix[after][: after + 1], record.task_sizes[: after + 1])  # type: ignore[arg-type]
        assert record.aca_per_step[after] == pytest.approx(weighted / total)
    code, out, _ = call("report", tmp_path / "run", "--format", "md")
    assert code == 0 and "Digits-5T in tasks of 1, 7, 2 classes ACA" in out


# ---- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "epoch=3"], "unknown setting 'epoch'; did you mean 'epochs'?"),
        (["--set", "epochs"], "--set wants key=value"),
        (["--set", "epochs=0"], "epochs=0"),
        (["--set", "seed=3"], "--seed"),
        (["--method", "mroe"], "unknown method 'mroe'; did you mean 'more'?"),
        (["digit-5t"], "unknown benchmark 'digit-5t'; did you mean 'digits-5t'?"),
        (["--backbone", "vit_mini_patch4_31"], "unknown backbone 'vit_mini_patch4_31'; did you mean"),
        (["--backbone", "nowhere/weights.pth"], "nowhere/weights.pth does not exist"),
        (["--class-order", "9"], "class order"),
        (["--tasks", "11"], "cannot divide 10 classes into 11 tasks"),
        (["--tasks", "4,1,4"], "tasks of 4, 1, 4 classes have 9 in all, but digits has 10"),
        (["--tasks", "0"], "--tasks wants the number of tasks, such as 5"),
        (["--tasks", "4,0,6"], "such as 4,1,5; not '4,0,6'"),
        (["--tasks", "4,-1,7"], "not '4,-1,7'"),
        (["--tasks", "5,"], "not '5,'"),
        (["--tasks", "²"], "not '²'"),
        (["--tasks", "many"], "not 'many'"),
        (["--validation", "1.5"], "validation"),
        (["--device", "gpu"], "device 'gpu' cannot be used"),
        (["--set", "lr=1", "--set", "lr=2"], "--set lr is given twice"),
        (["--set", "memory_size=9", "--memory-size", "8"], "memory_size is given with --set and as --memory-size"),
        (["--seed", "-1"], "--seed"),
        (["--train-per-class", "0"], "--train-per-class"),
    ],
)
def test_mistakes_write_nothing(call: Call, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, err = call("run", *arguments, "--out", tmp_path / "run")
    assert code == 2
    assert message in " ".join(err.split())
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "3,3"], "tasks of 3, 3 classes have 6 in all, but digits has 10"),
        (["--validation", "1.5"], "the validation share must be between 0 and 1"),
        (["--class-order", "9"], "unknown class order '9'"),
    ],
)
def test_a_bad_request_is_told_before_an_occupied_folder(
    call: Call, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "run.json").write_text("{}")
    code, _, err = call("run", *arguments, "--out", tmp_path / "a run")
    assert code == 2 and message in " ".join(err.split())
    code, _, err = call("run", "--out", tmp_path / "a run")
    assert code == 2 and f"already holds a run: `morecl resume '{tmp_path / 'a run'}'` continues" in err


def test_places_that_are_not_for_a_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = call("run", *SMALL, "--out", tmp_path / "file")
    assert code == 2 and "is a file" in err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_text("mine")
    for overwrite in ([], ["--overwrite"]):
        code, _, err = call("run", *SMALL, "--out", tmp_path / "mine", *overwrite)
        assert code == 2 and "holds no run" in err
    assert names(tmp_path) == ["file", "mine"] and names(tmp_path / "mine") == ["photo.png"]


def test_resume_says_what_cannot_be_resumed(call: Call, finished: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    code, _, err = call("resume", finished)
    assert code == 2 and "is finished" in err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    code, _, err = call("resume", tmp_path / "nowhere")
    assert code == 2 and "holds no run" in err
    for text, message in (("{", "Invalid JSON"), ('{"method": "ncm"}', "benchmark: Field required")):
        (tmp_path / "run.json").write_text(text)
        code, _, err = call("resume", tmp_path)
        assert code == 2 and f"cannot be read: {message}" in " ".join(err.split()) and "pydantic" not in err


def test_divergence_is_no_result(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", *SMALL, "--set", "lr=1e30", "--out", tmp_path / "run")
    assert code == 1
    assert "stopped:" in err and "training diverged" in err
    assert not (tmp_path / "run" / "result.json").exists()


# ---- interruptions ------------------------------------------------------------------------------------------------


def test_ctrl_c_says_how_to_continue(
    call: Call, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = More._learn

    def stopped_in_the_third(self: More, task: Any, listener: Any) -> None:
        learn(self, task, listener)
        if task.index == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(More, "_learn", stopped_in_the_third)
        code, _, err = call("run", *SMALL, "--out", folder)
    assert code == 130
    assert f"`morecl resume '{folder}'` continues" in err
    assert names(folder) == ["checkpoint-2", "run.json"]
    code, out, _ = call("resume", folder)
    assert code == 0 and "resuming after task 2 of 5" in out
    assert measured(folder) == measured(finished)


def test_ctrl_c_before_the_first_task_has_nothing_to_resume(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("morecl.run.launch.build_stream", stopped)
    code, _, err = call("run", *SMALL, "--out", tmp_path / "run")
    assert code == 130 and "stopped; nothing was written" in err
    assert not (tmp_path / "run").exists()


def test_resume_finds_the_data_from_any_directory(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for place in ("here", "elsewhere"):  # in both there is a folder of that name, with other pictures
        for label in "abcd":
            folder = tmp_path / place / "photos" / label
            folder.mkdir(parents=True)
            for k in range(5):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    learn = More._learn

    def stopped_in_the_second(self: More, task: Any, listener: Any) -> None:
        learn(self, task, listener)
        if task.index == 1:
            raise KeyboardInterrupt

    small = [*SMALL[SMALL.index("--device") :], "--out"]
    monkeypatch.chdir(tmp_path / "here")
    assert call("run", "folder:photos", *small, tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(More, "_learn", stopped_in_the_second)
        assert call("run", "folder:photos", *small, tmp_path / "run")[0] == 130
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("resume", tmp_path / "run")[0] == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "whole")
    assert read_record(tmp_path / "run" / "result.json").benchmark == "folder:photos"


def test_a_run_on_a_folder_says_what_it_does_not_use(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for k in range(5):
            image = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "photos" / label / f"{k}.png")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"no image")
    code, out, err = call("run", f"folder:{tmp_path / 'photos'}", "--method", "ncm", "--out", tmp_path / "run")
    assert code == 0, err
    data = read_record(tmp_path / "run" / "result.json").data
    assert data.train_images + data.test_images == 10
    notes = " ".join(out.split())
    assert f"held out for testing, never learned: 1 image per class ({data.test_images} of 10)" in notes
    assert "images are resized to 32 px for backbone vit_mini_patch4_32; --backbone deit_small" in notes
    assert err.count("could not be read") == 1 and "unreadable" not in out


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (9, "images are resized to 9 px, the recipe's folder_size, then to 32 px for backbone vit_mini_patch4_32 "),
        (32, "images are resized to 32 px, the recipe's folder_size "),
    ],
)
def test_a_run_on_a_folder_says_which_size_the_recipe_wants(
    call: Call, tmp_path: Path, side: int, expected: str
) -> None:
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for k in range(5):
            Image.new("RGB", (40, 40), (k, 0, 0)).save(tmp_path / "photos" / label / f"{k}.png")
    (tmp_path / "own.toml").write_text(f'dataset = "folder:photos"\ntasks = 1\nfolder_size = {side}\n')
    code, out, err = call("run", tmp_path / "own.toml", "--method", "ncm", "--out", tmp_path / "run")
    assert code == 0, err
    assert expected in " ".join(out.split()) and "--backbone" not in out


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"morecl {morecl.__version__}\n", "")


def test_no_backbone_is_not_the_folder(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", *SMALL, "--backbone", "", "--out", tmp_path / "run")
    assert (code, names(tmp_path)) == (2, [])
    assert "backbone needs a name or a file" in " ".join(err.split())


# Three runs, one process each, that end by kill -9: in an epoch of the first task, in an epoch of the third, and while
# the third checkpoint is written.
KILLED = """
import os, signal, sys
import torch
from morecl import checkpoint, cli
from morecl.methods import Learner
from morecl.training import ProtectedSGD

def run(folder, task, step):
    tasks = steps = 0
    learn, update, write = Learner.learn_task, ProtectedSGD.step, checkpoint.write

    def learn_task(self, *args):
        nonlocal tasks, steps
        tasks, steps = tasks + 1, 0
        return learn(self, *args)

    def optimizer_step(self):
        nonlocal steps
        steps += 1
        update(self)
        if (tasks, steps) == (task, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def write_checkpoint(*args, **kwargs):
        write(*args, **kwargs)
        if (tasks, step) == (task, None):
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.learn_task, ProtectedSGD.step, checkpoint.write = learn_task, optimizer_step, write_checkpoint
    sys.argv = ["morecl", "run", *sys.argv[2:], "--out", folder]
    cli.main()

for name, task, step in (("first", 1, 2), ("third", 3, 3), ("checkpoint", 3, None)):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # as the process that resumes
        run(os.path.join(sys.argv[1], name), task, step)
        os._exit(0)
    print(name, -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), *SMALL],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    ends = [f"{name} {int(signal.SIGKILL)}" for name in ("first", "third", "checkpoint")]
    assert [line for line in done.stdout.splitlines() if line in ends] == ends, done.stderr
    return folder


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("first", ["run.json"]),
        ("third", ["checkpoint-2", "run.json"]),
        ("checkpoint", [".checkpoint-3.*.tmp", "checkpoint-2", "run.json"]),
    ],
)
def test_resume_after_kill_9(call: Call, killed: Path, finished: Path, name: str, left: list[str]) -> None:
    folder = killed / name
    found = names(folder)
    assert len(found) == len(left) and all(Path(path).match(pattern) for path, pattern in zip(found, left, strict=True))
    code, out, err = call("resume", folder)
    assert code == 0, err
    assert ("resuming after task 2 of 5" in out) == (name != "first")
    assert measured(folder) == measured(finished)
    state = [(path / "model" / "state.safetensors").read_bytes() for path in (folder, finished)]
    assert state[0] == state[1]
    assert names(folder) == ["model", "result.json", "run.json"]


# ---- lists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("methods", sorted(METHODS)),
        ("benchmarks", ["digits-5t", "cifar10-5t", "cifar100-20t", "tinyimagenet-10t", "folder:PATH"]),
        ("backbones", ["vit_mini_patch4_32", "deit_small_patch16_224", "vit_base_patch16_224"]),
    ],
)
def test_lists(call: Call, what: str, expected: list[str]) -> None:
    code, out, _ = call("list", what)
    assert code == 0
    first_words = [line.split()[0] for line in out.splitlines() if line.split()]
    assert set(expected) <= set(first_words)


def test_unknown_list(call: Call) -> None:
    code, _, err = call("list", "colours")
    assert code == 2 and "methods" in err


def test_importing_changes_nothing(tmp_path: Path) -> None:
    """Global generators, number of threads, working directory and files are as before, in a separate process.

    Only the waiting policy of OpenMP is set, see ``test_start_up.py``.
    """
    script = """
import os, random, warnings
import numpy, rich.table, torch  # rich itself draws a number when it is imported
def world():
    return (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate(),
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(), os.getcwd(),
            os.listdir(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), warnings.showwarning)
before = world()
import morecl, morecl.cli, morecl.cli.display, morecl.cli.summary, morecl.run.launch, morecl.report.formats
assert before == world()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
