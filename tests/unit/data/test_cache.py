"""The cache of decoded images: what it is keyed by, what damage does, who waits for whom, and what goes first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from morecl.data import StreamedImagesWarning, cache, decoding, folder, load_dataset
from morecl.data.cache import IMAGES, INDEX, NoRoomError, clear, decoded, entries
from morecl.errors import InputError
from morecl.images import open_image, square
from morecl.pictures import Pictures

SIDE = 8
IMAGE_BYTES = SIDE * SIDE * 3


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORECL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def photos(path: Path, count: int = 12) -> list[Path]:
    """``count`` noisy images in two classes."""
    rng = np.random.default_rng(len(path.name))
    for i in range(count):
        file = path / "ab"[i % 2] / f"{i:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 14, 3)).astype(np.uint8)).save(file)
    return sorted(path.rglob("*.png"))


def directly(files: list[Path], side: int = SIDE) -> np.ndarray:
    return np.stack([square(open_image(file), side) for file in files])


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many files each call of ``decode_all`` got."""
    calls: list[int] = []

    def counted(files: list[Path], *args: object, **options: object) -> object:
        calls.append(len(files))
        return decoding.decode_all(files, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "decode_all", counted)
    yield calls


def test_images_are_those_of_the_files_and_decoded_once(root: Path, tmp_path: Path, decodings: list[int]) -> None:
    files = photos(tmp_path / "p")
    first = Pictures(decoded(tmp_path / "p", files, SIDE))
    again = Pictures(decoded(tmp_path / "p", files, SIDE))
    assert decodings == [12]
    assert np.array_equal(first[:], directly(files)) and np.array_equal(again[:], directly(files))
    index = np.array([3, 4, 5, 0, 11, 11, 2])
    assert np.array_equal(again[index], directly(files)[index])
    assert again[np.array([], np.int64)].shape == (0, SIDE, SIDE, 3)


