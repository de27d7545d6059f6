"""A classifier on small made-up pictures: lessons, answers, what it keeps, and that failures change nothing."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tiny
from morecl.classifier import Answer, Classifier, capacity, changes
from morecl.classifier.lesson import NothingNewError
from morecl.errors import InputError
from morecl.labels import Forgotten
from morecl.progress import EpochDone

KINDS = {"ant": 0, "bee": 1, "cat": 2, "dog": 3, "emu": 4}


def photos(*names: str, count: int = 15, draw: int = 0) -> tuple[list[np.ndarray], list[str]]:
    images = [image for name in names for image in tiny.pictures(KINDS[name], count, draw=draw)]
    return images, [name for name in names for _ in range(count)]


def classifier(method: str = "morerp") -> Classifier:
    return Classifier(tiny.create(method, memory_size=20))


def taught(*lessons: tuple[str, ...]) -> Classifier:
    made = classifier()
    for names in lessons:
        made.learn(*photos(*names))
    return made


@pytest.fixture(scope="module")
def known() -> Classifier:
    return taught(("ant", "bee"), ("cat",))


def snapshot(made: Classifier) -> dict[str, Any]:
    own = {"images": list(made.images), "curve": [dict(p) for p in made.curve], "seen": made.seen.prints.tolist()}
    held = {"held": made.held.images.copy(), "ood": made.measured.ood_scores.copy()}
    return tiny.snapshot(made.learner) | {"own": own, "config": made.learner.config} | held


def assert_unchanged(made: Classifier, before: dict[str, Any]) -> None:
    now = snapshot(made)
    tiny.assert_same(now, before)
    assert now["own"] == before["own"] and now["config"] == before["config"]
    assert np.array_equal(now["held"], before["held"]) and np.array_equal(now["ood"], before["ood"])


def test_a_lesson_says_what_it_did() -> None:
    made = classifier()
    first = made.learn(*photos("ant", "bee"))
    assert first.classes == {"ant": 12, "bee": 12} and first.held_back == 6 and first.epochs == 40
    assert first.accuracy_others is None and first.unknown_before is None and first.promise.threshold is None
    second = made.learn(*photos("cat", count=100))
    assert second.classes == {"cat": 80} and second.held_back == 20
    assert second.accuracy_others is not None and second.accuracy_others_before == first.accuracy
    assert made.classes == ["ant", "bee", "cat"] and made.images == [12, 12, 80]
    assert second.promise.threshold is not None and second.promise.images == 26
    assert [point["action"] for point in made.curve] == ["learn", "learn"]
    third = made.learn(*photos("dog"))
    assert third.unknown_before is not None


def test_held_back_images_are_never_trained_on() -> None:
    made = classifier()
    trained: list[np.ndarray] = []
    learn = made.learner.learn_task
    made.learner.learn_task = lambda x, *rest: (trained.append(x), learn(x, *rest))[1]  # type: ignore[method-assign]
    made.learn(*photos("ant", "bee"))
    kept = {image.tobytes() for image in made.held.images}
    assert len(kept) == 6 and not kept & {image.tobytes() for image in trained[0]}


def test_training_on_everything_promises_nothing() -> None:
    made = classifier()
    lesson = made.learn(*photos("ant", "bee"), hold_back=False)
    assert lesson.held_back == 0 and lesson.accuracy is None and lesson.promise.share is None
    assert not made.predict(photos("cat")[0])[0].unknown


def test_answers(known: Classifier) -> None:
    images, names = photos("ant", "cat", draw=1)
    answers = known.predict(images)
    assert np.mean([a.top[0].label == name for a, name in zip(answers, names, strict=True)]) > 0.8
    for answer in answers:
        assert (answer.label is None) == answer.unknown
        assert sum(choice.confidence for choice in answer.top) == pytest.approx(1)
        assert [c.confidence for c in answer.top] == sorted((c.confidence for c in answer.top), reverse=True)
        assert answer.confidence == answer.top[0].confidence
    assert {a.task for a in answers} <= {1, 2}
    assert all(len(a.top) == 1 for a in known.predict(images[:3], top=1))


def test_the_threshold_decides(known: Classifier) -> None:
    images, _ = photos("emu", "ant", draw=1)
    strict, loose = known.predict(images, accept=0.5), known.predict(images, accept=0.95)
    assert strict[0].threshold is not None and loose[0].threshold is None  # nine held-back images
    assert all(a.unknown == (a.ood_score > a.threshold) for a in strict)  # type: ignore[operator]
    assert any(a.unknown for a in strict) and not any(a.unknown for a in loose)


def numbers(answer: Answer) -> list[float]:
    return [answer.ood_score, answer.confidence, *(choice.confidence for choice in answer.top)]


def test_a_broken_image_is_one_answer(known: Classifier, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(tiny.pictures(0, 1)[0]).save(good)
    bad.write_bytes(b"no image")
    answers = known.predict([good, bad, tmp_path / "missing.png", good])
    assert [a.error is None for a in answers] == [True, False, False, True]
    assert answers[1].label is None and "not an image" in str(answers[1].error)
    assert "does not exist" in str(answers[2].error)
    first, last = answers[0], answers[3]  # of one batch, in which rounding depends on the place with several threads
    assert first.path == last.path == str(good) and first.label == last.label
    assert [choice.label for choice in first.top] == [choice.label for choice in last.top]
    assert numbers(first) == pytest.approx(numbers(last), rel=1e-4)
    assert "error" not in answers[0].as_dict() and "error" in answers[1].as_dict()


def test_one_array_is_many_images_and_never_the_rows_of_one(known: Classifier) -> None:
    images = np.stack(photos("ant", "cat", count=3, draw=5)[0])
    assert known.predict(images) == known.predict(list(images))
    with pytest.raises(ValueError, match="looks like one image"):
        known.predict(images[0])
    with pytest.raises(ValueError, match="must have shape"):
        known.predict(images[0, :, :, 0])
    with pytest.raises(TypeError, match="must be uint8"):
        known.predict(images.astype(float))


def test_an_array_of_paths_is_a_list_of_paths(known: Classifier, tmp_path: Path) -> None:
    paths = []
    for i, image in enumerate(photos("ant", "cat", count=2, draw=5)[0]):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(image).save(paths[-1])
    for given in (np.array(paths), np.array([str(path) for path in paths])):
        assert [answer.label for answer in known.predict(given)] == [answer.label for answer in known.predict(paths)]


def test_any_number_of_images_in_batches(known: Classifier) -> None:
    images, _ = photos("ant", "bee", count=25, draw=2)
    one_by_one = [known.predict([image])[0] for image in images[:5]]
    together = list(known.answers(iter(images)))
    assert len(together) == 50
    assert [a.top[0].label for a in together[:5]] == [a.top[0].label for a in one_by_one]
    assert known.predict([]) == [] and list(known.answers(iter([]))) == []


def test_duplicates_are_learned_once(known: Classifier) -> None:
    made = classifier()
    images, names = photos("ant", "bee")
    lesson = made.learn(images + images[:4], names + names[:4])
    assert lesson.duplicates == 4
    with pytest.raises(InputError, match="every image was seen before"):
        made.add(images[:3], names[:3])


def test_a_picture_in_two_classes_is_learned_as_neither() -> None:
    made = classifier()
    images, names = photos("ant", "bee")
    lesson = made.learn([*images, images[0], images[1]], [*names, "bee", "ant"])
    assert lesson.classes == {"ant": 11, "bee": 12} and lesson.held_back == 6  # 14 and 15 images
    assert lesson.duplicates == 1  # images[1], again in its class
    (note,) = lesson.notes
    assert note.startswith(
        "1 picture was left out, being in several classes at once: image 0 ('ant') and image 30 ('bee'). "
    )
    again = made.add([images[0]], ["ant"])  # once the wrong one is gone
    assert again.classes == {"ant": 1} and not again.notes


def test_a_class_of_which_every_picture_is_in_another_says_so() -> None:
    made = classifier()
    images, names = photos("ant", count=5)
    with pytest.raises(InputError, match=r"nothing to learn of 'bee': every image is in several classes\. 2 pictures"):
        made.learn(images + images[:2], [*names, "bee", "bee"])
    assert made.classes == []


def test_reasons_are_those_of_the_classes_of_which_nothing_is_left(tmp_path: Path) -> None:
    made = classifier()
    images, names = photos("ant", count=6)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"bad")
    with pytest.raises(NothingNewError, match=r"^nothing to learn of 'bee': no image could be read") as error:
        made.learn([*images, images[0], bad], [*names, "ant", "bee"])
    assert "seen before" not in str(error.value) and error.value.skipped[0].startswith(f"{bad}: ")
    with pytest.raises(NothingNewError, match="could be read") as error:  # 'ant' and 'cat' dispute, 'bee' does not
        made.learn([*images, images[0], *photos("cat", count=2)[0], bad], [*names, "cat", "cat", "cat", "bee"])
    assert "several classes" not in str(error.value)


def test_only_images_seen_in_their_class_are_nothing_new(tmp_path: Path) -> None:
    made = taught(("ant", "bee"))
    images, names = photos("ant", "bee")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"bad")
    (disputed,) = photos("ant", draw=5, count=1)[0]
    cases: list[tuple[list[Any], list[str], bool]] = [
        ([], [], True),
        ([bad], ["ant"], False),
        ([disputed, disputed], ["ant", "bee"], False),
        ([images[0]], ["bee"], False),
    ]
    for more, classes, is_known in cases:
        with pytest.raises(NothingNewError, match="every image was seen before") as error:
            made.add([*images, *more], [*names, *classes])
        assert error.value.is_known is is_known, classes


def test_the_error_that_nothing_is_new_survives_pickling() -> None:
    error = NothingNewError(["ant", "bee"], "so it is", True, ["x.png: broken"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is NothingNewError and str(copy) == str(error) and vars(copy) == vars(error)


def test_a_picture_taught_under_a_wrong_class_is_named() -> None:
    made = classifier()
    images, names = photos("ant", "bee")
    made.learn([*images, *photos("bee", draw=1, count=1)[0]], [*names, "ant"])
    moved = photos("bee", draw=1, count=6)[0]
    lesson = made.add([*images, *moved], [*names, *["bee"] * 6])
    assert lesson.classes == {"bee": 4} and lesson.held_back == 1 and lesson.duplicates == 31
    (note,) = lesson.notes
    assert "1 image stays what the model was taught before" in note
    assert "image 30 (taught as 'ant', now 'bee')" in note and "forget the class 'ant'" in note
    with pytest.raises(InputError, match=r"every image was seen before\. 1 image stays .* now 'bee'"):
        made.add(moved[:1], ["bee"])
    made.forget("ant")  # the way out that the note names
    made.add(moved[:1], ["bee"])
    made.learn(*photos("ant"))
    assert not made.learn(*photos("cat")).notes


def test_more_images_of_known_classes() -> None:
    made = taught(("ant", "bee"))
    before = made.learner.features(tiny.pictures(0, 4, draw=9))
    lesson = made.add(*photos("bee", draw=5))
    assert lesson.action == "add" and lesson.classes == {"bee": 12} and made.images == [12, 24]
    assert np.array_equal(made.learner.features(tiny.pictures(0, 4, draw=9)), before)
    assert len(made.held) == 9


def test_a_model_that_gets_a_few_images_at_a_time_is_measured_on_some_of_them() -> None:
    made = taught(("ant", "bee"))
    for draw in range(10, 14):
        lesson = made.add(*photos("ant", "bee", count=2, draw=draw))
        assert sum(lesson.classes.values()) == 3 and lesson.held_back == 1
    assert sum(made.images) == 24 + 12 and len(made.held) == len(made.measured.ood_scores) == 6 + 4


@pytest.mark.parametrize("moment", ["epoch", "measure"])
def test_a_lesson_that_fails_changes_nothing(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = taught(("ant", "bee"))
    before = snapshot(made)

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    listener = stop if moment == "epoch" else (lambda event: None)
    if moment == "measure":
        monkeypatch.setattr(made, "_measure", stop)
    for call in (
        lambda: made.learn(*photos("cat"), listener=listener),
        lambda: made.add(*photos("bee", draw=3), listener=listener),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert_unchanged(made, before)


def test_rename_and_forget() -> None:
    made = taught(("ant", "bee"), ("cat", "dog"))
    images, _ = photos("ant", "bee", "dog", draw=1)
    before = made.predict(images)
    made.rename("dog", "wolf")
    assert made.classes == ["ant", "bee", "cat", "wolf"]
    with pytest.raises(InputError, match="there already is a class 'ant'"):
        made.rename("wolf", "ant")
    made.forget("cat")
    assert made.classes == ["ant", "bee", "wolf"] and isinstance(made.learner.classes[2], Forgotten)
    assert 2 not in made.held.columns and 2 not in made.seen.columns and 2 not in made.learner.memory.columns
    after = made.predict(images)
    names = {"dog": "wolf"}
    for a, b in zip(before, after, strict=True):
        if a.top[0].label != "cat":
            assert names.get(a.top[0].label, a.top[0].label) == b.top[0].label
        assert all(choice.label != "cat" for choice in b.top)
    made.learn(*photos("cat"))  # the very same pictures
    assert made.classes == ["ant", "bee", "wolf", "cat"]
    with pytest.raises(InputError, match="unknown class 'cow'"):
        made.forget("cow")


def test_names_that_look_the_same_are_one_class() -> None:
    one, other = "caf\u00e9", "cafe\u0301"
    made = classifier()
    images, names = photos("ant", "bee")
    made.learn([*images, *photos("cat", "cat", count=6)[0]], [*names, *[one] * 6, *[other] * 6])
    assert made.classes == ["ant", "bee", one]
    assert made.add(*photos("cat", draw=1)[:1], [other] * 15).classes.keys() == {one}
    found = made.evaluate(photos("cat", draw=2)[0], [other] * 15)
    assert [(each.name, each.known) for each in found.classes] == [(one, True)]
    with pytest.raises(InputError, match="there already is a class"):
        made.rename("ant", other)
    made.rename(other, "re\u0301nard")
    assert made.classes == ["ant", "bee", "r\u00e9nard"]
    made.forget("re\u0301nard")
    assert made.classes == ["ant", "bee"]


def test_forgetting_sets_the_threshold_anew_and_warns_if_it_ends() -> None:
    made = classifier()
    made.learn(*photos("ant", count=100))  # 20 held back
    made.learn(*photos("bee"))
    assert changes.end_of_unknown(made, "bee") == ""
    assert "are held back (3), so nothing will be called unknown" in changes.end_of_unknown(made, "ant")
    made.forget("ant")
    assert made.promise().threshold is None and made.promise().images == 3
    made.learn(*photos("cat"))
    assert changes.end_of_unknown(made, "cat") == ""  # nothing is called unknown with it either


def test_the_last_class_stays() -> None:
    made = taught(("ant",))
    with pytest.raises(InputError, match="only class"):
        made.forget("ant")
    assert made.classes == ["ant"]


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201, "Unknown", 3, None])
def test_names_that_cannot_be(name: Any) -> None:
    made = classifier()
    with pytest.raises(InputError, match="name"):
        made.learn(photos("ant")[0], [name] * 15)
    assert made.classes == []


def test_what_cannot_be_learned(known: Classifier) -> None:
    images, names = photos("dog")
    for call, message in (
        (lambda: known.learn(images, names[:-1]), "there are 15 images, 14 labels"),
        (lambda: known.learn([], []), "no images"),
        (lambda: known.learn(*photos("ant", draw=8)), "already learned: 'ant'"),
        (lambda: known.add(images, names), "not learned yet: 'dog'"),
        (lambda: known.learn(images, names, minutes=0), "minutes must be a number above 0"),
        (lambda: known.learn(images, names, minutes=True), "minutes must be a number above 0"),
        (lambda: classifier().predict(images), "nothing has been learned"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_images_and_labels_that_do_not_belong_together(known: Classifier, tmp_path: Path) -> None:
    images, _ = photos("dog", count=3)
    for call in (known.learn, known.add, known.evaluate):
        for given in (images, np.stack(images), [tmp_path / "a.png"], None):
            with pytest.raises(InputError, match="labels are missing: give the name of each image's class"):
                call(given)
        with pytest.raises(InputError, match=r"for one image give \[image\]"):
            call(str(tmp_path), ["dog"])
        with pytest.raises(InputError, match=r"labels must be a list .* not the text 'dog'"):
            call(images, "dog")
        with pytest.raises(InputError, match="there is no folder"):
            call(tmp_path / "nowhere")


def test_likely_mistakes_are_named(known: Classifier) -> None:
    picture = Image.fromarray(photos("dog")[0][0])
    for call in (lambda: known.predict(picture), lambda: known.learn(picture, ["dog"])):
        with pytest.raises((TypeError, InputError), match=r"for one image give \[image\]"):
            call()
    for image in (picture, "photo.jpg", Path("photo.jpg")):
        with pytest.raises(TypeError, match=r"for one image give \[image\]"):
            known.nearest(image)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"for one class give \['ant'\]"):
        known.accuracy("ant")


@pytest.mark.parametrize("count", [2.5, "2", -1, None, True])
def test_numbers_that_are_none_are_refused_in_words(known: Classifier, count: Any, tmp_path: Path) -> None:
    images, _ = photos("ant", count=2)
    for call in (lambda: known.nearest(images, count), lambda: known.remembered("ant", count)):
        with pytest.raises(InputError, match=rf"count must be a whole number, 0 or more, not {count!r}"):
            call()
    with pytest.raises(InputError, match=rf"top must be a whole number, 1 or more, not {count!r}"):
        known.predict(images, top=count)
    if count is not None:
        with pytest.raises(InputError, match=rf"keep must be a whole number, 1 or more, not {count!r}"):
            known.save(tmp_path / "model", keep=count)
    for accept in ("0.95", None, [0.95]):
        with pytest.raises(InputError, match=rf"accept must be a number, such as 0.95, not {re.escape(repr(accept))}"):
            known.predict(images, accept=accept)  # type: ignore[arg-type]
    assert known.nearest(images, 0) == [[], []] and len(known.predict(images, top=np.int64(2))[0].top) == 2


def test_an_export_that_cannot_be_written_is_refused_at_once(known: Classifier, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("/proc/x.onnx", tmp_path / "file" / "x.onnx"):
        with pytest.raises(InputError, match=rf"^{path} cannot be written.*give path another name"):
            known.export(path)


def test_iterators_are_lists_for_once(known: Classifier) -> None:
    images, names = photos("ant", count=5)
    one = known.evaluate(iter(images), iter(names))
    assert one == known.evaluate(images, names)
    made = classifier()
    made.learn(iter(images), names, hold_back=False)
    assert made.images == [5]


def test_a_lesson_into_a_full_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier()
    assert made.learn(*photos("ant")).notes == () and made.info().tasks_left != 0
    monkeypatch.setattr(capacity, "FULL", 100.0)
    assert made.learn(*photos("bee")).notes == (capacity.IS_FULL,) and made.info().tasks_left == 0
    assert made.add(*photos("bee", draw=1)).notes == ()  # takes no room


def test_a_budget_of_minutes() -> None:
    made = classifier()
    events: list[EpochDone] = []
    lesson = made.learn(*photos("ant", "bee"), minutes=np.float32(0.0001), listener=events.append)
    assert lesson.epochs == 1 and [e.epochs for e in events if not e.stage] == [1]
    (note,) = lesson.notes
    assert re.fullmatch(r"even one pass over the images takes longer than asked: about [1-9]\d* s", note)
    assert made.learner.task_sizes == [2] and made.images == [12, 12]


def test_info(known: Classifier) -> None:
    info = known.info()
    assert info.backbone == "small_vit.safetensors"  # a file: its name, not the folder of who taught the model
    assert [(c.name, c.task, c.images, c.held_back) for c in info.classes] == [
        ("ant", 1, 12, 3),
        ("bee", 1, 12, 3),
        ("cat", 2, 12, 3),
    ]
    assert info.tasks == 2 and info.accuracy == known.accuracy()
    assert sum(c.remembered for c in info.classes) == len(known.learner.memory)
    assert len(info.capacity) == 2 * known.learner.network.depth and all(0 <= v <= 100 for v in info.capacity.values())
    mean = np.mean(list(info.capacity.values()))
    assert known.learner.capacity() == pytest.approx(mean)


def test_numbers_are_no_classes_to_evaluate(known: Classifier) -> None:
    """All of them would count as never taught."""
    with pytest.raises(InputError, match="the name of a class must be text, not 0"):
        known.evaluate(photos("ant")[0], ["ant"] * 14 + [0])  # type: ignore[list-item]


def test_nearest_remembered_pictures(known: Classifier) -> None:
    memory = known.learner.memory
    (found,) = known.nearest([memory.images[4]], count=3)
    assert len(found) == 3 and found[0][2] == pytest.approx(1, abs=1e-5)
    assert np.array_equal(found[0][1], memory.images[4])
    assert len(known.remembered("ant", 2)) == 2


def test_evaluation(known: Classifier) -> None:
    images, names = photos("ant", "cat", "emu", draw=4)
    result = known.evaluate(images, names, accept=0.5)
    by_name = {c.name: c for c in result.classes}
    assert by_name["emu"].known is False and by_name["ant"].images == 15
    answers: list[Answer] = known.predict(images, accept=0.5)
    assert by_name["emu"].unknown == sum(a.unknown for a in answers[30:])
    assert result.accuracy == pytest.approx(
        100 * np.mean([a.label == n for a, n in zip(answers[:30], names, strict=False)])
    )
