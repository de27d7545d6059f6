"""The figures of an evaluation against NumPy and scikit-learn, from random answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, confusion_matrix, roc_auc_score

from morecl.classifier.conformal import promise
from morecl.classifier.evaluation import evaluate
from morecl.classifier.results import Answer, Choice, Evaluation

KNOWN = ["cat", "dog", "emu"]
THRESHOLD = 0.5


def random_answers(count: int = 600) -> tuple[list[Answer], list[str]]:
    rng = np.random.default_rng(3)
    names = [str(name) for name in rng.choice([*KNOWN, "fox", "gnu"], count)]
    answers = []
    for name in names:
        guess = name if name in KNOWN and rng.random() < 0.7 else str(rng.choice(KNOWN))
        ood = float(rng.normal(0 if name in KNOWN else 0.8))
        sure = float(rng.uniform(0.34, 1))
        unknown = ood > THRESHOLD
        top = (Choice(guess, sure),)
        answers.append(Answer("x.png", None if unknown else guess, sure, ood, THRESHOLD, unknown, top, 1))
    return answers, names


@pytest.fixture(scope="module")
def found() -> Evaluation:
    answers, names = random_answers()
    broken = Answer("broken.png", None, None, None, THRESHOLD, False, error="not an image")
    return evaluate([*answers, broken], [*names, "cat"], KNOWN, promise(np.zeros(20)))


def test_accuracies_are_scikit_learns(found: Evaluation) -> None:
    answers, names = random_answers()
    known = [(a, n) for a, n in zip(answers, names, strict=True) if n in KNOWN]
    said = [a.label or "unknown" for a, _ in known]
    assert found.accuracy == pytest.approx(100 * accuracy_score([n for _, n in known], said))
    forced = [a.top[0].label for a, _ in known]
    assert found.accuracy_forced == pytest.approx(100 * accuracy_score([n for _, n in known], forced))
    assert found.known_rejected == pytest.approx(100 * np.mean([a.unknown for a, _ in known]))
    foreign = [a for a, n in zip(answers, names, strict=True) if n not in KNOWN]
    assert found.unknown_rejected == pytest.approx(100 * np.mean([a.unknown for a in foreign]))
    assert found.mean_confidence == pytest.approx(np.mean([a.confidence for a, _ in known]))


def test_classes_and_confusion_are_scikit_learns(found: Evaluation) -> None:
    answers, names = random_answers()
    order = [*KNOWN, "fox", "gnu", "unknown"]
    expected = confusion_matrix(names, [a.label or "unknown" for a in answers], labels=order)
    for i, name in enumerate(order[:-1]):
        assert [found.confusion[name].get(answer, 0) for answer in order] == expected[i].tolist()
    assert [each.name for each in found.classes][:3] == KNOWN  # those it was taught first, in their order
    for each in found.classes:
        own = [a for a, n in zip(answers, names, strict=True) if n == each.name]
        assert each.images == len(own)
        assert each.unknown == sum(a.unknown for a in own)
        assert each.right == sum(a.label == each.name for a in own)
        assert (each.accuracy is None) == (each.name not in KNOWN)


def test_the_area_and_the_calibration_are_scikit_learns(found: Evaluation) -> None:
    answers, names = random_answers()
    truth = [name not in KNOWN for name in names]
    assert found.auc == pytest.approx(100 * roc_auc_score(truth, [a.ood_score for a in answers]))
    known = [(a, n) for a, n in zip(answers, names, strict=True) if n in KNOWN]
    right = np.array([a.top[0].label == n for a, n in known])
    sure = np.array([a.confidence for a, _ in known])
    accuracy, confidence = calibration_curve(right, sure, n_bins=10)
    assert [b.accuracy for b in found.reliability] == pytest.approx(accuracy.tolist())
    assert [b.confidence for b in found.reliability] == pytest.approx(confidence.tolist())
    weights = np.histogram(sure, np.linspace(0, 1, 11))[0]
    weights = weights[weights > 0] / len(sure)
    assert found.calibration_error == pytest.approx(float(weights @ np.abs(accuracy - confidence)))


def test_the_curve_passes_through_the_threshold(found: Evaluation) -> None:
    x, y = np.array(found.roc).T
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 100, 100)
    assert np.interp(found.known_rejected, x, y) == pytest.approx(found.unknown_rejected, abs=1.5)


def test_pictures_of_a_lesson_are_counted_and_left_out_of_the_accuracy_on_new_ones() -> None:
    answers, names = random_answers()
    marked = [replace(answer, seen=i % 3 == 0) for i, answer in enumerate(answers)]
    found = evaluate(marked, names, KNOWN, promise(np.zeros(20)))
    new = [(a.label or "unknown", n) for a, n in zip(marked, names, strict=True) if n in KNOWN and not a.seen]
    assert found.seen == 200 and "200 of 600 images were" in found.caveat
    assert found.accuracy_new == pytest.approx(100 * accuracy_score([n for _, n in new], [a for a, _ in new]))
    one = evaluate([replace(answers[0], seen=True), *answers[1:]], names, KNOWN, promise(np.zeros(20)))
    assert "1 of 600 images was in its lessons" in one.caveat
    assert evaluate(answers, names, KNOWN, promise(np.zeros(20))).caveat == ""


def test_unreadable_images_are_named_and_count_nowhere(found: Evaluation) -> None:
    assert found.unreadable == ("broken.png: not an image",)
    assert sum(each.images for each in found.classes) == 600


def test_without_foreign_classes_there_is_no_area() -> None:
    answers, names = random_answers()
    kept = [(a, n) for a, n in zip(answers, names, strict=True) if n in KNOWN]
    found = evaluate([a for a, _ in kept], [n for _, n in kept], KNOWN, promise(np.zeros(20)))
    assert (found.auc, found.unknown_rejected, found.roc) == (None, None, ())
    foreign = [(a, n) for a, n in zip(answers, names, strict=True) if n not in KNOWN]
    found = evaluate([a for a, _ in foreign], [n for _, n in foreign], KNOWN, promise(np.zeros(20)))
    assert (found.accuracy, found.auc, found.calibration_error, found.mean_confidence) == (None, None, None, None)
    assert found.unknown_rejected is not None
