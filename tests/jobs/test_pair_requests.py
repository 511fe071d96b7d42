"""Batch files with score and rerank requests. The oracle is transformers' own eager forward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prefillcli.engines.encoders import EncoderEngine
from prefillcli.models.files import LOGIT_SCORE
from tests.jobs.jobs import read_output, score, write_jsonl
from tests.jobs.models import save_model
from tests.jobs.test_batch_files import CHAT, HELLO, answered
from tests.unit.engines.encoder_models import save_encoder

TOLERANCE = 1e-5
QUERY, DOCUMENTS = "who saw the fox?", ["The dog saw it.", "Nobody, it says.", "A fox is quick."]
TEMPLATE = (
    "{% for each in messages if each.role != 'system' %}<{{ each.role }}> {{ each.content }}\n{% endfor %}Answer:"
)


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fox"} | body}


LINES = [
    line("one", "/v1/score", text_1=QUERY, text_2=DOCUMENTS, user="me"),
    line("each", "/score", queries=[QUERY, "who?", "what?"], documents=DOCUMENTS, max_tokens_per_doc=0),
    line("single", "/v1/score", queries=[QUERY], items=DOCUMENTS[1]),
    line("ranked", "/v1/rerank", query=QUERY, documents=DOCUMENTS),
    line("top", "/v2/rerank", query=QUERY, documents=[*DOCUMENTS, DOCUMENTS[0]], top_n=2),
]


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder."""
    return save_encoder(tmp_path_factory.mktemp("models") / "cross", num_labels=1)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose files say which two tokens it compares, as sentence-transformers saves them."""
    folder = save_model(tmp_path_factory.mktemp("models") / "reranker", chat_template=TEMPLATE)
    (folder / "modules.json").write_text(json.dumps([{"path": "1_LogitScore", "type": LOGIT_SCORE}]))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 9, "false_token_id": 4}))
    return folder


def own_scores(model: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """The score of each pair by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not (model / "modules.json").exists():
        loaded = AutoModelForSequenceClassification.from_pretrained(model, attn_implementation="eager").eval()
        with torch.inference_mode():
            return [float(torch.sigmoid(loaded(**tokenizer(*pair, return_tensors="pt")).logits)) for pair in pairs]
    causal = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    found = []
    for query, document in pairs:
        text = f"<query> {query}\n<document> {document}\nAnswer:"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            logits = causal(**ids).logits[0, -1].double()
        found.append(float(torch.softmax(logits[[9, 4]], dim=0)[0]))
    return found


