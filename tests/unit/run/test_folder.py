"""The folder of a run: one rule for its name, and nothing of anyone else's is used or removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import exit_code
from morecl.errors import InputError
from morecl.run.folder import checkpoints, clear, default_folder, refuse_taken
from morecl.suite.plan import Group, Suite, plan


def test_default_folder() -> None:
    assert default_folder(Path("runs"), "digits-5t", "more", "0", 3) == Path("runs/digits-5t/more/order-0-seed-3")
    folder = default_folder(Path("out"), "folder:my photos/2", "hat", "random", 0, "slow")
    assert folder == Path("out/folder_my_photos_2/hat-slow/order-random-seed-0")


def test_the_command_line_and_a_suite_use_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text(
        'dataset = "digits"\ntasks = 2\ntrain_per_class = 2\ntest_per_class = 1\n'
    )
    assert exit_code(monkeypatch, "run", "recipes/own.toml", "--method", "ncm", "--class-order", 1, "--seed", 1) == 0
    group = Group(methods=["ncm"], benchmarks=["recipes/own.toml"])
    (planned,) = plan(Suite(name="mine", description="a test", seeds=[1], runs=[group]), Path("runs"))
    assert [path.parent for path in Path("runs").rglob("result.json")] == [planned.folder]
    assert planned.folder == Path("runs/own/ncm/order-1-seed-1")


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-2", ".checkpoint-11.x.tmp", "checkpoint-", "model"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]


def test_only_the_files_of_a_run_are_removed(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "model", ".model.x.tmp", "checkpoints-of-mine"):
        (tmp_path / name).mkdir()
    for name in ("run.json", "result.json", ".result.json.x.tmp", "notes.txt", ".lock"):
        (tmp_path / name).touch()
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints-of-mine", "notes.txt"]


def test_who_is_killed_while_clearing_can_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkpoint-1", "checkpoint-2", "model"):
        (tmp_path / name).mkdir()
    for name in ("run.json", "result.json"):
        (tmp_path / name).touch()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            clear(tmp_path)
    assert not (tmp_path / "result.json").exists()  # no report counts it
    refuse_taken(tmp_path, overwrite=True)
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_with_other_files_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / ".lock").touch()
    refuse_taken(tmp_path, overwrite)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="is not empty and holds no run"):
        refuse_taken(tmp_path, overwrite)


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for out in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(InputError, match=f"{tmp_path / 'link'} is a link that leads nowhere"):
            refuse_taken(out, overwrite=True)
    (tmp_path / "nowhere").mkdir()
    refuse_taken(tmp_path / "link", overwrite=False)
