"""The command line: parse, call, exit code. Nothing here imports torch, so that `--help` answers at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast

import typer

from prefillcli.command_line import (
    AnyOptions,
    Commands,
    GroupedCommand,
    finish,
    load_options,
    parameters_of,
    run,
)
from prefillcli.options.commands import (
    COMMANDS,
    BenchSettings,
    CalibrateSettings,
    DoctorSettings,
    FitSettings,
    InspectSettings,
    MergeSettings,
    ProfileSettings,
    ScoreSettings,
)
from prefillcli.options.option import RUN
from prefillcli.runtime.clock import StepLog, step
from prefillcli.runtime.extras import light_imports
from prefillcli.runtime.version import __version__

Summary = dict[str, Any]

app = typer.Typer(
    name="prefill",
    cls=Commands,
    help="Offline, prefill-only LLM scoring: one probability per row.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},  # commands take it over
    rich_markup_mode=None,  # help pages are plain text: see GroupedCommand
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the `prefill` command."""
    run(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    pass


def _job(job: Callable[[AnyOptions], Summary]) -> Callable[[AnyOptions], Summary]:
    # Make `job` a command of its name: `--recipe`, and an argument or an option for each field of its settings.
    name = job.__name__.strip("_")
    Commands.add(name, job.__doc__, partial(_command_of, name, job))
    return job


def _command_of(name: str, job: Callable[[AnyOptions], Summary]) -> tuple[Callable[..., None], type[GroupedCommand]]:
    kind = cast("type[AnyOptions]", COMMANDS[name])

    def command(recipe: str | None, **given: Any) -> None:
        settings = load_options(kind, recipe, given)
        with StepLog(interval=settings.interval, quiet=settings.quiet):
            summary = job(settings)
        finish(summary)

    parameters = parameters_of(kind)
    command.__doc__ = job.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command, GroupedCommand.of(kind)


@_job
def score_(settings: ScoreSettings) -> Summary:
    """Score every row of INPUT and write one row for each: a probability, or an error with a stable code.

    The last line on stdout is a summary of the run, one JSON object; everything else goes to stderr.
    """
    from prefillcli.scoring.score import score_job

    return score_job(settings)


@_job
def profile(settings: ProfileSettings) -> Summary:
    """Measure what fits and how fast it runs on this machine: the longest prompt of each mode, and completion times.

    With INPUT, also what scoring it takes. Tables go to stderr; the last line on stdout is a summary, one JSON
    object.
    """
    from prefillcli.tools.profile.profile_job import profile_job

    return profile_job(settings)


@_job
def bench(settings: BenchSettings) -> Summary:
    """Compare ways to score INPUT, or generated prompts: speed, memory, answers.

    Tables go to stderr; the last line on stdout is a summary of the run, one JSON object.
    """
    from prefillcli.tools.bench.bench_job import bench_job

    return bench_job(settings)


@_job
def inspect_(settings: InspectSettings) -> Summary:
    """Show one prompt of INPUT as the engine sees it: its tokens, what is shared, what is kept and why, its answers.

    The last line on stdout is a summary, one JSON object; everything else goes to stderr.
    """
    from prefillcli.tools.inspect import inspect_job

    return inspect_job(settings)


@_job
def merge(settings: MergeSettings) -> Summary:
    """Join the shards beside OUTPUT into the output that one process would have written.

    Every row must be there exactly once. The last line on stdout is a summary, one JSON object.
    """
    from prefillcli.tools.merge import merge_job

    return merge_job(settings)


@_job
def doctor(settings: DoctorSettings) -> Summary:
    """Show what this machine has and what will be used, and check each path of attention against explicit scores.

    A path that is wrong here is not used by later runs. Tables go to stderr; the last line on stdout is one JSON
    object with the same content. Exit code 0, or 1 where a path is wrong.
    """
    step("starting torch and transformers")
    with light_imports():
        from prefillcli.tools.doctor import doctor_job

    return doctor_job(settings)


@_job
def calibrate(settings: CalibrateSettings) -> Summary:
    """Fit probabilities to SCORES with right answers: temperature, Platt or isotonic, chosen by cross-validation.

    With --prior rows, take out what the model prefers whatever a row says, without right answers. With --accuracy,
    find the probability from which answers need no person to review them. A table goes to stderr; the last line on
    stdout is a summary, one JSON object.
    """
    from prefillcli.tools.calibrate import calibrate_job
    from prefillcli.tools.floors import floors_job
    from prefillcli.tools.priors import priors_job

    if settings.fit.accuracy is not None:
        return floors_job(settings)
    return calibrate_job(settings) if settings.fit.prior is None else priors_job(settings)


@_job
def fit(settings: FitSettings) -> Summary:
    """Fit heads to INPUT with right answers: they answer after a middle layer, and what is above it is not needed.

    A table of how good they are on held-out rows goes to stderr; the last line on stdout is a summary, one JSON
    object. prefill score --head FILE takes the file.
    """
    from prefillcli.tools.fit.fit_job import fit_job

    return fit_job(settings)


_Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="What prefill score wrote: a file, a folder or a URL.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.", rich_help_panel=RUN)]


def verify(
    output: _Output,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT", help="What it was made of; its rows are compared.")
    ] = None,
    quiet: _Quiet = False,
) -> None:
    """Check that OUTPUT is complete and unchanged since its job wrote it, and with INPUT that their rows match.

    Exit code 0, or 1 with what is wrong on stderr. The last line on stdout is a summary, one JSON object.
    """
    from prefillcli.tools.verify import verify_job

    finish(verify_job(output, inputs or (), quiet=quiet))


def status(output: _Output, quiet: _Quiet = False) -> None:
    """Show whether the job of OUTPUT is running, with its rate and expected end, has stopped, or is complete.

    The last line on stdout is one JSON object with the same content; nothing is changed.
    """
    from prefillcli.tools.status import status_job

    finish(status_job(output, quiet=quiet))


Commands.add("verify", verify.__doc__, lambda: (verify, GroupedCommand))
Commands.add("status", status.__doc__, lambda: (status, GroupedCommand))
