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
        typer.Option(metavar="all|NAME,...", help="Measure what a pass and a further task cost with these methods."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Measure where the time of a training step goes.")] = False,
    prediction: Annotated[
        bool, typer.Option("--prediction", help="Measure predictions of MORE and MORE-RP after 5, 20 and 100 tasks.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Takes two minutes on two CPU cores.")] = False,
    out: Annotated[
        Path | None, typer.Option(callback=options.expanded, help="Also write the numbers to this JSON file.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            callback=options.expanded, help="With --prediction: draw time against tasks into this .svg or .png file."
        ),
    ] = None,
    backbone: options.Backbone = None,
    image_size: Annotated[int | None, typer.Option(help="Input size in pixels. Default: the backbone's.")] = None,
    set_: options.SetForAll = None,
    device: options.Device = None,
    precision: options.Precision = None,
    compile_: options.Compile = None,
) -> None:
    """Measure speed on this machine; without another option, MORE's against the number of tasks."""
    if (profile or prediction) and methods is not None:
        raise InputError(f"{'--profile' if profile else '--prediction'} measures fixed methods; leave out --methods")
    if profile and prediction:
        raise InputError("--profile and --prediction are two benchmarks; give one at a time")
    if figure and not prediction:
        raise InputError("--figure draws what --prediction measures; add --prediction")
    settings = options.settings_from(
        set_, backbone=backbone, image_size=image_size, device=device, precision=precision, compile=compile_
    )
    from morecl.bench import cost, speed
    from morecl.bench import prediction as answers
    from morecl.bench import profile as step
    from morecl.files import check_target, write_json

    if out:
        check_target(out, "bench.json")
    if figure:
        from morecl.report.render import check_image_type, write_figure

        check_target(figure, "prediction.svg", "--figure")
        check_image_type(figure)
    console = output_console()
    result: speed.Bench | cost.Costs | step.StepProfile | answers.Predictions
    with console.status("starting") as status:

        def report(what: str) -> None:
            status.update(what)

        if profile:
            result = step.measure(settings, step.QUICK_PROFILE if quick else step.ProfileSize(), report)
        elif prediction:
            size = answers.QUICK_PREDICTION if quick else answers.PredictionSize()
            result = answers.measure(settings, size, report)
        elif methods is not None:
            result = cost.measure(
                cost.method_names(methods), settings, cost.QUICK_COST if quick else cost.CostSize(), report
            )
        else:
            result = speed.bench(settings, speed.QUICK_SPEED if quick else speed.SpeedSize(), report)
    result.show(console)
    if out:
        write_json(out, result.as_dict())
    if figure and isinstance(result, answers.Predictions):
        write_figure(result.figure(), "Time of a prediction against the number of tasks", figure)
