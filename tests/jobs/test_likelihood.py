"""Jobs with `--target-column`: log-probabilities of texts behind prompts, and of whole documents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import Reference, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.test_shards import merge

LONG = "The quick brown fox saw a dog. " * 9
PROMPTS = ["The fox:", "The fox:", "The fox: \n", "A dog says", LONG, "The fox:", "The fox:\n  "]
TARGETS = [" Yes, it is.", " Yes, no", "No", ", é\n", " a fox", " Yes", "No"]


def forward(reference: Reference, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the token behind each, float64 [tokens, vocabulary], by one plain forward."""
    with torch.inference_mode():
        return reference._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)


def encoded_pair(reference: Reference, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness's `TemplateLM._encode_pair`, with the BOS that prompts get here; line breaks stay with the
    context."""
    spaces = len(context) - len(context.rstrip(" "))
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole = reference.ids(context + continuation)
    before = reference.ids(context)
    return before, whole[len(before) :]


def rolling_windows(tokens: list[int], prefix: int, most: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    """lm-evaluation-harness's `get_rolling_token_windows`, and `make_disjoint_window` of each."""
    pred_len = most - context + 1
    first = min(most, len(tokens))
    pairs = [([prefix, *tokens[: first - 1]], tokens[:first])]
    predicted = first
    while predicted < len(tokens):
        own = min(len(tokens) - predicted, pred_len)
        end = predicted + own
        pairs.append((tokens[end - most - 1 : end - 1], tokens[end - own : end]))
        predicted += own
    for before, behind in pairs:
        yield before[: len(before) - (len(behind) - 1)], behind


def likelihood(reference: Reference, before: list[int], behind: list[int]) -> tuple[list[float], bool]:
    found = forward(reference, [*before, *behind])[len(before) - 1 : -1]
    values = [float(found[at, token]) for at, token in enumerate(behind)]
    return values, found.argmax(-1).tolist() == behind


def assert_row(row: dict[str, Any], values: Sequence[float], target: str, *, greedy: bool | None = None) -> None:
    assert row["error"] is None, row["error_detail"]
    assert row["logprob"] == row["score"] == pytest.approx(sum(values), rel=1e-6, abs=1e-5)
    assert row["target_tokens"] == len(values)
    assert row["target_bytes"] == len(target.encode())
    assert row["target_words"] == len(re.split(r"\s+", target))
    assert row["bits_per_byte"] == pytest.approx(-row["logprob"] / math.log(2) / len(target.encode()), rel=1e-12)
    assert greedy is None or row["greedy"] is greedy
    if "token_logprobs" in row:
        np.testing.assert_allclose(row["token_logprobs"], values, atol=1e-5)


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_targets_have_their_log_probabilities(engine: str, model: Path, reference: Reference) -> None:
    write_parquet("in.parquet", prompt=PROMPTS, target=TARGETS)
    found = score("in.parquet", model=model, target_column="target", token_logprobs=True, engine=engine)
    assert found["exit_code"] == 0, found
    for row, prompt, target in zip(read_output("out.parquet"), PROMPTS, TARGETS, strict=True):
        values, greedy = likelihood(reference, *encoded_pair(reference, prompt, target))
        assert_row(row, values, target, greedy=greedy)
        assert not {"prediction", "label_mass", "logprob_target"} & row.keys()


def test_a_target_that_greedy_decoding_writes_is_known(model: Path, reference: Reference) -> None:
    ids = reference.ids("The fox:")
    for _ in range(6):
        ids.append(int(forward(reference, ids)[-1].argmax()))
    target = reference.tokenizer.decode(ids[4:])
    before, behind = encoded_pair(reference, "The fox:", target)
    _, greedy = likelihood(reference, before, behind)
    write_parquet("in.parquet", prompt=["The fox:"] * 2, target=[target, " Yes"])
    score("in.parquet", model=model, target_column="target")
    assert [row["greedy"] for row in read_output("out.parquet")] == [greedy, False]


def test_targets_share_the_prompt_before_them(model: Path) -> None:
    targets = [f" Yes {number}" for number in range(10)]
    write_parquet("in.parquet", prompt=[LONG] * 10, target=targets)
    score("in.parquet", model=model, target_column="target")
    rows = read_output("out.parquet")
    (length,) = {row["prompt_tokens"] for row in rows}
    behind = sum(row["target_tokens"] for row in rows)
    assert length <= sum(row["computed_tokens"] for row in rows) <= length + behind


def test_control_tokens_in_targets_are_text(model: Path, reference: Reference) -> None:
    write_parquet("in.parquet", prompt=["The fox:", "The fox: </"], target=["</s>", "s>"])
    score("in.parquet", model=model, target_column="target")
    assert [row["target_tokens"] for row in read_output("out.parquet")] == [4, 2]
    score("in.parquet", "special.parquet", model=model, target_column="target", literal=False)
    assert read_output("special.parquet")[0]["target_tokens"] == 1


def test_rows_without_a_target_are_error_rows(model: Path) -> None:
    rows = [
        {"prompt": "A fox", "target": " Yes"},
        {"prompt": "A fox", "target": None},
        {"prompt": "A fox", "target": ""},
        {"prompt": "A fox", "target": ["Yes"]},
        {"prompt": "A fox", "target": " No" * 2100},
        {"prompt": "A fox", "target": "\ud800"},
        {"prompt": ["no"], "target": " Yes"},
    ]
    write_jsonl("in.jsonl", rows)
    assert score("in.jsonl", "out.jsonl", model=model, target_column="target")["exit_code"] == 3
    codes = [row["error"] for row in read_output("out.jsonl")]
    invalid = "invalid_target"
    assert codes == [None, invalid, invalid, invalid, "prompt_too_long", "invalid_utf8", "wrong_type"], codes
    assert verify_job("out.jsonl", quiet=True)["exit_code"] == 0


@pytest.mark.parametrize(("stride", "engine"), [(None, "torch"), (1, "torch"), (5, "torch"), (5, "hf")])
def test_documents_are_read_in_windows(stride: int | None, engine: str, model: Path, reference: Reference) -> None:
    most = 12
    texts = ["A", "The fox", LONG[:60], LONG[:90], "é" * 12, "Yes no " * 3]
    write_parquet("in.parquet", text=texts)
    options = {"max_length": str(most), "engine": engine} | ({} if stride is None else {"stride": str(stride)})
    found = score("in.parquet", model=model, target_column="text", token_logprobs=True, **options)
    assert found["exit_code"] == 0, found
    total, tokens = 0.0, 0
    for row, text in zip(read_output("out.parquet"), texts, strict=True):
        ids = reference.ids(text, special=False)
        context = 1 if stride is None else most - stride + 1
        windows = list(rolling_windows(ids, reference.tokenizer.bos_token_id, most, context))
        parts = [likelihood(reference, *window) for window in windows]
        assert_row(row, [each for own, _ in parts for each in own], text, greedy=all(greedy for _, greedy in parts))
        total, tokens = total + row["logprob"], tokens + len(ids)
    use = read_report()["likelihood"]
    assert use["target_tokens"] == tokens
    assert use["perplexity"] == pytest.approx(math.exp(-total / tokens)) == found["perplexity"]
    words = sum(len(re.split(r"\s+", text)) for text in texts)  # lm-evaluation-harness's `count_words`
    assert use["target_words"] == words
    assert use["word_perplexity"] == pytest.approx(math.exp(-total / words)) == found["word_perplexity"]
    size = sum(len(text.encode()) for text in texts)
    assert use["byte_perplexity"] == pytest.approx(math.exp(-total / size))
    assert use["bits_per_byte"] == pytest.approx(-total / math.log(2) / size)
    assert "Likelihood" in Path("out.run.html").read_text()


def test_rows_with_an_empty_prompt_have_whole_documents(model: Path, reference: Reference) -> None:
    prompts = ["The fox:", "", None, " "]
    write_parquet("in.parquet", prompt=prompts, target=[" Yes", LONG, "No", "é"])
    score("in.parquet", model=model, target_column="target", max_length="64")
    rows = read_output("out.parquet")
    assert_row(rows[0], likelihood(reference, *encoded_pair(reference, "The fox:", " Yes"))[0], " Yes")
    for row, text in zip(rows[1:], [LONG, "No", "é"], strict=True):
        windows = rolling_windows(reference.ids(text, special=False), reference.tokenizer.bos_token_id, 64, 1)
        values = [each for window in windows for each in likelihood(reference, *window)[0]]
        assert_row(row, values, text)


def test_the_next_night_takes_documents_over_whose_windows_are_all_the_same(model: Path) -> None:
    options = {"model": model, "target_column": "text", "max_length": "16", "id_column": "id"}
    write_parquet("in.parquet", id=["a", "b", "c"], text=[LONG, LONG + "A", "A"])
    score("in.parquet", "first.parquet", **options)
    write_parquet("in.parquet", id=["a", "b", "c"], text=[LONG, LONG + "B", "A"])
    found = score("in.parquet", since="first.parquet", **options)
    assert found["exit_code"] == 0, found
    assert read_report()["since"]["rows"] == 2
    first, rows = read_output("first.parquet"), read_output("out.parquet")
    assert [own["logprob"] == other["logprob"] for own, other in zip(rows, first, strict=True)] == [True, False, True]


def test_a_dry_run_counts_the_tokens_of_targets(model: Path) -> None:
    write_parquet("in.parquet", prompt=[LONG, LONG, ""], target=[" Yes", " No no", LONG])
    options = {"model": model, "target_column": "target", "max_length": "64", "on_long": "truncate-left"}
    planned = score("in.parquet", dry_run=True, **options)
    score("in.parquet", **options)
    assert planned["computed_tokens"] == sum(row["computed_tokens"] for row in read_output("out.parquet"))


def test_shards_report_the_same(model: Path) -> None:
    write_parquet("in.parquet", text=[LONG[: 20 + 7 * at] for at in range(12)])
    options = {"model": model, "target_column": "text", "max_length": "16", "deterministic": True}
    score("in.parquet", "whole.parquet", **options)
    wanted = read_report("whole.run.json")["likelihood"]
    for number in (1, 2):
        assert score("in.parquet", "merged.parquet", shard=f"{number}/2", **options)["exit_code"] == 0
    assert merge("merged.parquet")["exit_code"] == 0
    assert read_report("merged.run.json")["likelihood"] == pytest.approx(wanted)
    for own, other in zip(read_output("merged.parquet"), read_output("whole.parquet"), strict=True):
        assert own["logprob"] == other["logprob"]
