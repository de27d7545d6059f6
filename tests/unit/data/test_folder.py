"""``folder:PATH``: a user's images as a data set."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from morecl.classifier.reading import read
from morecl.classifier.store import MODEL, VERSIONS
from morecl.data import (
    Dataset,
    SkippedImagesWarning,
    UnlabelledImagesWarning,
    build_stream,
    decoding,
    load_dataset,
    load_recipe,
)
from morecl.data.folder import _chosen_for_test, labelled_files, load_folder, walked
from morecl.errors import InputError


def picture(path: Path, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (12, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def load(path: Path, size: int = 4) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning that was not expected fails the test
        return load_dataset(f"folder:{path}", folder_size=size)


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    for value, name in enumerate(("rose", "aster", "lily")):
        for i in range(50):
            picture(tmp_path / "flowers" / name / f"{i:03d}.png", (value, i, 0))
    return tmp_path / "flowers"


def files_of(data: Dataset, label: int) -> tuple[set[int], set[int]]:
    """Which of the numbered files (second channel) are in train and in test."""
    train, test = (x[y == label][:, 0, 0, 1] for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)))
    return set(train.tolist()), set(test.tolist())


def test_automatic_split_is_by_class_complete_and_stable(flowers: Path) -> None:
    data = load(flowers)
    assert data.name == "folder:flowers" and data.classes == ("aster", "lily", "rose") and data.skipped == ()
    assert data.x_train.shape[1:] == (4, 4, 3) and data.x_train.dtype == np.uint8
    assert set(data.x_train[data.y_train == 0][:, 0, 0, 0]) == {1}  # "aster" was written with value 1
    for label in range(3):
        train, test = files_of(data, label)
        assert train | test == set(range(50)) and not train & test and 4 <= len(test) <= 18
        assert data.x_train[data.y_train == label][:, 0, 0, 1].tolist() == sorted(train)  # file order
    assert files_of(data, 0) != files_of(data, 1)
    assert load(flowers).fingerprint == data.fingerprint


def test_adding_files_moves_no_other(flowers: Path) -> None:
    before = load(flowers)
    for i in range(50, 80):
        picture(flowers / "lily" / f"{i:03d}.png", (2, i, 0))
    after = load(flowers)
    for label in range(3):
        for old, new in zip(files_of(before, label), files_of(after, label), strict=True):
            assert old == {i for i in new if i < 50}


def test_the_split_is_pinned() -> None:
    """sha256 of the name, first 8 bytes below a fifth: this choice must never change between versions."""
    names = [f"rose/{i}.jpg" for i in range(20)]
    assert np.flatnonzero(_chosen_for_test(names)).tolist() == [6, 10, 11, 13, 15]


def test_both_sides_of_the_smallest_classes_get_an_image() -> None:
    for start in range(200):  # pairs where the hash chooses none, one or both
        pair = [f"c/{start}.jpg", f"c/{start + 1}.jpg"]
        assert _chosen_for_test(pair).sum() == 1


def test_train_and_test_folders_are_kept(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for name in ("a", "b"):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.png", (i, 100, 0))
    data = load(tmp_path)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1] and data.y_test.tolist() == [0, 0, 1, 1]
    assert data.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_images_are_scaled_by_the_shorter_side_and_cropped_in_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255  # the middle square is white
    for name in ("a", "b"):
        for i in range(2):
            picture(tmp_path / name / f"{i}.png")
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "a" / "1.png")
    data = load(tmp_path, 10)
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert x.shape == (2, 10, 10, 3)
        assert (x[y == 0][:, 1:-1, 1:-1] == 255).all()  # at the rim bicubic mixes in the black beside
        assert x[y == 0].min() > 200


def test_exif_orientation_modes_and_nested_folders(tmp_path: Path) -> None:
    half = np.zeros((16, 16, 3), np.uint8)
    half[:8] = 200  # the upper half is light
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for i in range(2):
        Image.fromarray(half).save(tmp_path / "a" / "deep" / f"{i}.jpg", exif=exif, quality=95)
    (tmp_path / "b").mkdir()
    Image.new("L", (16, 16), 50).save(tmp_path / "b" / "grey.PNG")
    Image.new("RGBA", (16, 16), (50, 50, 50, 255)).save(tmp_path / "b" / "alpha.png")
    data = load(tmp_path, 16)
    turned = np.concatenate([data.x_train[data.y_train == 0], data.x_test[data.y_test == 0]])
    assert turned.shape == (2, 16, 16, 3) and turned[:, 2].max() < 20 and turned[:, 13].min() > 180
    grey = np.concatenate([data.x_train[data.y_train == 1], data.x_test[data.y_test == 1]])
    assert (grey == 50).all()


def test_unreadable_images_are_named_counted_and_skipped(flowers: Path) -> None:
    whole = flowers / "rose" / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole)
    (flowers / "rose" / "cut.jpg").write_bytes(whole.read_bytes()[:900])
    whole.unlink()
    (flowers / "aster" / "text.png").write_text("not an image")
    (flowers / "lily" / "empty.jpeg").write_bytes(b"")
    Image.new("I;16", (8, 8), 3000).save(flowers / "lily" / "sixteen.png")
    with pytest.warns(SkippedImagesWarning, match="4 of 154 images under .* were skipped: aster/text.png") as caught:
        data = load_dataset(f"folder:{flowers}", folder_size=4)
    assert len(caught) == 1
    assert [name.split(" (")[0] for name in data.skipped] == [
        "aster/text.png",
        "lily/empty.jpeg",
        "lily/sixteen.png",
        "rose/cut.jpg",
    ]
    why = [read([flowers / name.split(" (")[0]], 4).problems[0][1] for name in data.skipped]  # of `learn`
    assert [name.split(" (", 1)[1] for name in data.skipped] == [f"{text})" for text in why]
    assert data.skipped[0] == "aster/text.png (not an image, or of an unknown kind)"
    assert "truncated" in data.skipped[3] and len(data.y_train) + len(data.y_test) == 150


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_truncated_image_is_called_so(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"cut.{kind}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:300])
    assert decoding.decode(file, 4) == "image file is truncated"
    assert read([file], 4).problems == [(0, "image file is truncated")]


def test_a_long_list_of_unreadable_images_is_shortened_in_the_warning(flowers: Path) -> None:
    for i in range(9):
        (flowers / "rose" / f"bad{i}.jpg").write_bytes(b"")
    with pytest.warns(SkippedImagesWarning, match=r"rose/bad4.jpg .*; and 4 more$"):
        assert len(load_dataset(f"folder:{flowers}", folder_size=4).skipped) == 9


def test_one_unreadable_image_is_singular(flowers: Path) -> None:
    (flowers / "rose" / "bad.jpg").write_bytes(b"")
    with pytest.warns(SkippedImagesWarning, match=r"^1 of 151 images under .* could not be read and was skipped: rose"):
        load_dataset(f"folder:{flowers}", folder_size=4)


def test_other_files_are_ignored(flowers: Path) -> None:
    before = load(flowers).fingerprint
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "._000.png"):
        (flowers / "rose" / name).write_bytes(b"x")
        (flowers / name).write_bytes(b"x")
    picture(flowers / ".cache" / "x.png")
    picture(flowers / "rose" / ".thumbnails" / "x.png")
    assert load(flowers).fingerprint == before


def test_pictures_of_a_kind_that_is_not_read_are_named(flowers: Path) -> None:
    first = sorted(path for path in flowers.iterdir() if path.is_dir())[0]
    (first / "phone.HEIC").write_bytes(b"no decoder for it")
    Image.new("RGB", (8, 8)).save(first / "old.jfif", format="JPEG")
    with pytest.warns(SkippedImagesWarning, match="phone.HEIC"):
        data = load_dataset(f"folder:{flowers}", folder_size=4)
    assert [name for name in data.skipped if "phone" in name] == list(data.skipped)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_need_not_be_utf8(flowers: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (flowers / name).mkdir()
    for i in range(5):
        picture(flowers / name / f"{name}{i}.png")
    data = load(flowers)
    assert name in data.classes and len(data.fingerprint) == 64


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_memory_that_runs_out_while_decoding_is_no_unreadable_image(
    flowers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, sized: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decoding, "open_image", full)
    with pytest.raises(InputError, match=r"flowers: there is not enough memory .* 4 x 4 pixels. .*image_size"):
        load(flowers)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
@pytest.mark.parametrize("cached", [True, False])
def test_a_folder_may_be_larger_than_memory(tmp_path: Path, cached: bool) -> None:
    """80 images at 1000 px take 240 MB; the process may take 160 more than it has."""
    for i in range(80):
        picture(tmp_path / "large" / "ab"[i % 2] / f"{i}.jpg", (i, 0, 0), (1000, 1000))
    script = (
        "import os, resource, sys; from pathlib import Path; from morecl.data.folder import load_folder\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE') + (160 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken, taken))\n"
        "data = load_folder(Path(sys.argv[1]), 1000)\n"
        "print(data.fingerprint, data.x_train[5:7].shape)"
    )
    setting = {"MORECL_CACHE": str(tmp_path / "cache"), "MALLOC_ARENA_MAX": "1"} | (
        {} if cached else {"MORECL_CACHE_GB": "0"}
    )
    command = [sys.executable, "-c", script, str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | setting)
    assert done.stdout.endswith("(2, 1000, 1000, 3)\n"), done.stderr
    assert ("decoded whenever" in done.stderr) == (not cached)


def test_what_a_run_says_of_a_folder_is_in_its_stream(flowers: Path) -> None:
    """Class names, and how many images are held out."""
    stream = build_stream(load_recipe(f"folder:{flowers}"), folder_size=4)
    assert stream.dataset.classes == ("aster", "lily", "rose")
    assert (len(stream.dataset.y_train), len(stream.dataset.y_test)) == (126, 24)


def test_labelled_files_are_those_of_the_data_set_in_its_order(flowers: Path) -> None:
    (flowers / "rose" / "notes.txt").write_text("no image")
    picture(flowers / "rose" / "deep" / "x.JPG")
    paths, labels = labelled_files(flowers)
    roses = [flowers / "rose" / f"{i:03d}.png" for i in range(50)]
    assert paths[100:] == [*roses, flowers / "rose" / "deep" / "x.JPG"]
    assert labels == ["aster"] * 50 + ["lily"] * 50 + ["rose"] * 51


def test_labelled_files_of_one_class(tmp_path: Path) -> None:
    picture(tmp_path / "only" / "0.png")
    assert labelled_files(tmp_path) == ([tmp_path / "only" / "0.png"], ["only"])


@pytest.mark.parametrize("name", [" a", "a "])
def test_folders_named_with_blanks_around_are_refused(tmp_path: Path, name: str) -> None:
    for own in ("b", name):
        picture(tmp_path / own / "0.png")
        picture(tmp_path / own / "1.png")
    for lister in (labelled_files, load_folder):
        with pytest.raises(InputError, match=f"{name}' begins or ends with a blank; rename the folder"):
            lister(tmp_path)


def test_labelled_files_leave_the_test_images_out(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("a", "b"):
            picture(tmp_path / split / name / "0.png")
    picture(tmp_path / "test" / "c" / "0.png")  # a stranger
    picture(tmp_path / "train" / "d" / "0.png")
    assert labelled_files(tmp_path) == ([tmp_path / "train" / name / "0.png" for name in "abd"], ["a", "b", "d"])
    assert labelled_files(tmp_path, "test") == ([tmp_path / "test" / name / "0.png" for name in "abc"], ["a", "b", "c"])
    with pytest.raises(InputError, match=r"train/ and test/ must have the same class folders; only one has c, d\."):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("folders", "message"),
    [((), "has no class folders"), (("full", "empty"), r"empty has no images"), (None, "there is no folder")],
)
def test_labelled_files_that_cannot_be_learned(tmp_path: Path, folders: tuple[str, ...] | None, message: str) -> None:
    for name in folders or ():
        (tmp_path / name).mkdir()
    if folders:
        picture(tmp_path / "full" / "0.png")
    with pytest.raises(InputError, match=message):
        labelled_files(tmp_path if folders is not None else tmp_path / "nowhere")


@pytest.mark.skipif(sys.platform == "darwin", reason="there the two names are one")
def test_names_that_look_the_same_are_one_class(flowers: Path) -> None:
    for i in range(3):
        picture(flowers / "caf\u00e9" / f"{i}.png", (3, i, 0))
        picture(flowers / "cafe\u0301" / f"{i + 3}.png", (3, i + 3, 0))
    data = load(flowers)
    assert data.classes == ("aster", "caf\u00e9", "lily", "rose")
    train, test = files_of(data, 1)
    assert train | test == set(range(6))
    files, labels = labelled_files(flowers)
    assert labels[50:56] == ["caf\u00e9"] * 6 and {file.parent.name for file in files[50:56]} == {
        "cafe\u0301",
        "caf\u00e9",
    }


@pytest.mark.skipif(sys.platform == "darwin", reason="there the two names are one")
def test_names_that_look_the_same_are_one_class_in_train_and_test(tmp_path: Path) -> None:
    for folder in ("train/caf\u00e9", "train/b", "test/cafe\u0301", "test/b"):
        picture(tmp_path / folder / "0.png")
    data = load(tmp_path)
    assert data.classes == ("b", "caf\u00e9") and data.y_test.tolist() == [0, 1]


def test_a_model_among_the_photos_is_no_class(flowers: Path) -> None:
    (flowers / "model" / VERSIONS / "1").mkdir(parents=True)
    (flowers / "model" / MODEL).write_text("{}")
    (flowers / "rose" / MODEL).write_text("{}")  # this alone makes no model of a class
    assert load(flowers).classes == ("aster", "lily", "rose")
    assert set(labelled_files(flowers)[1]) == {"aster", "lily", "rose"}


def test_an_image_has_its_own_path_though_a_link_comes_before_it(tmp_path: Path) -> None:
    picture(tmp_path / "b" / "0.png")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "to-b").symlink_to("../b")
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent / "photos", target_is_directory=True)
    picture(tmp_path.parent / "photos" / "1.png")
    found = [*walked(str(tmp_path), set(), pytest.fail)]
    assert found == [str(tmp_path / "b" / "0.png"), str(tmp_path / "elsewhere" / "1.png")]


def test_links_that_lead_nowhere_are_unreadable_images(flowers: Path) -> None:
    (flowers / "rose" / "gone.png").symlink_to("nowhere.png")
    (flowers / "rose" / "loop.png").symlink_to("loop.png")
    (flowers / "rose" / "notes.txt").symlink_to("nowhere.txt")
    files, _ = labelled_files(flowers)
    assert files[-2:] == [flowers / "rose" / "gone.png", flowers / "rose" / "loop.png"]
    assert [i for i, _ in read(files, 4).problems] == [150, 151]
    for _ in range(2):  # decoded, then from the cache
        with pytest.warns(SkippedImagesWarning, match="2 of 152 images"):
            data = load_dataset(f"folder:{flowers}", folder_size=4)
        assert data.skipped == (
            "rose/gone.png (does not exist)",
            "rose/loop.png (Too many levels of symbolic links)",
        )
    picture(flowers / "rose" / "nowhere.png")
    with pytest.warns(SkippedImagesWarning, match="1 of 153 images"):
        load_dataset(f"folder:{flowers}", folder_size=4)


def test_linked_sub_folders_are_followed_once_and_not_in_circles(flowers: Path, tmp_path: Path) -> None:
    rose = flowers / "rose"
    picture(tmp_path / "more" / "x.png")
    picture(rose / "deep" / "y.png")
    (rose / "more").symlink_to(tmp_path / "more")
    (rose / "again").symlink_to(tmp_path / "more")
    (rose / "same").symlink_to("deep")
    (rose / "self").symlink_to(".")
    (rose / "deep" / "up").symlink_to(flowers)
    (tmp_path / "more" / "back").symlink_to(rose)
    files, labels = labelled_files(flowers)
    assert files[150:] == [rose / "again" / "x.png", rose / "deep" / "y.png"]
    assert labels.count("rose") == 52


def test_images_in_no_class_folder_are_counted(flowers: Path) -> None:
    picture(flowers / "a.png")
    message = f"1 image lies in {flowers} itself, in no class folder, and is left out"
    with pytest.warns(UnlabelledImagesWarning) as caught:
        labelled_files(flowers)
    assert [str(warning.message) for warning in caught] == [message]
    picture(flowers / "b.png")
    with pytest.warns(UnlabelledImagesWarning, match="^2 images lie in .*, in no class folder, and are left out$"):
        data = load_dataset(f"folder:{flowers}", folder_size=4)
    assert len(data.y_train) + len(data.y_test) == 150


def test_images_in_train_and_in_no_class_folder_are_counted(tmp_path: Path) -> None:
    for folder in ("train/a", "train/b", "test/a", "test/b", "", "train", "test"):
        picture(tmp_path / folder / "0.png")
    for lister, places in ((labelled_files, ("", "train")), (load_folder, ("", "train", "test"))):
        with pytest.warns(UnlabelledImagesWarning) as caught:
            lister(tmp_path)
        assert [str(warning.message).split()[4] for warning in caught] == [str(tmp_path / place) for place in places]


@pytest.mark.parametrize("names", [(), ("only",)])
def test_fewer_than_two_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        picture(tmp_path / name / "0.png")
    with pytest.raises(InputError, match=rf"has {len(names)} class folders? .*at least 2"):
        load(tmp_path)


def test_train_with_val_is_not_taken_for_two_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        picture(tmp_path / split / "a" / "0.png")
    with pytest.raises(InputError, match="has the folders train, val; expected train/ and test/"):
        load(tmp_path)


def test_a_class_with_too_few_images(flowers: Path) -> None:
    picture(flowers / "tulip" / "0.png")
    with pytest.raises(InputError, match="class 'tulip' has 1 readable image"):
        load(flowers)
    (flowers / "tulip" / "0.png").unlink()
    with pytest.raises(InputError, match="class 'tulip' has 0 readable image"):
        load(flowers)


def test_train_and_test_must_have_the_same_classes_with_images(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("a", "b"):
            picture(tmp_path / split / name / "0.png")
    picture(tmp_path / "train" / "c" / "0.png")
    with pytest.raises(InputError, match="same class folders; only one has c"):
        load(tmp_path)
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(InputError, match=r"test.c has no readable image"):
        load(tmp_path)
