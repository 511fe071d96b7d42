"""What the wheel can do where there is nothing else: `make test-install`."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest

from prefillcli.models.files import sample_model
from tests.install.conftest import Place
from tests.jobs.jobs import Reference, read_report

TICKETS = [
    {"id": 7, "text": "The parcel never came. Is this about shipping? Answer:"},
    {"id": 8, "text": "Thank you, all is fine. Is this about shipping? Answer:"},
    {"id": 9, "text": "Two parcels came. Is this about shipping? Answer:"},
]
TASK = """task: own
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/own.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" Yes", " No"]
doc_to_target: gold
metric_list: [{metric: acc}]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _tickets(place: Place) -> None:
    (place.folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TICKETS))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(sample_model())


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> list[float]:
    return [reference.answer(row["text"]).score for row in TICKETS]


def test_a_stranger_scores_a_file(place: Place, wanted: list[float]) -> None:
    code = "from prefillcli.models.files import sample_model; print(sample_model())"
    model = place.run("python", "-c", code).stdout.strip()
    assert model.startswith(str(place.folder / "env"))
    command = [
        "prefill",
        "score",
        "tickets.jsonl",
        "-m",
        model,
        "--no-chat",
        "--dtype",
        "float32",
        "--id-column",
        "id",
    ]
    done = place.run(*command, code=2)
    said = done.stderr.splitlines()
    assert said[:2] == ["prefill: no column 'prompt' in the first 3 lines", "available: id, text"]
    assert "--prompt-column" in said[2]
    done = place.run(*command, "--prompt-column", "text", "--resume")
    summary = json.loads(done.stdout)
    rows = pq.read_table(place.folder / "tickets.scores.parquet").to_pylist()
    assert [row["id"] for row in rows] == [7, 8, 9]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-5)
    assert "<html" in (place.folder / summary["page"]).read_text()
    assert read_report(place.folder / summary["report"])["rows"]["scored"] == 3
    verified = place.run("prefill", "verify", "tickets.scores.parquet", "tickets.jsonl")
    assert json.loads(verified.stdout)["problems"] == []


@pytest.mark.parametrize("command", ["pipx/bin/prefill", "uv/bin/prefill"])
def test_the_command_alone_scores_with_the_sample_model(place: Place, command: str, wanted: list[float]) -> None:
    output = f"{command.partition('/')[0]}.jsonl"
    given = ["tickets.jsonl", "--prompt-column", "text", "--dtype", "float32", "--no-chat", "-o", output]
    assert "the sample model" in place.run(command, "score", *given).stderr
    rows = [json.loads(line) for line in (place.folder / output).read_text().splitlines()]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-5)


def test_doctor_finds_nothing_wrong(place: Place) -> None:
    assert json.loads(place.run("prefill", "doctor").stdout.splitlines()[-1])["status"] == "complete"


def test_python_scores(place: Place, wanted: list[float]) -> None:
    code = (
        "import prefillcli, json; rows = [json.loads(line) for line in open('tickets.jsonl')]; "
        "table = prefillcli.score(rows, prompt_column='text', chat=False, dtype='float32'); "
        "print(table['score'].to_pylist())"
    )
    assert json.loads(place.run("python", "-c", code).stdout) == pytest.approx(wanted, abs=1e-5)


def test_a_batch_file_comes_back_as_one(place: Place, reference: Reference) -> None:
    body = {"model": "target", "max_tokens": 1, "logprobs": 1}
    lines = [{"url": "/v1/completions", "body": body | {"prompt": row["text"]}} for row in TICKETS]
    lines.append({"url": "/v1/embeddings", "body": {"model": "target", "input": "Yes"}})
    lines = [{"custom_id": f"t{at}", "method": "POST", **line} for at, line in enumerate(lines)]
    (place.folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [
        "batch.jsonl",
        "-m",
        place.sample("target"),
        "--dtype",
        "float32",
        "--format",
        "openai",
        "-o",
        "answers.jsonl",
    ]
    place.run("prefill", "score", *given, "--max-error-rate", "0.3")
    answers = [json.loads(line) for line in (place.folder / "answers.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["t0", "t1", "t2", "t3"]
    assert answers[-1]["response"] is None
    assert answers[-1]["error"]["code"] == "invalid_request"
    for row, answer in zip(TICKETS, answers, strict=False):
        likeliest = reference._probabilities(tuple(reference.ids(row["text"]))).max().log()
        (choice,) = answer["response"]["body"]["choices"]
        assert choice["logprobs"]["token_logprobs"] == [pytest.approx(float(likeliest), abs=1e-4)]


def test_the_harness_evaluates_a_task(place: Place, wanted: list[float]) -> None:
    (wheel,) = (place.folder / "dist").glob("*.whl")
    place.run("uv", "pip", "install", "--quiet", "--python", "env/bin/python", f"{wheel}[lm-eval]")
    (place.folder / "tasks").mkdir()
    (place.folder / "tasks/own.yaml").write_text(TASK)
    # The right answer is what the model finds likelier, but for the first row
    gold = [int(score < 0.5) ^ (at == 0) for at, score in enumerate(wanted)]
    rows = [{"text": row["text"], "gold": answer} for row, answer in zip(TICKETS, gold, strict=True)]
    (place.folder / "tasks/own.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = f"pretrained={place.sample('target')},dtype=float32"
    place.run(
        "python", "-m", "prefillcli.lm_eval", "--model", "prefill", "--model_args", args,
        "--tasks", "own", "--include_path", "tasks", "--output_path", "harness",
    )  # fmt: skip
    (found,) = (place.folder / "harness").rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]["own"]
    assert results["acc,none"] == pytest.approx(2 / 3)
