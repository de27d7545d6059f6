"""Images that are read when they are asked for behave like the array they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from morecl import images as module
from morecl.data.stream import Dataset, TaskStream
from morecl.pictures import AnyImages, InMemory, Pictures, changed, joined, some

RNG = np.random.default_rng(0)
ARRAY = RNG.integers(0, 256, (20, 5, 4, 3)).astype(np.uint8)


class Counting(InMemory):
    """Counts the images that are read."""

    read_so_far = 0

    def read(self, rows: Any, out: Any) -> None:
        self.read_so_far += len(rows)
        super().read(rows, out)


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        slice(2, 9),
        slice(None, None, -3),
        np.array([4, 4, 0]),
        np.arange(20) % 3 == 0,
        (slice(None), 0, 1),
        (2, 1),
    ],
    ids=str,
)
def test_indexing_is_that_of_the_array(index: Any) -> None:
    assert np.array_equal(Pictures(InMemory(ARRAY))[index], ARRAY[index])
    assert np.array_equal(Pictures(InMemory(ARRAY)).rows(slice(None, None, -1))[index], ARRAY[::-1][index])


def test_shape_type_and_bytes_are_those_of_the_array() -> None:
    pictures = Pictures(InMemory(ARRAY)).rows(slice(7))
    assert (pictures.shape, pictures.ndim, pictures.dtype, pictures.nbytes) == (
        ARRAY[:7].shape,
        4,
        ARRAY.dtype,
        ARRAY[:7].nbytes,
    )
    assert len(pictures) == 7 and np.array_equal(np.asarray(pictures), ARRAY[:7])
    assert np.array_equal(np.concatenate([pictures, pictures]), np.concatenate([ARRAY[:7], ARRAY[:7]]))
    assert [image.tolist() for image in pictures] == ARRAY[:7].tolist()
    with pytest.raises(IndexError):
        pictures[7]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(pictures, copy=False)


def test_rows_of_rows_are_read_once_and_only_when_wanted() -> None:
    source = Counting(ARRAY)
    part = Pictures(source).rows(np.arange(20) > 4).rows(np.array([9, 2]))
    assert source.read_so_far == 0
    assert np.array_equal(part[:], ARRAY[[14, 7]]) and source.read_so_far == 2


def test_joined_and_changed_images() -> None:
    source = Counting(ARRAY)
    parts: list[AnyImages] = [ARRAY[:3], Pictures(source).rows(slice(3, 9)), ARRAY[9:11]]
    both = joined(parts)
    assert both.shape == (11, 5, 4, 3) and source.read_so_far == 0
    for index in (np.array([10, 0, 5, 3, 8, 2]), np.array([4, 8]), np.array([1]), slice(None)):
        assert np.array_equal(both[index], ARRAY[:11][index])
    mirrored = changed(both, lambda images: images[:, :, ::-1])
    assert np.array_equal(mirrored[2:7], ARRAY[2:7, :, ::-1])


def test_joining_again_and_again_makes_no_deeper_nest() -> None:
    source = InMemory(ARRAY)
    both = joined([ARRAY[:3], Pictures(source).rows(slice(3, 5))])
    for start in range(5, 20, 5):
        both = joined([both, Pictures(source).rows(slice(start, start + 5))])
    assert np.array_equal(both[:], ARRAY) and both[np.array([19, 2, 4])].tolist() == ARRAY[[19, 2, 4]].tolist()
    first, others = both._source.parts  # type: ignore[attr-defined]
    assert len(first) == 3 and others._source is source
    backwards = joined([both.rows(slice(None, None, -1)), ARRAY[:1]])
    assert np.array_equal(backwards[:], np.concatenate([ARRAY[::-1], ARRAY[:1]])), "only what is whole is taken apart"
    assert joined([Pictures(source).rows(slice(2)), Pictures(source).rows(slice(2, 4))])._source is source


def test_chunks_are_all_images_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morecl.pictures.CHUNK_BYTES", 3 * ARRAY[0].nbytes + 1)
    parts = [*Pictures(InMemory(ARRAY)).chunks()]
    assert [len(part) for part in parts] == [3, 3, 3, 3, 3, 3, 2]
    assert np.array_equal(np.concatenate(parts), ARRAY)


def test_as_array_reads_and_as_images_does_not() -> None:
    source = Counting(ARRAY)
    pictures = Pictures(source)
    assert module.as_images(pictures, 8) is pictures and source.read_so_far == 0
    assert np.array_equal(module.as_array(pictures, 8), ARRAY)
    assert np.array_equal(np.asarray(module.as_images(ARRAY, 8)), ARRAY)


def test_a_stream_reads_nothing_until_a_task_is_used() -> None:
    source, y = Counting(ARRAY), np.arange(20) % 4
    lazy = Dataset(
        "lazy", Pictures(source).rows(slice(12)), y[:12], Pictures(source).rows(slice(12, 20)), y[12:], tuple("abcd")
    )
    held = Dataset("lazy", ARRAY[:12], y[:12], ARRAY[12:], y[12:], tuple("abcd"))
    stream, expected = (TaskStream(data, [2, 0, 3, 1], tasks=2) for data in (lazy, held))
    tasks = [*stream]
    assert source.read_so_far == 0
    for task, other in zip(tasks, expected, strict=True):
        assert task.classes == other.classes and np.array_equal(task.y_train, other.y_train)
        assert np.array_equal(task.x_train[:], other.x_train) and np.array_equal(task.x_test[:], other.x_test)
    assert source.read_so_far == 20


def test_the_fingerprint_is_that_of_the_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks, it is the one that committed records have."""
    import hashlib

    monkeypatch.setattr("morecl.pictures.CHUNK_BYTES", 200)
    y = np.arange(20, dtype=np.int64) % 4
    digest = hashlib.sha256()
    for array in (ARRAY[:12], y[:12], ARRAY[12:], y[12:]):
        digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    digest.update(b"a\nb\nc\nd")
    for images in (ARRAY, Pictures(InMemory(ARRAY))):
        x_train, x_test = some(images, slice(12)), some(images, slice(12, 20))
        assert Dataset("x", x_train, y[:12], x_test, y[12:], tuple("abcd")).fingerprint == digest.hexdigest()
