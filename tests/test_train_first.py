"""The first model that is cut from a job's model and trained on the answers of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefillcli.models.open import open_models
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from recipes.train_first import Course, Lesson, answers_of, cut_model, main, measure, read_lessons, train
from tests.jobs.jobs import score

SAMPLES = Path(__file__).parent.parent / "samples"
TARGET = SAMPLES / "models" / "target"
ROWS = 120


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a job, whose last row has no answer."""
    folder = tmp_path_factory.mktemp("night")
    table = pq.read_table(SAMPLES / "labeling.parquet", columns=["prompt"])[:ROWS]
    pq.write_table(pa.concat_tables([table, pa.table({"prompt": [""]})]), folder / "rows.parquet")
    score(
        folder / "rows.parquet", folder / "out.parquet", model=TARGET, labels="Yes,No", chat=False, max_error_rate=0.1
    )
    return folder / "out.run.json"


@pytest.fixture(scope="module")
def lessons(report: Path) -> list[Lesson]:
    return read_lessons(report)[1]


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return found


def test_lessons_are_the_scored_rows_and_the_answers_of_the_model(
    teacher: PreTrainedModel, lessons: list[Lesson]
) -> None:
    assert len(lessons) == ROWS
    for lesson in lessons[::20]:
        with torch.no_grad():
            own = teacher(lesson.tokens[None]).logits[0, -1, lesson.heads]
        torch.testing.assert_close(lesson.answer, own - own.mean(), atol=1e-3, rtol=0)


def test_answers_in_a_batch_are_those_of_each_prompt_alone(teacher: PreTrainedModel, lessons: list[Lesson]) -> None:
    with torch.no_grad():
        together = answers_of(cut_model(teacher, 4), lessons[:8])
    wanted = torch.stack([each.answer for each in lessons[:8]])
    torch.testing.assert_close(together, wanted, atol=0.3, rtol=0.1)  # in bfloat16
    assert float(torch.corrcoef(torch.stack([together[:, 0], wanted[:, 0]]))[0, 1]) > 0.99


@pytest.mark.nightly
def test_training_brings_a_cut_near_the_model(teacher: PreTrainedModel, lessons: list[Lesson]) -> None:
    course = Course(layers=2, epochs=4, rate=1e-3)
    small = cut_model(teacher, course.layers)
    before, head = measure(small, lessons, course), small.get_output_embeddings().weight.detach().clone()
    train(small, lessons, course)
    assert measure(small, lessons, course) > max(before, 0.0) + 0.2
    assert torch.equal(head, small.get_output_embeddings().weight)


def test_the_folder_on_disk_is_a_first_model_of_the_job(report: Path, tmp_path: Path) -> None:
    assert main([str(report), "--output", str(tmp_path / "first"), "--layers", "1", "--epochs", "1"]) == 0
    opened = open_models(
        load_settings(ScoreSettings, {"inputs": ("rows",), "model": str(TARGET), "first": str(tmp_path / "first")})
    )
    assert opened.draft is not None
    assert opened.draft.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("labels", "logprob", "text"),
    [(("Yes please", "Yes sir"), -1.0, "begin with the same token"), (("Yes", "No"), None, "no row has")],
)
def test_answers_that_teach_nothing_are_refused(
    report: Path, tmp_path: Path, labels: tuple[str, str], logprob: float | None, text: str
) -> None:
    scored = pa.array([logprob] * (ROWS + 1), pa.float64())
    pq.write_table(pa.table({f"logprob_{label}": scored for label in labels}), tmp_path / "out.parquet")
    told = json.loads(report.read_text())
    told["settings"] |= {"labels": ",".join(labels), "output": str(tmp_path / "out.parquet")}
    (tmp_path / "out.run.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=text):
        read_lessons(tmp_path / "out.run.json")
