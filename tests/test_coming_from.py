"""docs/coming-from.md: what others write, and the same here, with the numbers of both."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prefillcli.models.files import sample_model
from tests.jobs.models import save_model
from tests.unit.engines.encoder_models import save_encoder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the packages' own

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "samples"
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
PARTS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}


def blocks(section: str, kind: str = "python") -> list[str]:
    """The blocks of a section in one language."""
    return re.findall(rf"```{kind}\n(.*?)```", PARTS[section], re.DOTALL)


SECTIONS = {section: blocks(section) for section in PARTS}
(START,) = SECTIONS.pop(PAGE.partition("\n")[0])
# Those of the packages of typed decisions are in tests/test_coming_from_decisions.py: vLLM's environment lacks them.
DECISIONS = "OpenAI's Decisions API, and TypeSafe's System One"
JEV_TABLE = "jev-table: a pack over a CSV file"
TYPED_GGUF = "typed-gguf: GGUF files, one state at a time"
SERVERS = ["SGLang: `/v1/score`", DECISIONS]
PAIRS = "A cross-encoder: vLLM's `LLM.score`, and `/rerank` of Text Embeddings Inference"
THEIRS = [(name, at) for name, blocks in SECTIONS.items() for at in range(len(blocks) - 1)]


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models", "judge").symlink_to(sample_model())  # whose answer is among the likeliest tokens
    save_encoder(Path("models", "cross-encoder"), num_labels=1, hidden_size=128, intermediate_size=128)
    Path("models", "eyes").symlink_to(SAMPLES / "models" / "pictures")
    Path("photos").mkdir()
    pictures = pq.read_table(SAMPLES / "pictures.parquet")["photo"]
    for number in (1, 2):
        Path("photos", f"{number}.png").write_bytes(pictures[number]["bytes"].as_py())
    save_model(Path("models", "classifier"), hidden=128, classifies=True, num_labels=2)


def run(*blocks: str) -> dict[str, Any]:
    """The names that some blocks define, one after the other."""
    names: dict[str, Any] = {}
    for block in (START, *blocks):
        exec(compile(block, "coming-from.md", "exec"), names)  # noqa: S102 - our own page
    return names


@pytest.mark.parametrize(("section", "at"), THEIRS)
def test_the_numbers_are_theirs(section: str, at: int) -> None:
    theirs, ours = SECTIONS[section][at], SECTIONS[section][-1]
    if "vllm" in theirs and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm brings its own")
    wanted = run(theirs)["theirs"]
    found = [None if other is None else own for own, other in zip(run(ours)["ours"], wanted, strict=True)]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert any(each is not None for each in found)


def test_a_score_of_sglang_is_a_softmax_over_the_logits_of_its_tokens() -> None:
    names = run(*SECTIONS["SGLang: `/v1/score`"])
    model, tokenizer = (kind.from_pretrained("models/judge") for kind in (AutoModelForCausalLM, AutoTokenizer))
    labels = [tokenizer.convert_tokens_to_ids(word) for word in ("ĠYes", "ĠNo")]
    for text, score in zip(names["texts"], names["ours"], strict=True):
        with torch.no_grad():
            logits = model(tokenizer(names["query"] + text, return_tensors="pt").input_ids).logits[0, -1, labels]
        assert score == pytest.approx(torch.softmax(logits.double(), dim=-1)[0].item(), abs=1e-5)


def test_a_rank_of_text_embeddings_inference_is_the_logistic_function_of_an_output() -> None:
    names = run(SECTIONS[PAIRS][-1])
    folder = "models/cross-encoder"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    for text, score in zip(names["texts"], names["ours"], strict=True):
        with torch.no_grad():
            (output,) = model(**tokenizer("a fox", text, return_tensors="pt")).logits[0].double()
        assert score == pytest.approx(torch.sigmoid(output).item(), abs=1e-5)


def test_every_section_is_run() -> None:
    assert [name for name, blocks in SECTIONS.items() if len(blocks) == 1] == SERVERS
    *told, other = (name for name, blocks in SECTIONS.items() if not blocks)
    assert told == [JEV_TABLE, TYPED_GGUF]
    assert other.startswith("OpenAI"), "it has a page, and tests, of its own"
