"""From a finished run to its record."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np
import timm
import torch
import torchvision

import morecl
from morecl import metrics
from morecl.data import TaskStream
from morecl.evaluator import Step
from morecl.methods import Learner
from morecl.records import BackboneInfo, DataInfo, Metrics, Record
from morecl.run.measurements import Measurements
from morecl.run.request import RunRequest


def build_record(request: RunRequest, learner: Learner, stream: TaskStream, measured: Measurements) -> Record:
    """The record of a run whose tasks have all been learned and measured."""
    steps = measured.steps
    ood_steps = steps[:-1]  # after the last task nothing is unknown
    entries = learner.entries()
    return Record(
        method=request.method,
        benchmark=request.benchmark_name,
        seed=request.seed,
        class_order=list(stream.class_order),
        class_order_name=request.class_order,
        task_sizes=[len(group) for group in stream.groups],
        config=learner.config.record(),
        backbone=BackboneInfo(
            name=learner.backbone.architecture or "local",
            sha256=learner.backbone.sha256,
            source_sha256=learner.backbone.source_sha256,
            image_size=learner.backbone.input.size,
        ),
        data=_data(stream),
        versions=_versions(measured),
        device=_device_name(learner.device),
        ranks=measured.ranks,
        metrics=_metrics(steps),
        accuracy_matrix=metrics.accuracy_matrix([step.accuracy for step in steps]),
        til_matrix=metrics.accuracy_matrix([step.til for step in steps]),
        aca_per_step=[step.aca for step in steps],
        auc_per_step=[step.auc for step in ood_steps if step.auc is not None],
        fpr95_per_step=[step.fpr95 for step in ood_steps if step.fpr95 is not None],
        aupr_per_step=[step.aupr for step in ood_steps if step.aupr is not None],
        roc=ood_steps[-1].roc if ood_steps else None,
        seconds={**learner.seconds, "evaluate": measured.evaluate_seconds, "total": measured.total_seconds},
        entries={**entries, "total": sum(entries.values()), "buffer": learner.buffer_entries()},
        capacity=measured.capacity,
        peak_memory_bytes=measured.peak_memory_bytes or None,
        shared=measured.shared,
    )


def _metrics(steps: Sequence[Step]) -> Metrics:
    matrix = metrics.accuracy_matrix([step.accuracy for step in steps])
    til_matrix = metrics.accuracy_matrix([step.til for step in steps])
    last = steps[-1]
    ood = steps[-2] if len(steps) > 1 else None
    auc_per_step = [step.auc for step in steps[:-1] if step.auc is not None]
    return Metrics(
        aca=last.aca,
        aia=metrics.aia([step.aca for step in steps]),
        reduction_rate=metrics.reduction_rate(matrix),
        bwt=metrics.bwt(matrix),
        auc=ood.auc if ood else None,
        iauc=metrics.iauc(auc_per_step) if auc_per_step else None,
        fpr95=ood.fpr95 if ood else None,
        aupr=ood.aupr if ood else None,
        til_accuracy=metrics.til_accuracy(til_matrix),
        errors_to_earlier=last.errors[0] if last.errors else None,
        errors_to_later=last.errors[1] if last.errors else None,
    )


def _data(stream: TaskStream) -> DataInfo:
    dataset = stream.dataset
    return DataInfo(
        name=dataset.name,
        fingerprint=dataset.fingerprint,
        train_images=len(dataset.y_train),
        test_images=len(dataset.y_test),
        scored_on=stream.scored_on,
        classes=list(dataset.classes),
    )


def _versions(measured: Measurements) -> dict[str, str]:
    return {
        "morecl": morecl.__version__,
        "source": " ".join(measured.sources),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
