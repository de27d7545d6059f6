"""The options of commands that can work on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from morecl.errors import InputError, unknown_name
from morecl.on_ray.cluster import ClusterOptions, check_installed, refuse_client

On = Annotated[str | None, typer.Option("--on", metavar="ray", help="Work on a Ray cluster, not on this machine.")]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Of the Ray cluster. Default: the one on this machine, else a new one."),
]
GpusPerRun = Annotated[
    float | None,
    typer.Option(min=0, metavar="0.25", help="On Ray: cards per run, or a share of one. Default: 1 if there are any."),
]
CpusPerRun = Annotated[int | None, typer.Option(min=1, help="On Ray: CPUs and threads per run. Default: 1.")]


def cluster_options(
    on: str | None, address: str | None, gpus_per_run: float | None, cpus_per_run: int | None, device: str | None
) -> ClusterOptions | None:
    """What ``--on ray`` and its options say; ``None``: work on this machine. On the device ``cpu`` no cards are needed.

    Raises:
        InputError: the options do not fit together, or Ray is not installed.
    """
    given = {"--address": address, "--gpus-per-run": gpus_per_run, "--cpus-per-run": cpus_per_run}
    if on is None:
        if useless := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{', '.join(useless)} is for a Ray cluster; add --on ray")
        return None
    if on != "ray":
        raise unknown_name("place after --on", on, ["ray"])
    if gpus_per_run is not None and gpus_per_run > 1 and gpus_per_run % 1:
        raise InputError(f"--gpus-per-run is a share of one card, such as 0.25, or whole cards, not {gpus_per_run:g}")
    refuse_client(address)
    check_installed()
    if gpus_per_run is None and device == "cpu":
        gpus_per_run = 0
    return ClusterOptions(address, gpus_per_run, cpus_per_run or 1)
