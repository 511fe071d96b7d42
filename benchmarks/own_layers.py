"""What it costs and gains that a model's own first layers pick the tokens, beside a draft: in processor time.

    python -m benchmarks.own_layers out/real/shared.held.parquet --model out/real/model --draft out/real/draft \
        --labels positive,negative --truth sentiment --limit 24 --keep 0.2,0.5

Every method answers all rows in turn, `--rounds` times, on one thread of one process. Seconds are of the processor, so
that other programs on the machine count little; a method's gain is the median of those within each round. Options are
those of `prefill bench`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from prefillcli.options.commands import BenchSettings
from prefillcli.report.section import percent_interval
from prefillcli.runtime.signals import Stop
from prefillcli.tools.bench.contest import compare, load_jobs, open_jobs, open_models
from prefillcli.tools.bench.material import read_rows
from prefillcli.tools.bench.methods import REFERENCE
from prefillcli.tools.bench.report import WorkloadResult

HEADER = (
    "method",
    "kept",
    "processor seconds",
    "gain",
    "flips",
    "95 % interval",
    "difference",
    "AUC",
)


def table_lines(result: WorkloadResult) -> Iterator[str]:
    """What the methods took and answered, as a table in Markdown."""
    yield "| " + " | ".join(HEADER) + " |"
    yield "| " + " | ".join("---" for _ in HEADER) + " |"
    for each in result.methods:
        audit, gain = each.answers.audit, each.speedup
        cells = ["", "", ""]
        if audit is not None and audit.interval is not None:
            cells[0] = f"{audit.flips} of {audit.rows} ({audit.flip_rate:.1%})"
            cells[1:] = [percent_interval(audit.interval), f"{audit.mean_difference:.3f}"]
        gained = f"{gain.median:.2f} ({gain.low:.2f}-{gain.high:.2f})"
        auc = "" if each.answers.auc is None else f"{each.answers.auc:.3f}"
        row = [each.method, f"{each.kept:.1%}", f"{each.seconds.median:.1f}", gained, *cells, auc]
        yield "| " + " | ".join(row) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    for name in ("model", "draft", "draft-tokenizer", "labels", "truth", "template", "prompt-column"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--method", default="specprefill,self-draft")
    parser.add_argument("--keep", default="0.2")
    parser.add_argument("--self-layer", type=int, default=None)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    rounds, rows = given.pop("rounds"), given.pop("rows")
    lists = {"method": tuple(given["method"].split(",")), "keep": tuple(map(float, given["keep"].split(",")))}
    settings = BenchSettings.model_validate({**given, **lists, "inputs": (rows,), "threads": 1, "chat": False})
    result = WorkloadResult(made=False)
    with Stop() as stop, TemporaryDirectory() as folder, ExitStack() as loaded:
        models = open_models(settings)
        jobs = open_jobs(settings, models, stop, folder)
        reference = next(job for job in jobs if job.method == REFERENCE)
        window, truths = read_rows(reference.inputs, settings, result)
        for each in models.values():
            loaded.callback(each.close)
        jobs = load_jobs(jobs, settings.contest.method, 0, result.notes)
        log = lambda step: print(step, file=sys.stderr)  # noqa: E731
        compare(jobs, window, result, truths, rounds=rounds, begin=log, clock=time.process_time)
    print("\n".join([*table_lines(result), *result.notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
