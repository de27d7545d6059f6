"""``morecl bench``: measurements of speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morecl.cli import options
from morecl.cli.terminal import output_console
from morecl.errors import InputError


def bench(
    methods: Annotated[
        str | None,
        typer.Option(metavar="all|NAME,...", help="Measure the cost of a pass and of a further task with these."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Measure where the time of a training step goes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Takes two minutes on two CPU cores.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this JSON file.")] = None,
    backbone: options.Backbone = None,
    image_size: Annotated[int | None, typer.Option(help="Input size in pixels. Default: the backbone's.")] = None,
    set_: options.SetForAll = None,
    device: options.Device = None,
    precision: options.Precision = None,
    compile_: options.Compile = None,
) -> None:
    """Measure speed on this machine: MORE against the number of tasks, or what --methods or --profile ask for."""
    if profile and methods is not None:
        raise InputError("--profile measures MORE only; leave out --methods")
    settings = options.settings_from(
        set_, backbone=backbone, image_size=image_size, device=device, precision=precision, compile=compile_
    )
    from morecl.bench import cost, speed
    from morecl.bench import profile as step
    from morecl.files import check_target, write_json

    if out:
        check_target(out, "bench.json")
    console = output_console()
    result: speed.Bench | cost.Costs | step.StepProfile
    with console.status("starting") as status:

        def report(what: str) -> None:
            status.update(what)

        if profile:
            result = step.measure(settings, step.QUICK_PROFILE if quick else step.ProfileSize(), report)
        elif methods is not None:
            result = cost.measure(
                cost.method_names(methods), settings, cost.QUICK_COST if quick else cost.CostSize(), report
            )
        else:
            result = speed.bench(settings, speed.QUICK_SPEED if quick else speed.SpeedSize(), report)
    result.show(console)
    if out:
        write_json(out, result.as_dict())
