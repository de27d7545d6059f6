"""Metrics for Prometheus; each server has its own."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory and processor time; Linux only
        self.requests = Counter(
            "morecl_requests", "Requests answered.", ["method", "path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "morecl_request_seconds", "Time to answer a request.", ["path"], buckets=_SECONDS, registry=registry
        )
        self.images = Counter(
            "morecl_images", "Images asked about: known, unknown, unreadable.", ["answer"], registry=registry
        )
        self.batches = Histogram(
            "morecl_batch_images", "Images in one batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.waiting = Gauge("morecl_queue_images", "Images that wait for an answer.", registry=registry)
        self.jobs = Counter("morecl_jobs", "Lessons that ended: done, failed, cancelled.", ["state"], registry=registry)
        self.jobs_waiting = Gauge("morecl_queue_jobs", "Lessons that wait or run.", registry=registry)
        self.version = Gauge("morecl_model_version", "Version of the model that answers.", registry=registry)
        self.classes = Gauge("morecl_model_classes", "Classes that the model knows.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
