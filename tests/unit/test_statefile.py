"""The header of a large state file is read without mapping the file; what safetensors refuses is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from morecl.statefile import Entry, read_header

TENSORS = {
    "b.half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "a": torch.arange(5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(7),
    "images": torch.arange(24, dtype=torch.uint8).reshape(2, 2, 2, 3),
    "mask": torch.tensor([True, False, True]),
}


def test_entries_and_places_are_those_that_safetensors_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x", metadata={"format": "pt"})
    content = (tmp_path / "x").read_bytes()
    found = read_header(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    for name, (entry, begin) in found.items():
        tensor = TENSORS[name]
        assert entry == Entry(tuple(tensor.shape), tensor.dtype)
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[begin : begin + len(expected)] == expected


def place(name: str, *offsets: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].update(data_offsets=list(offsets))


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlap": place("mask", 0, 3),
    "beyond the end": place("mask", 10**6, 10**6 + 3),
    "negative": place("mask", -3, 0),
    "three offsets": place("mask", 0, 1, 2),
    "no numbers": place("mask", 0.0, 3.0),
    "larger shape": lambda header: header["images"].update(shape=[99, 2, 2, 3]),
    "shape that overflows": lambda header: header["images"].update(shape=[2**62, 2**62, 2**62, 24]),
    "negative shape": lambda header: header["images"].update(shape=[-2, -2, 2, 3]),
    "no shape": lambda header: header["images"].pop("shape"),
    "other type": lambda header: header["images"].update(dtype="F32"),
    "unknown type": lambda header: header["images"].update(dtype="X9"),
    "no type": lambda header: header["images"].update(dtype=None),
    "one missing": lambda header: header.pop("a"),
    "not described": lambda header: header.update(images=[1, 2]),
}


def write(path: Path, text: bytes, data: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refused(path: Path, reason: str | None = None) -> None:
    with pytest.raises(ValueError, match=reason):
        read_header(path)
    with pytest.raises((SafetensorError, ValueError)), safe_open(path, "pt"):
        pass


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_header_is_refused(tmp_path: Path, forge: Callable[[dict[str, Any]], Any]) -> None:
    save_file(TENSORS, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    forge(header)
    write(tmp_path / "x", json.dumps(header).encode(), content[8 + length :])
    refused(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no header"),
        (b"\x05\0\0", "no header"),
        (bytes(8), "no header"),
        (b"\xff" * 8 + b"{}", "no header"),
        (b"\x02" + bytes(7) + b"[]", "no object"),
        (b"\x02" + bytes(7) + b"{}x", "end at byte 10 of 11"),
        (b"\x02" + bytes(7) + b"{x", "property name"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    refused(tmp_path / "x", reason)


def test_nests_and_names_that_come_twice_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"")
    refused(tmp_path / "x", "nested too deeply")
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write(tmp_path / "x", b"{" + entry + b"," + entry + b"}", b"\0")
    with pytest.raises(ValueError, match="twice"):  # safetensors would take the last
        read_header(tmp_path / "x")
