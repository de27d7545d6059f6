"""Connecting to a Ray cluster, and what each of its tasks asks for."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from morecl.errors import InputError, first_line

_KNOCK_SECONDS = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster, and what a run (or a chunk of predictions) asks for; ``None``: see :class:`Cluster`."""

    address: str | None = None
    gpus: float | None = None
    cpus: int = 1


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        cpus: of a task.
        gpus: cards of a task that may use one. By default one if the cluster has any, else none.
        nodes: how many there are.
        slots: how many tasks it can do at once.
    """

    cpus: int
    gpus: float
    nodes: int
    slots: int

    def resources(self, device: str) -> dict[str, float]:
        """What a task on ``device`` asks Ray for."""
        return {"num_cpus": self.cpus, "num_gpus": 0 if device == "cpu" else self.gpus}

    @property
    def title(self) -> str:
        cards = f", {_number(self.gpus, 'card')}" if self.gpus else ""
        return f"on {_number(self.nodes, 'node')} of a Ray cluster, {_number(self.cpus, 'CPU')}{cards} each"


def check_installed() -> None:
    """Raise :class:`InputError` without Ray. Imports nothing."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("ray not installed; install with: pip install 'morecl[ray]'")


def refuse_client(address: str | None) -> None:
    """Raise :class:`InputError` for the address of Ray's client, with which none of this was tried."""
    if address and address.startswith("ray://"):
        raise InputError(f"{address}: Ray's client is not supported; give the command on a node, with HOST:PORT")


@contextmanager
def connected(options: ClusterOptions) -> Iterator[Cluster]:
    """Connect to the cluster at ``options.address``; without one, to the one on this machine, or start it.

    Raises:
        InputError: there is no such cluster, or none of its nodes has what a task asks for.
    """
    check_installed()
    import ray

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with _silent_ray():
            _connect(options.address)
            yield _checked(options, ray.nodes())
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray sets its own


@contextmanager
def _silent_ray() -> Iterator[None]:
    """Keep Ray from printing to stdout, where answers go, what it thinks of lost nodes. It has no option for it."""
    from ray._private import worker

    before = getattr(worker, "print_to_stdstream", None)
    if before is None:
        yield
        return
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _connect(address: str | None) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    given = address or os.environ.get("RAY_ADDRESS")
    refuse_client(given)
    try:
        if given and given not in ("auto", "local"):
            _knock(given)
        ray.init(address=given or "auto", **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        if given:
            raise InputError(
                f"there is no Ray cluster at {given} ({first_line(error)}); `ray start --head` starts one and says its "
                "address"
            ) from error
        ray.init(include_dashboard=False, **quiet)


def _knock(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` if nobody listens at ``address``; Ray takes minutes to find out."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError("an address is HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


def _checked(options: ClusterOptions, nodes: list[dict[str, Any]]) -> Cluster:
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cards = [has.get("GPU", 0) for has in alive]
    gpus = min(1.0, max(cards, default=0)) if options.gpus is None else options.gpus
    slots = sum(_slots(has, options.cpus, gpus) for has in alive)
    if not slots:
        there = "; ".join(f"{_number(has.get('CPU', 0), 'CPU')}, {_number(has.get('GPU', 0), 'card')}" for has in alive)
        raise InputError(
            f"no node has {_number(options.cpus, 'CPU')} and {_number(gpus, 'card')}, which --cpus-per-run and "
            f"--gpus-per-run ask for; the nodes have: {there}"
        )
    return Cluster(options.cpus, gpus, len(alive), slots)


def _slots(has: dict[str, float], cpus: int, gpus: float) -> int:
    """Tasks that a node with these resources can do at once."""
    by_cpu = int(has.get("CPU", 0) // cpus)
    return min(by_cpu, int(has.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu


def _number(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"
