"""The benchmark of predictions against the number of tasks: what it grows, what it times, what it shows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import tiny
from morecl.bench import prediction
from morecl.bench.common import made_up_images
from morecl.bench.cost import counting
from morecl.bench.prediction import Predictions, PredictionSize, PredictionTime
from morecl.errors import InputError
from morecl.methods import METHODS
from morecl.methods.morerp import Morerp

SIZE = PredictionSize(tasks=(2, 6), images=12, repeats=1, settings=tiny.SETTINGS)
PLACE: dict[str, Any] = {"device": "here", "precision": "float32", "compiled": False, "backbone": "vit"}
PLACE |= {"image_size": 32, "versions": {}}


def grown(method: str, tasks: int) -> Any:
    return prediction.grown(method, METHODS[method].Config.parse(tiny.settings_for(method)), tasks)


def test_every_method_is_timed_after_every_number_of_tasks() -> None:
    told: list[str] = []
    found = prediction.measure({"bottleneck": 3}, SIZE, told.append)
    assert [(row.method, row.tasks) for row in found.times] == [("more", 2), ("more", 6), ("morerp", 2), ("morerp", 6)]
    assert [row.networks for row in found.times[:3]] == [2, 6, 2]
    assert 3 <= found.times[3].networks <= 6
    assert all(row.seconds > 0 for row in found.times) and found.images == 12
    assert told[0] == "more after 2 tasks" and told[-1] == "predictions"
    assert found.as_dict()["schema"] == "morecl.prediction/1" and found.as_dict()["times"][0]["method"] == "more"


def test_without_a_number_of_images_it_takes_what_predict_takes_at_once() -> None:
    size = PredictionSize(tasks=(1,), repeats=1, settings=tiny.SETTINGS)
    assert prediction.measure({}, size, lambda _: None).images == tiny.SETTINGS["eval_batch_size"]


def test_a_setting_that_no_method_has_is_refused() -> None:
    with pytest.raises(InputError, match="unknown setting 'aksed'; did you mean 'asked'"):
        prediction.measure({"aksed": 2}, SIZE, lambda _: None)


@pytest.mark.parametrize("method", prediction.METHODS)
def test_a_grown_learner_answers(method: str) -> None:
    learner = grown(method, 5)
    answer = learner.predict(made_up_images(3))
    assert learner.task_sizes == [2] * 5 and set(answer.labels) <= set(learner.classes)
    masks = [net.mask.mean() for net in learner.tasks]
    assert all(0.4 < share < 0.6 for share in masks)


def test_made_up_images_spread_over_the_networks() -> None:
    """Otherwise all images would ask the same three, and the time could not grow."""
    learner = grown("morerp", 20)
    images = made_up_images(40)
    assert isinstance(learner, Morerp)
    prediction.spread(learner, images)
    assert prediction.networks_asked(learner, images) == 20
    with counting(learner.network) as passes:
        learner.predict(images)
    assert passes.without_gradient >= 40 * (1 + 3)


def times(*seconds: float) -> Predictions:
    rows = [PredictionTime("more", k, k, float(k)) for k in (5, 20, 100)]
    rows += [PredictionTime("morerp", k, 5, s) for k, s in zip((5, 20, 100), seconds, strict=True)]
    return Predictions(**PLACE, images=100, times=rows)


def test_the_table_marks_what_grows_beyond_the_limit() -> None:
    console = Console(file=io.StringIO(), width=120)
    found = times(0.5, 0.6, 0.7)
    found.show(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("more") and "should" not in line]
    assert rows[2] == ["more", "100", "100", "100,000.0", "1", "20.00"]  # MORE may grow
    assert rows[4] == ["morerp", "20", "5", "600.0", "167", "1.20"]
    assert rows[5] == ["morerp", "100", "5", "700.0", "143", "1.40", "!"]
    assert [row.tasks for row in found.above()] == [100] and times(0.5, 0.5, 0.65).above() == []


def test_the_figure_has_a_line_per_method() -> None:
    (axes,) = times(0.5, 0.6, 0.004).figure().axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines == {"MORE": ([5, 20, 100], [5, 20, 100]), "MORE-RP": ([5, 20, 100], [0.5, 0.6, 0.004])}
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["5,000 ms", "20,000 ms", "100,000 ms", "500 ms", "600 ms", "4.0 ms"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5", "20", "100"]
