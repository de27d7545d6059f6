"""Which texts can name a class, and which of them look alike."""

from __future__ import annotations

import pytest

from morecl.classifier.names import check_name, look_alikes, two_classes
from morecl.cli.terminal import printable
from morecl.errors import InputError

PERSIAN, INDIC, FAMILY = "گربه\u200cها", "क्\u200dष", "👨\u200d👩\u200d👧"


@pytest.mark.parametrize(
    "name", ["cat", "oak leaf", "a\u00a0b", "12\u202fpm", "猫", "कुत्ता", PERSIAN, INDIC, FAMILY, "☕\ufe0f", "അവന്\u200d"]
)
def test_words_of_all_languages_are_names(name: str) -> None:
    check_name(name)
    assert printable(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "1 to 200 characters are needed"),
        (" \u200d\u2003", "1 to 200 characters are needed"),
        ("x" * 201, r"x{60}'\.\.\. cannot name a class: 1 to 200 characters are needed"),
        ("a\tb", r"it holds U\+0009 \(which is not printed\)"),
        ("a\x1b[31mb", r"it holds U\+001B"),
        ("a\u202eb", r"it holds U\+202E \(RIGHT-TO-LEFT OVERRIDE\)"),
        ("a\u200bb", r"it holds U\+200B \(ZERO WIDTH SPACE\)"),
        ("a\u2028b", r"it holds U\+2028 \(LINE SEPARATOR\)"),
        ("cat\u00a0", "begins or ends with a blank"),
        ("\u200dcat", "it begins with an invisible joiner"),
        ("Unknown", "it is the answer for what was never taught"),
    ],
)
def test_what_nobody_sees_is_named(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_name(name)


def test_names_that_look_alike() -> None:
    known = ["Cat", "oak leaf", PERSIAN]
    names = ["cat", "oak\u00a0leaf", PERSIAN.replace("\u200c", ""), "dog", "Cat"]
    assert list(look_alikes(names, known)) == [(name, other) for name, other in zip(names, known, strict=False)]
    (said,) = two_classes(["oak\u00a0leaf"], known)
    assert said.startswith(r"'oak\xa0leaf' and 'oak leaf' are two classes, though they look alike.")