@pytest.mark.parametrize("kind", ["cross", "reranker"])
def test_pairs_have_the_scores_of_each_alone(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    one, each, single, ranked, top = (row["response"]["body"] for row in answered(LINES, model))
    wanted = own_scores(model, [(QUERY, document) for document in DOCUMENTS])
    assert max(wanted) - min(wanted) > 1e-3
    for body, scores in (
        (one, wanted),
        (each, own_scores(model, list(zip([QUERY, "who?", "what?"], DOCUMENTS, strict=True)))),
        (single, wanted[1:2]),
    ):
        assert (body["object"], body["model"]) == ("list", "fox")
        assert [(own["index"], own["object"]) for own in body["data"]] == [(at, "score") for at in range(len(scores))]
        assert [own["score"] for own in body["data"]] == pytest.approx(scores, abs=TOLERANCE)
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 5 * len(scores)
    order = sorted(range(3), key=lambda at: -wanted[at])
    assert [own["index"] for own in ranked["results"]] == order
    for own in ranked["results"]:
        assert own["document"]["text"] == DOCUMENTS[own["index"]]
        assert own["relevance_score"] == pytest.approx(wanted[own["index"]], abs=TOLERANCE)
    first, second = top["results"]
    again = [*wanted, wanted[0]]
    best = sorted(again, reverse=True)[:2]
    assert [first["relevance_score"], second["relevance_score"]] == pytest.approx(best, abs=TOLERANCE)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (line("", CHAT, messages=HELLO), "the model scores pairs of texts"),
    (line("", "/v1/score", text_1=QUERY), "the two texts are missing: text_1 and text_2 or queries"),
    (line("", "/v1/score", text_1=QUERY, text_2=[]), "text_2 must be a text, or a list of texts"),
    (line("", "/v1/score", text_1=QUERY, text_2=["a", 5]), "text_2 must be a text"),
    (line("", "/v1/score", text_1=["a", "b"], text_2=["c"]), "2 text_1 and 1 text_2"),
    (line("", "/v1/score", text_1=QUERY, text_2="a", queries="b"), "queries: not supported here"),
    (line("", "/v1/score", text_1=QUERY, text_2="a", top_n=1), "top_n: not supported here"),
    (line("", "/v1/score", text_1=QUERY, text_2="a", truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    (line("", "/v1/rerank", query=[QUERY], documents=["a"]), "query must be a text"),
    (line("", "/v1/rerank", query=QUERY), "documents must be a text"),
    (line("", "/v1/rerank", query=QUERY, documents=["a"], top_n=-1), "top_n -1"),
    (line("", "/v1/rerank", query=QUERY, documents=["a"], use_activation=False), "use_activation false"),
    (line("", "/v1/rerank", query=QUERY, documents=["a"], model="bear"), 'model "bear"'),
]


@pytest.mark.parametrize("kind", ["cross", "reranker"])
def test_what_a_body_asks_in_vain_is_an_error_of_its_line(kind: str, request: pytest.FixtureRequest) -> None:
    lines = [each | {"custom_id": f"r{at}"} for at, (each, _) in enumerate(REFUSED)]
    empty = line("empty", "/v1/rerank", query=QUERY, documents=["a", " "])
    *refused, blank, right = answered([*lines, empty, LINES[0]], request.getfixturevalue(kind))
    for row, (_, said) in zip(refused, REFUSED, strict=True):
        assert (row["response"], row["error"]["code"]) == (None, "invalid_request"), row
        assert said in row["error"]["message"]
    assert blank["error"]["code"] == "skipped_empty"
    assert blank["error"]["message"].startswith("pair 2: ")
    assert len(right["response"]["body"]["data"]) == 3


def test_a_value_that_is_no_number_is_an_error_of_its_line(cross: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, long = EncoderEngine.outputs, len(AutoTokenizer.from_pretrained(cross)(QUERY, "x " * 20)["input_ids"])

    def wrong(self: EncoderEngine, texts: Sequence[Any]) -> torch.Tensor:
        found = outputs(self, texts).clone()
        found[[len(text) >= long for text in texts]] = torch.nan
        return found

    monkeypatch.setattr(EncoderEngine, "outputs", wrong)
    ranked, single = answered([line("r", "/v1/rerank", query=QUERY, documents=["a", "x " * 20]), LINES[2]], cross)
    assert (ranked["response"], ranked["error"]["code"]) == (None, "nonfinite_score")
    assert single["error"] is None


def test_models_that_score_no_pairs_say_so(cross: Path, model: Path, tmp_path: Path) -> None:
    classifier = save_model(tmp_path / "classifier", classifies=True, num_labels=2)
    lines = write_jsonl("batch.jsonl", LINES[:1])
    flags = {"format": "openai", "served_model_name": "fox", "max_error_rate": 1}
    assert score(lines, "out.jsonl", model=model, **flags)["exit_code"] == 1  # no row was scored
    (row,) = read_output("out.jsonl")
    assert "a model whose files show that it reads pairs" in row["error"]["message"]
    with_format = score("batch.jsonl", model=classifier, format="openai", output="other.jsonl")
    assert "do not show how a pair of texts becomes its prompt" in with_format["error"]
    assert "give --format openai" in score("batch.jsonl", model=cross)["error"]