def test_whatever_changes_the_images_makes_them_anew(
    root: Path, tmp_path: Path, decodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = photos(tmp_path / "p")
    decoded(tmp_path / "p", files, SIDE)
    os.utime(files[3], ns=(0, 12345))
    decoded(tmp_path / "p", files, SIDE)
    assert len(decodings) == 2, "another time of change"
    stat = files[3].stat()
    files[3].write_bytes(files[3].read_bytes() + b"\0")
    os.utime(files[3], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    decoded(tmp_path / "p", files, SIDE)
    assert len(decodings) == 3, "another size"
    files[3] = files[3].rename(files[3].with_name("zz.png"))
    decoded(tmp_path / "p", files, SIDE)
    assert len(decodings) == 4, "another name"
    decoded(tmp_path / "p", files[1:], SIDE)
    assert len(decodings) == 5, "a file less"
    monkeypatch.setattr(cache.PIL, "__version__", "0.1")
    decoded(tmp_path / "p", files[1:], SIDE)
    assert len(decodings) == 6, "another Pillow"
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    decoded(tmp_path / "p", files[1:], SIDE)
    assert len(decodings) == 7, "another version of this package"
    assert len(entries(root)) == 1, "the older ones are replaced"
    decoded(tmp_path / "p", files[1:], SIDE + 1)
    shutil.copytree(tmp_path / "p", tmp_path / "q")  # keeps sizes and times
    other = [tmp_path / "q" / file.relative_to(tmp_path / "p") for file in files[1:]]
    decoded(tmp_path / "q", other, SIDE)
    assert len(decodings) == 9 and len(entries(root)) == 3, "another side, another folder"


def only_entry(root: Path) -> Path:
    (entry,) = entries(root)
    return entry.path


def test_a_flipped_byte_is_noticed(root: Path, tmp_path: Path, decodings: list[int]) -> None:
    files = photos(tmp_path / "p")
    decoded(tmp_path / "p", files, SIDE)
    data = bytearray((only_entry(root) / IMAGES).read_bytes())
    data[5 * IMAGE_BYTES + 17] ^= 1
    (only_entry(root) / IMAGES).write_bytes(data)
    images = Pictures(decoded(tmp_path / "p", files, SIDE))
    assert len(decodings) == 1, "found when it is read"
    assert np.array_equal(images[:], directly(files))
    assert np.array_equal(Pictures(decoded(tmp_path / "p", files, SIDE))[:], directly(files))
    assert len(decodings) == 2, "made anew"
    assert (only_entry(root) / IMAGES).read_bytes() == directly(files).tobytes()


def test_a_flipped_byte_of_a_file_that_changed_is_an_error(root: Path, tmp_path: Path) -> None:
    files = photos(tmp_path / "p")
    images = Pictures(decoded(tmp_path / "p", files, SIDE))
    with (only_entry(root) / IMAGES).open("rb+") as file:
        file.write(bytes(IMAGE_BYTES))
    Image.new("RGB", (9, 9), (1, 2, 3)).save(files[0])
    assert np.array_equal(images[1:], directly(files[1:]))
    with pytest.raises(InputError, match=r"damaged, and .*00\.png is not the file they were made from"):
        images[0]


@pytest.mark.parametrize("damage", ["truncated", "longer", "index", "no index", "no JSON", "no images"])
def test_damage_that_shows_at_once_makes_it_anew(root: Path, tmp_path: Path, decodings: list[int], damage: str) -> None:
    files = photos(tmp_path / "p")
    decoded(tmp_path / "p", files, SIDE)
    images, index = (only_entry(root) / name for name in (IMAGES, INDEX))
    if damage == "truncated":
        images.write_bytes(images.read_bytes()[:-1])
    elif damage == "longer":
        images.write_bytes(images.read_bytes() + b"\0")
    elif damage == "index":
        text = index.read_text()
        index.write_text(text.replace(f'"side": {SIDE}', '"side": 9', 1))
        assert index.read_text() != text
    elif damage == "no JSON":
        index.write_text("{")
    else:
        (index if damage == "no index" else images).unlink()
    assert np.array_equal(Pictures(decoded(tmp_path / "p", files, SIDE))[:], directly(files))
    assert len(decodings) == 2
    decoded(tmp_path / "p", files, SIDE)
    assert len(decodings) == 2


def test_a_file_cut_short_while_it_is_read_is_noticed(root: Path, tmp_path: Path) -> None:
    files = photos(tmp_path / "p")
    images = Pictures(decoded(tmp_path / "p", files, SIDE))
    os.truncate(only_entry(root) / IMAGES, 6 * IMAGE_BYTES + 9)
    assert np.array_equal(images[:], directly(files))


def test_an_unreadable_file_is_tried_again(root: Path, tmp_path: Path, decodings: list[int]) -> None:
    files = photos(tmp_path / "p")
    good = files[2].read_bytes()
    files[2].write_bytes(b"x" * len(good))
    stat = files[2].stat()
    first = decoded(tmp_path / "p", files, SIDE)
    assert [*first.problems] == [2] and "not an image" in first.problems[2]
    assert [*decoded(tmp_path / "p", files, SIDE).problems] == [2] and len(decodings) == 1
    files[2].write_bytes(good)
    os.utime(files[2], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not decoded(tmp_path / "p", files, SIDE).problems


SLOW = """
import sys, time
from pathlib import Path
from morecl.data import cache, decoding
real = decoding.open_image
def slowly(path, sized):
    with open(sys.argv[2], "a") as log: log.write("x")
    time.sleep(float(sys.argv[3]))
    return real(path, sized)
decoding.open_image = slowly
files = sorted(Path(sys.argv[1]).rglob("*.png"))
print(int(cache.decoded(Path(sys.argv[1]), files, 8)._checksums.sum()))
"""


def decoder(photos: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(photos), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_decodes_and_the_other_waits(root: Path, tmp_path: Path) -> None:
    photos(tmp_path / "p")
    both = [decoder(tmp_path / "p", tmp_path / f"log{i}", 0.08) for i in range(2)]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert printed[0] == printed[1] and int(printed[0]) > 0
    opened = sorted((tmp_path / f"log{i}").stat().st_size for i in range(2) if (tmp_path / f"log{i}").exists())
    assert opened == [12]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_process_leaves_nothing_that_counts(root: Path, tmp_path: Path, decodings: list[int]) -> None:
    files = photos(tmp_path / "p")
    process = decoder(tmp_path / "p", tmp_path / "log", 0.5)
    while not (tmp_path / "log").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = root.glob(".*.tmp")
    assert (left / IMAGES).stat().st_size == 12 * IMAGE_BYTES
    assert entries(root) == []
    assert np.array_equal(Pictures(decoded(tmp_path / "p", files, SIDE))[:], directly(files))
    assert decodings == [12] and not [*root.glob(".*.tmp")]


def size_of(root: Path) -> int:
    return sum(entry.bytes for entry in entries(root))


def test_what_was_used_least_recently_goes_first(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: photos(tmp_path / name) for name in ("one", "two", "three")}
    for age, name in ((300, "one"), (200, "two")):
        decoded(tmp_path / name, folders[name], SIDE)
        entry = next(entry for entry in entries(root) if entry.name.startswith(name))
        os.utime(entry.path / INDEX, (time.time() - age,) * 2)
    decoded(tmp_path / "one", folders["one"], SIDE)  # used now
    monkeypatch.setenv("MORECL_CACHE_GB", str((size_of(root) + 100) / 1e9))
    decoded(tmp_path / "three", folders["three"], SIDE)
    assert [entry.folder.rpartition("/")[2] for entry in entries(root)] == ["three", "one"]


def test_what_is_in_use_stays(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: photos(tmp_path / name) for name in ("one", "two")}
    held = decoded(tmp_path / "one", files["one"], SIDE)
    assert entries(root)[0].in_use()
    monkeypatch.setenv("MORECL_CACHE_GB", str((size_of(root) + 100) / 1e9))
    with pytest.raises(NoRoomError, match="in use there take"):
        decoded(tmp_path / "two", files["two"], SIDE)
    assert clear(root)[0] == [] and [entry.folder for entry in clear(root)[1]] == [str(tmp_path / "one")]
    assert np.array_equal(Pictures(held)[:], directly(files["one"]))
    del held
    assert not entries(root)[0].in_use()
    decoded(tmp_path / "two", files["two"], SIDE)
    assert [entry.folder for entry in entries(root)] == [str(tmp_path / "two")]
    assert [entry.images for entry in clear(root)[0]] == [12] and entries(root) == []


def test_a_short_disk_keeps_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = photos(tmp_path / "p")
    short = shutil._ntuple_diskusage(10**12, 10**12, cache.LEFT_FREE + 12 * IMAGE_BYTES - 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: short)
    with pytest.raises(NoRoomError, match=r"1\.1 GB free"):
        decoded(tmp_path / "p", files, SIDE)
    assert entries(root) == []


def test_a_disk_that_fills_up_leaves_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = photos(tmp_path / "p")

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "pwrite", full)
    with pytest.raises(NoRoomError, match="No space left"):
        decoded(tmp_path / "p", files, SIDE)
    assert entries(root) == [] and not [*root.glob(".*.tmp")]


@pytest.mark.parametrize("held", [True, False])
def test_without_a_cache_the_data_set_is_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    files = photos(tmp_path / "p")
    files[3].write_bytes(b"no image")
    with pytest.warns(match="could not be read"):
        kept = load_dataset(f"folder:{tmp_path / 'p'}", folder_size=SIDE)
    monkeypatch.setenv("MORECL_CACHE_GB", "0")
    shutil.rmtree(root)
    monkeypatch.setattr(folder, "HELD_BYTES", 11 * IMAGE_BYTES + IMAGE_BYTES * held)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = load_dataset(f"folder:{tmp_path / 'p'}", folder_size=SIDE)
    streamed = [str(w.message) for w in caught if w.category is StreamedImagesWarning]
    assert bool(streamed) == (not held) and all("MORECL_CACHE" in text for text in streamed)
    assert not root.exists()
    assert other.fingerprint == kept.fingerprint and other.skipped == kept.skipped and len(other.skipped) == 1
    assert np.array_equal(other.x_test[:], kept.x_test[:])
    if not held:
        files[0].unlink(), files[1].unlink(), files[2].unlink()
        with pytest.raises(InputError, match="could be read before and now cannot"):
            other.x_train[:]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = photos(tmp_path / "p")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MORECL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NoRoomError, match="Not a directory"):
        decoded(tmp_path / "p", files, SIDE)
    data = load_dataset(f"folder:{tmp_path / 'p'}", folder_size=SIDE)
    assert len(data.x_train) + len(data.x_test) == 12


@pytest.mark.parametrize("limit", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORECL_CACHE_GB", limit)
    with pytest.raises(InputError, match="MORECL_CACHE_GB"):
        cache.cache_limit()
