"""The record of a run: one self-describing ``result.json``, the only source of tables and reports. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from morecl.errors import InputError, first_problem
from morecl.files import compact_json, expanded, refuse_newer, write_text

SCHEMA: Literal["morecl.result/1"] = "morecl.result/1"
ROUNDING = 1e-6  # a mean of values of 100 may exceed 100 by a rounding error


def _share(value: float) -> float:
    if not -ROUNDING <= value <= 100 + ROUNDING:
        raise ValueError(f"{value} is not a percentage between 0 and 100")
    return value


def _difference(value: float) -> float:
    if not abs(value) <= 100 + ROUNDING:
        raise ValueError(f"{value} is not a difference of percentages, between -100 and 100")
    return value


Share = Annotated[float, AfterValidator(_share)]
Difference = Annotated[float, AfterValidator(_difference)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class BackboneInfo(_Part):
    name: str
    sha256: str
    source_sha256: str = Field(
        "",
        description="of the weights as they are in their file, before positions are resampled to an image size, which "
        "CPUs do differently; empty without a file, and in older records",
    )
    image_size: int | None = Field(None, description="pixels along a side of its input; older records lack it")


class DataInfo(_Part):
    """The data of a run: enough to tell whether two records saw the same images."""

    name: str
    fingerprint: str = Field(description="sha256 of the arrays as used (after any per-class limit)")
    train_images: int
    test_images: int
    scored_on: Literal["test", "validation"] = "test"
    classes: list[str] = Field(default_factory=list, description="names, in the order of their labels")


class Metrics(_Part):
    """In percent. ``None``: not defined for this run (with a single task there is no OOD data, for example)."""

    aca: Share = Field(description="accuracy on all test images of all classes after the last task")
    aia: Share = Field(description="mean over tasks of the accuracy on all classes seen so far")
    reduction_rate: Difference | None
    bwt: Difference | None = None
    fwt: Difference | None = None
    auc: Share | None = Field(description="OOD detection after the second-to-last task")
    iauc: Share | None = Field(description="mean of auc_per_step")
    fpr95: Share | None = None
    aupr: Share | None = None
    til_accuracy: Share = Field(description="mean over tasks of the accuracy given the task, after the last task")
    errors_to_earlier: Share | None = Field(None, description="share of errors that predict an earlier task")
    errors_to_later: Share | None = None


class Roc(_Part):
    """ROC curve of OOD detection after the second-to-last task (unknown is positive), thinned and rounded for drawing.

    At most 100 points with three decimals (older records: 200). Areas are computed from all scores.
    """

    false_positive_rate: list[Share]
    true_positive_rate: list[Share]

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        across, up = len(self.false_positive_rate), len(self.true_positive_rate)
        if across != up or not up:
            raise ValueError(f"a curve has as many x as y values, at least one; here {across} and {up}")
        return self


class Record(_Part):
    """Everything known about a finished run. Written once, never changed."""

    schema_: Literal["morecl.result/1"] = Field(default=SCHEMA, alias="schema")
    method: str
    benchmark: str
    seed: int
    class_order: list[int] = Field(description="labels of the data set in learning order")
    class_order_name: str = Field(description="0..4, or random")
    task_sizes: list[int] = Field(description="number of classes of each task")
    config: dict[str, Any]
    backbone: BackboneInfo
    data: DataInfo
    versions: dict[str, str]
    device: str
    ranks: int = Field(1, ge=1, description="processes that trained together (torchrun), each on its part of a batch")
    metrics: Metrics
    accuracy_matrix: list[list[Share | None]] = Field(
        description="class-incremental accuracy in percent: row i after task i, column j on the test images of task j"
    )
    til_matrix: list[list[Share | None]] = Field(description="the same, given the task")
    aca_per_step: list[Share] = Field(description="accuracy on all classes seen, after each task")
    auc_per_step: list[Share] = Field(description="OOD detection after each task but the last: T-1 entries")
    fpr95_per_step: list[Share] = Field(default_factory=list)
    aupr_per_step: list[Share] = Field(default_factory=list)
    roc: Roc | None = None
    seconds: dict[str, Seconds]
    entries: dict[str, NonNegativeInt] = Field(
        description="stored numbers by part; 'total' does not include the replay 'buffer'"
    )
    capacity: list[Share] = Field(
        default_factory=list, description="percentage of masked neurons in use after each task (HAT, MORE)"
    )
    peak_memory_bytes: int | None = None
    shared: bool | None = Field(
        None, description="whether other runs used the same card or cores, so that seconds say little; null: not known"
    )

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())

    @property
    def seconds_count(self) -> bool:
        """Whether the seconds say something: not of runs that shared card or cores, nor of older ones on a GPU."""
        return not self.device.startswith("cuda") if self.shared is None else not self.shared

    @model_validator(mode="after")
    def _fits_its_tasks(self) -> Self:
        tasks = len(self.task_sizes)
        if not tasks:
            raise ValueError("task_sizes is empty; a run has at least one task")
        for name in ("accuracy_matrix", "til_matrix"):
            matrix = getattr(self, name)
            if [len(row) for row in matrix] != [tasks] * tasks:
                raise ValueError(f"{name} is not {tasks} x {tasks}, one row and one column per task")
            if any(None in row[: after + 1] for after, row in enumerate(matrix)):
                raise ValueError(f"{name} has no number for a learned task")
        if len(self.aca_per_step) != tasks:
            raise ValueError(f"aca_per_step has {len(self.aca_per_step)} numbers for {tasks} tasks")
        if len(self.class_order) != sum(self.task_sizes):
            raise ValueError(f"class_order has {len(self.class_order)} classes, the tasks {sum(self.task_sizes)}")
        self._agrees("aca", "aca_per_step", self.aca_per_step[-1])
        self._agrees("aia", "aca_per_step", fmean(self.aca_per_step))
        self._agrees("til_accuracy", "til_matrix", fmean(float(share or 0) for share in self.til_matrix[-1]))
        self._agrees("auc", "auc_per_step", self.auc_per_step[-1] if self.auc_per_step else None)
        self._agrees("iauc", "auc_per_step", fmean(self.auc_per_step) if self.auc_per_step else None)
        return self

    def _agrees(self, name: str, source: str, expected: float | None) -> None:
        """Raise :class:`ValueError` unless a metric is what its steps give."""
        found: float | None = getattr(self.metrics, name)
        if (found is None) != (expected is None) or abs((found or 0) - (expected or 0)) > ROUNDING:
            raise ValueError(f"metrics.{name} is {found}, but {source} gives {expected}")


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` atomically, lists on one line and a row of a matrix on each."""
    write_text(path, compact_json(record.model_dump(mode="json", by_alias=True)) + "\n")


def read_record(path: str | Path) -> Record:
    """Read and check a record.

    Raises:
        InputError: the file cannot be read, or is no valid record; the message says why.
    """
    path = expanded(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the record {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:  # no text, or a number or a list that is far too long or deep
        raise InputError(f"{path} is not a morecl record: {error}") from error
    if isinstance(value, dict):
        refuse_newer(path, value.get("schema"), SCHEMA)
    try:
        return Record.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{path} is not a morecl record: {first_problem(error)}") from error
