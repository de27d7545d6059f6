"""Which images ``morecl predict`` is asked about."""

from __future__ import annotations

import io
import os

import pytest

from morecl.cli.own import predict
from morecl.cli.own.predict import listed


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


def test_a_path_is_there_before_the_next_one_comes() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        found = listed(stream)
        for name in ("a.png", "b.png"):
            os.write(writer, f"{name}\n".encode())
            assert next(found) == name
        os.close(writer)
        assert list(found) == []
