"""`python -m benchmarks.object_store`: what a run asks of S3, beside one on a local disk (`score`), and how much of an
input is got (`reading`).

The store is moto's S3 server on this machine, whose answers wait for `--latency` as those of a store far away do. Runs
from disk to disk and from S3 to S3 take turns, each in its own process. Progress goes to stderr, a table and one line
of JSON to stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from moto.server import DomainDispatcherApplication, create_backend_app
from rich.console import Console
from rich.table import Table
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks.console import log
from benchmarks.score_runs import SAMPLES, write_short_rows
from prefillcli.data.reading.source import Source

_BUCKET = "bench-bucket"
_KINDS = ("PUT", "GET", "HEAD", "LIST", "DELETE")

app = typer.Typer(add_completion=False)


@app.command()
def score(
    rows: Annotated[int, typer.Option(help="Short rows of the input.")] = 12_000,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    latency: Annotated[float, typer.Option(help="Seconds that each answer of the store waits.")] = 0.03,
    model: Annotated[str, typer.Option(help="A sample model: target or draft.")] = "target",
) -> None:
    """Count the requests of a run from S3 to S3, and compare its time with that of a local run."""
    seconds: dict[str, list[dict[str, float]]] = {"disk": [], "S3": []}
    with tempfile.TemporaryDirectory() as folder, _store(latency) as (url, asked, _):
        data = Path(folder) / "rows.jsonl"
        write_short_rows(data, rows)
        environment = os.environ | {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        _put(f"{url}/{_BUCKET}")
        _put(f"{url}/{_BUCKET}/rows.jsonl", data.read_bytes())
        for number in range(rounds):
            log(f"round {number + 1} of {rounds}")
            for name, place in (("disk", folder), ("S3", f"s3://{_BUCKET}")):
                asked.clear()
                output, report = f"{place}/out-{number}.parquet", f"{folder}/report.json"
                seconds[name].append(_score(f"{place}/rows.jsonl", output, report, model, environment))
    parts = sum("part-" in key for kind, key in asked if kind == "PUT")
    counts = Counter(kind for kind, _ in asked)
    of_parts = Counter(kind for kind, key in asked if "part-" in key)
    table = Table("requests", *_KINDS, "all")
    table.add_row("of the whole run", *(str(counts[kind]) for kind in _KINDS), str(counts.total()))
    table.add_row("of its parts themselves", *(str(of_parts[kind]) for kind in _KINDS), str(of_parts.total()))
    console = Console(width=100)
    console.print(table)
    console.print(f"{parts} parts, answers after {latency * 1000:.0f} ms")
    times = Table("seconds, median", "read", "waiting", "write", "total")
    for name, found in seconds.items():
        medians = [statistics.median(each[phase] for each in found) for phase in ("read", "waiting", "write", "total")]
        times.add_row(f"from {name} to {name}", *(f"{each:.2f}" for each in medians))
    console.print(times)
    print(json.dumps({"rows": rows, "parts": parts, "latency": latency, "requests": counts, "seconds": seconds}))


@app.command()
def reading(
    rows: Annotated[int, typer.Option(help="Rows of 6 kB of text, an id and a kept column.")] = 16_000,
    latency: Annotated[float, typer.Option(help="Seconds that each answer of the store waits.")] = 0.03,
) -> None:
    """Read a Parquet file and the same rows as JSON Lines; count requests and bytes."""
    rng = np.random.default_rng(0)
    columns = {"id": 90, "prompt": 6000, "kept": 60}
    table = pa.table({name: [rng.bytes(size // 2).hex() for _ in range(rows)] for name, size in columns.items()})
    results = []
    with tempfile.TemporaryDirectory() as folder, _store(latency) as (url, asked, sent):
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        _put(f"{url}/{_BUCKET}")
        pq.write_table(table, f"{folder}/rows.parquet", compression="none", use_dictionary=False)
        Path(f"{folder}/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        for name in ("rows.parquet", "rows.jsonl"):
            data = Path(folder, name).read_bytes()
            _put(f"{url}/{_BUCKET}/{name}", data)
            asked.clear()
            sent.clear()
            began = time.perf_counter()
            source = Source.open([f"s3://{_BUCKET}/{name}"], columns=["prompt"], carried=["id", "kept"])
            if sum(len(batch.rows) for batch in source.batches()) != rows:
                raise RuntimeError(f"not all rows of {name} were read")
            gets = [kind for kind, _ in asked].count("GET")
            seconds = time.perf_counter() - began
            results.append({"file": name, "MB": len(data) / 1e6, "got": sum(sent) / 1e6, "GETs": gets, "s": seconds})
    shown = Table("input", "size MB", "got MB", "GETs", "seconds")
    for each in results:
        shown.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in each.values()))
    Console(width=100).print(shown)
    print(json.dumps(results))


def _score(source: str, output: str, report: str, model: str, environment: dict[str, str]) -> dict[str, float]:
    """The seconds of `prefill score` in a new process, by phase."""
    command = [sys.executable, "-m", "prefillcli", "score", source, "-m", str(SAMPLES / "models" / model)]
    command += ["-o", output, "--report", report, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)  # noqa: S603 - our own command line
    found = json.loads(Path(report).read_text())
    if not found["rows"]["scored"]:
        raise RuntimeError(f"no row of {source} was scored")
    seconds: dict[str, float] = found["seconds"]
    return seconds


@contextmanager
def _store(latency: float) -> Iterator[tuple[str, list[tuple[str, str]], list[int]]]:
    """The address of an S3 server in a thread, what it was asked for (kind and key, in order), and bytes it sent."""
    moto = DomainDispatcherApplication(create_backend_app)
    asked: list[tuple[str, str]] = []
    sent: list[int] = []

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        listing = "list-type" in parse_qs(environ.get("QUERY_STRING", ""))
        asked.append(("LIST" if listing else environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        time.sleep(latency)
        answer = [bytes(piece) for piece in moto(environ, start_response)]
        sent.append(sum(map(len, answer)))
        return answer

    http = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=_Quiet)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked, sent
    finally:
        http.shutdown()
        thread.join()


def _put(url: str, data: bytes = b"") -> None:
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "application/octet-stream",
    }
    with urlopen(Request(url, data, headers, method="PUT")) as answer:  # noqa: S310 - our own server
        answer.read()


class _Quiet(WSGIRequestHandler):  # type: ignore[misc]
    def log(self, *_arguments: Any) -> None:
        """Nothing on stderr."""


if __name__ == "__main__":
    app()
