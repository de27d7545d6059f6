"""Pictures that come more than once: what is learned, and what the user is told."""

from __future__ import annotations

import numpy as np

from morecl.classifier.duplicates import sort_out


def test_each_picture_is_learned_once_or_not_at_all() -> None:
    rng = np.random.default_rng(3)
    prints = rng.integers(0, 60, 100).astype(np.uint64)
    names = rng.choice(["a", "b", "c"], 100).tolist()
    taught = dict.fromkeys(range(10), "b")
    found = sort_out(prints, names, taught)
    fresh, disputed, mistaught = [], [], []
    for i, (number, name) in enumerate(zip(prints.tolist(), names, strict=True)):  # the slow way
        others = {n for p, n in zip(prints.tolist(), names, strict=True) if p == number}
        first = not any(p == number and n == name for p, n in zip(prints[:i].tolist(), names[:i], strict=True))
        if number in taught:
            mistaught += [(i, "b")] if first and name != "b" else []
        elif len(others) > 1:
            disputed.append(i)
        elif first:
            fresh.append(i)
    assert found.fresh.tolist() == fresh and len(fresh) > 10
    assert sorted(found.mistaught) == mistaught and mistaught
    assert found.disputed.tolist() == disputed and disputed
    assert {i for images in found.contradictory for i in images} <= set(disputed)
    assert {prints[images[0]] for images in found.contradictory} == {prints[i] for i in disputed}
    assert all(len({names[i] for i in images}) == len(images) > 1 for images in found.contradictory)
    assert found.duplicates == 100 - len(fresh) - len(disputed)


def test_nothing_to_sort_out() -> None:
    found = sort_out(np.empty(0, np.uint64), [], {})
    assert len(found.fresh) == 0 and found.duplicates == 0 and found.notes([], str) == []
    assert sort_out(np.arange(3, dtype=np.uint64), ["a", "a", "b"], {}).notes(["a", "a", "b"], str) == []


def test_notes_name_a_few_and_count_the_others() -> None:
    prints = np.array([*range(5), *range(5), *range(10, 14)], np.uint64)
    names = ["a"] * 5 + ["b"] * 5 + ["c"] * 4
    found = sort_out(prints, names, {10: "a", 11: "b", 12: "b", 13: "b"})
    several, stay = found.notes(names, lambda i: f"{i}.png")
    assert several.startswith("5 pictures were left out, being in several classes at once: 0.png ('a') and ")
    assert "2.png ('a') and 7.png ('b'); and 2 more. Remove the wrong files" in several and "3.png" not in several
    assert stay.startswith("4 images stay what the model was taught before")
    assert "10.png (taught as 'a', now 'c')" in stay and "; and 1 more. " in stay and "13.png" not in stay
    assert "undo the lesson that taught it, which also takes back later lessons, or forget" in stay
    assert "forget the class 'a', 'b'; then teach the images again, on the command line with --more. " in stay
    assert stay.endswith("If it was the first lesson, teach a new model")


def test_what_is_said_of_some_classes_leaves_out_the_others() -> None:
    prints = np.array([0, 0, 1, 1, 2, 3, 4, 4], np.uint64)
    names = ["a", "b", "c", "a", "c", "c", "c", "c"]
    found = sort_out(prints, names, {2: "a"}).of({"b", "c"}, names)
    assert found.fresh.tolist() == [5, 6] and found.disputed.tolist() == [1, 2]
    assert found.contradictory == [[0, 1], [2, 3]] and found.mistaught == [(4, "a")] and found.duplicates == 2
    only = sort_out(prints, names, {2: "a"}).of({"b"}, names)
    assert only.contradictory == [[0, 1]] and not only.mistaught and only.duplicates == 0
