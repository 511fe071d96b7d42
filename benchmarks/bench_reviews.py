"""What compression costs and gains on a real model: the sentiment of drug reviews, after many examples or two.

    python -m benchmarks.bench_reviews                    # all runs: hours on one thread
    python -m benchmarks.bench_reviews shared.self        # one of them
    python -m benchmarks.bench_reviews --table            # what the runs that were made have found

`self`: SmolLM2-135M is its own draft, which picks as well as a draft can, and saves no time. `draft`: the draft of
`benchmarks.distill_draft`, which is made if it is not there. `simple`: what needs no draft and shares no prefix.
`speed` measures the draft in rounds. The rows are the held-out ones of `benchmarks.review_rows`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.distill_draft import main as distill_draft
from benchmarks.review_rows import write_rows
from prefillcli.report.section import percent_interval
from recipes.real_model import FOLDER, real_model

HEADER = ("run", "method", "kept", "flips", "95 % interval", "mean difference", "accuracy", "AUC", "speedup")


@dataclass(frozen=True, slots=True)
class Run:
    """One `prefill bench`: so many rows of a file, a draft, methods, keep rates. 0 `rounds`: only answers count."""

    rows: str
    draft: str | None
    limit: int
    methods: str = "specprefill"
    keep: str = "0.1,0.2,0.3,0.5"
    rounds: int = 0


RUNS = {
    "shared.self": Run("shared", "model", 48, "specprefill,ends"),
    "shared.draft": Run("shared", "draft", 48, keep="0.2,0.5"),
    "shared.simple": Run("shared", None, 48, "random,bm25", "0.2"),
    "long.self": Run("long", "model", 24, "specprefill,random,ends,bm25", "0.2,0.5"),
    "shared.speed": Run("shared", "draft", 12, keep="0.2", rounds=3),
    "own.speed": Run("own", "draft", 2, keep="0.2", rounds=3),
}


def bench_command(run: Run, folder: Path, output: Path) -> list[str]:
    """The command line of a run."""
    command = [sys.executable, "-m", "prefillcli", "bench", str(folder / f"{run.rows}.held.parquet"), "--no-chat"]
    command += ["--model", str(folder / "model"), "--labels", "positive,negative"]
    command += [] if run.draft is None else ["--draft", str(folder / run.draft)]
    command += ["--truth", "sentiment", "--keep", run.keep, "--method", run.methods, "--limit", str(run.limit)]
    return [*command, "--rounds", str(run.rounds), "--output", str(output)]


def table_lines(folder: Path) -> Iterator[str]:
    """What the finished runs in `folder` found, as a table in Markdown."""
    yield "| " + " | ".join(HEADER) + " |"
    yield "| " + " | ".join("---" for _ in HEADER) + " |"
    for name in RUNS:
        if not (path := folder / f"{name}.json").exists():
            continue
        (workload,) = json.loads(path.read_text())["workloads"]
        for each in workload["methods"]:
            answers, audit = each["answers"], each["answers"]["audit"]
            cells = ["", "", ""]
            if audit is not None:
                cells[0] = f"{audit['flips']} of {audit['rows']} ({audit['flip_rate']:.1%})"
                cells[1:] = [percent_interval(tuple(audit["interval"])), f"{audit['mean_difference']:.3f}"]
            speedup = f"{each['speedup']['median']:.2f}" if workload["rounds"] else ""  # a single run says little
            auc = "" if answers["auc"] is None else f"{answers['auc']:.3f}"
            right = f"{answers['accuracy']:.1%}", auc, speedup
            yield "| " + " | ".join([name, each["method"], f"{each['kept']:.1%}", *cells, *right]) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure compression on a real model and real reviews.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--table", action="store_true", help="print what was found before, and run nothing")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.runs if name not in RUNS]:
        parser.error(f"there is no run {unknown[0]}; there are {', '.join(RUNS)}")
    results = args.folder / "bench"
    if not args.table:
        real_model(args.folder)
        write_rows(args.folder)
        results.mkdir(exist_ok=True)
    for name in [] if args.table else args.runs or RUNS:
        run = RUNS[name]
        if run.draft == "draft" and not (args.folder / "draft" / "config.json").exists():
            distill_draft(["--folder", str(args.folder)])
        done = subprocess.run(bench_command(run, args.folder, results / f"{name}.json"), check=False)  # noqa: S603 - ours
        if done.returncode:
            return done.returncode
    print("\n".join(table_lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
