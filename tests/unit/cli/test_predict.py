"""Which images ``morecl predict`` is asked about."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from morecl.cli.own import predict
from morecl.cli.own.predict import listed
from morecl.errors import InputError


@pytest.mark.parametrize("chunk", [predict.CHUNK, 7])
@pytest.mark.parametrize(
    ("given", "paths"),
    [
        (b"a.png\nb c.png\r\n\n  \nd.png", ["a.png", "b c.png", "d.png"]),
        (b"a.png\0b\nc.png\0\0d\r\0", ["a.png", "b\nc.png", "d\r"]),
        (b"x\ny.p\0z.png\n\0", ["x\ny.p", "z.png\n"]),
        (b"\xff.png\n", [os.fsdecode(b"\xff.png")]),
        (b"", []),
    ],
)
def test_paths_end_with_their_lines_or_at_nul(
    given: bytes, paths: list[str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "CHUNK", chunk)
    assert list(listed(io.BytesIO(given))) == paths


def test_linked_folders_are_followed_once_and_not_in_circles(tmp_path: Path) -> None:
    """As ``learn`` does."""
    inbox = tmp_path / "inbox"
    for name in ("inbox/z.png", "inbox/deep/a.png", "other/b.png", ".hidden/c.png", "inbox/.d/e.png", "inbox/.f.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (inbox / "a-link").symlink_to(tmp_path / "other")
    (inbox / "again").symlink_to(tmp_path / "other")
    (inbox / "a-same").symlink_to("deep")
    (inbox / "self").symlink_to(".")
    (inbox / "loop").symlink_to("loop")
    (inbox / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "other" / "back").symlink_to(inbox)
    found = list(predict.images_in(str(inbox)))
    assert found == [str(inbox / name) for name in ("z.png", "deep/a.png", "a-link/b.png")]
    (tmp_path / "way").symlink_to(inbox)
    assert len(list(predict.images_in(str(tmp_path / "way")))) == 3


def test_a_path_is_there_before_the_next_one_comes() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        found = listed(stream)
        for name in ("a.png", "b.png"):
            os.write(writer, f"{name}\n".encode())
            assert next(found) == name
        os.close(writer)
        assert list(found) == []


def test_lists_come_as_soon_as_they_are_there_and_none_is_lost() -> None:
    assert [path for batch in predict.arriving(map(str, range(25)), 4) for path in batch] == list(map(str, range(25)))
    assert list(predict.arriving([], 4)) == []


def test_what_goes_wrong_while_reading_is_raised_after_what_was_read() -> None:
    def paths() -> Iterator[str]:
        yield "a.png"
        yield "b.png"
        raise InputError("no more")

    found: list[str] = []
    with pytest.raises(InputError, match="no more"):
        for batch in predict.arriving(paths(), 4):
            found += batch
    assert found == ["a.png", "b.png"]


def test_a_stdin_that_cannot_be_read_is_a_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_write_alone = os.open(tmp_path / "f", os.O_WRONLY | os.O_CREAT)
    cannot = pytest.raises(InputError, match=r"stdin cannot be read \(Bad file descriptor\)")
    with os.fdopen(to_write_alone, "rb") as stream, cannot:
        list(listed(stream))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="from stdin, but it is closed"):
        predict._stdin()
