"""Labels survive the way through JSON with their types, or are refused."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from morecl.labels import Forgotten, decode, encode


def nested(depth: int) -> Any:
    label: Any = ()
    for _ in range(depth - 1):
        label = (label,)
    return label


LABELS: list[Any] = ["text", "", 0, -7, 10**30, 2.5, True, None, (), ("a", (1, None, 2.5)), "ünïcode", nested(32)]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_keeps_value_and_type(label: Any) -> None:
    again = decode(json.loads(json.dumps(encode(label))))
    assert again == label
    assert type(again) is type(label)


@pytest.mark.parametrize("label", [b"bytes", frozenset({1}), 1j, ("a", b"b"), datetime.date(2024, 1, 1)])
def test_other_types_cannot_be_saved(label: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot save the label .* of type"):
        encode(label)


@pytest.mark.parametrize("label", [float("inf"), float("nan"), ("a", float("-inf")), nested(33)])
def test_some_values_cannot_be_saved(label: Any) -> None:
    with pytest.raises(ValueError, match="cannot save"):
        encode(label)


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {},
        float("inf"),
        {"tuple": [float("nan")]},
        {"tuple": 1},
        {"tuple": [[1]]},
        {"tuple": [], "list": []},
        {"set": [1]},
    ],
)
def test_other_json_is_not_a_label(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a label"):
        decode(value)


def test_a_forgotten_class_is_like_no_label() -> None:
    gone = Forgotten(3)
    assert decode(json.loads(json.dumps(encode(gone)))) == gone != Forgotten(4)
    assert all(gone != label for label in [*LABELS, 3, (3,), "<forgotten class 3>", repr(gone)])
    assert len({gone, Forgotten(3), Forgotten(4)}) == 2
    with pytest.raises(TypeError, match="cannot save the label"):
        encode((1, gone))
    for forged in (True, -1, "3", 1.0, None, [3]):
        with pytest.raises(ValueError, match="not a label"):
            decode({"forgotten": forged})
    with pytest.raises(ValueError, match="not a label"):
        decode({"tuple": [{"forgotten": 3}]})
