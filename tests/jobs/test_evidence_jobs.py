"""Jobs with --evidence. The oracle are files that are edited by hand and scored by a job of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.core.scorer import Granularity
from prefillcli.plan.trie import common_prefix
from tests.jobs import jobs
from tests.jobs.jobs import HISTORIES, Reference, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.test_exits import EXITS, deep_model, prompts  # noqa: F401 - a fixture

Edited = dict[str, dict[str, Any]]
"""A row's values without each of its sections."""


def parts(row: int) -> list[str]:
    """Paragraphs; every third row begins alike."""
    return [
        HISTORIES[row % 3],
        f"A {'fox ' * (row % 4)}saw {row * 7919 % 1000}.",
        f"No {'dog' if row % 2 else 'yes'}!",
    ]


def text_of(paragraphs: Sequence[str]) -> str:
    return "\n\n".join([*paragraphs, "Answer:"])


def edited_texts(rows: int) -> list[Edited]:
    found = []
    for row in range(rows):
        own = parts(row)
        rests = [text_of([*own[:at], *own[at + 1 :]]) for at in range(len(own))]
        found.append({f"paragraph {at + 1}": {"prompt": rest} for at, rest in enumerate(rests)})
    return found


def assert_evidence(
    rows: Sequence[dict[str, Any]],
    edited: Sequence[Edited],
    model: Path,
    *,
    whole: Sequence[float] | None = None,
    **flags: Any,
) -> None:
    """Each change is the row's own score (or that of `whole`) minus the one of the row edited by hand."""
    lines = [values for own in edited for values in own.values()]
    flags = {"model": model, "overwrite": True} | flags
    assert score(write_jsonl("edited.jsonl", lines), "edited.parquet", **flags)["exit_code"] == 0
    scores = iter([row["score"] for row in read_output("edited.parquet")])
    assert len(rows) == len(edited)
    for number, (row, own) in enumerate(zip(rows, edited, strict=True)):
        full = row["score"] if whole is None else whole[number]
        found = {each["section"]: each["change"] for each in row["evidence"]}
        assert found == pytest.approx({name: full - next(scores) for name in own}, abs=1e-5)
        sizes = [abs(each["change"]) for each in row["evidence"]]
        assert sizes == sorted(sizes, reverse=True)
    largest = [abs(row["evidence"][0]["change"]) for row in rows]
    assert max(largest) > 1e-3, "changes must be large enough to tell a wrong one"


@pytest.fixture
def source() -> Path:
    return write_parquet("in.parquet", prompt=[text_of(parts(row)) for row in range(12)])


def test_evidence_is_what_edited_rows_score(model: Path, source: Path) -> None:
    flags = {"temperature": 1.7, "labels": "No,Yes"}
    assert score(source, model=model, evidence=True, **flags)["exit_code"] == 0
    assert_evidence(read_output("out.parquet"), edited_texts(12), model, **flags)


def test_scores_are_those_of_a_job_without_evidence(model: Path, source: Path) -> None:
    assert score(source, model=model, evidence=True)["exit_code"] == 0
    assert score(source, "plain.parquet", model=model)["exit_code"] == 0
    for row, plain in zip(read_output("out.parquet"), read_output("plain.parquet"), strict=True):
        assert {name: row[name] for name in plain if name != "seconds"} | {"seconds": plain["seconds"]} == plain


def test_only_chosen_rows_are_weighed(model: Path, source: Path) -> None:
    assert score(source, "plain.parquet", model=model)["exit_code"] == 0
    middle = float(np.median([row["score"] for row in read_output("plain.parquet")]))
    flags = {"evidence": True, "rationale_when": f"score > {middle}", "rationale_limit": 4}
    assert score(source, model=model, **flags)["exit_code"] == 0
    rows, edited = read_output("out.parquet"), edited_texts(12)
    chosen = [number for number, row in enumerate(rows) if row["score"] > middle][:4]
    assert [number for number, row in enumerate(rows) if row["evidence"] is not None] == chosen
    assert_evidence([rows[number] for number in chosen], [edited[number] for number in chosen], model)


def test_variables_of_a_template(model: Path) -> None:
    template = "{{ title }}: {{ posts | join(', ') }}\n{% if note %}Note: {{ note }}\n{% endif %}Answer:"
    rows = [
        {"title": f"fox {row}", "posts": [HISTORIES[row % 3], "dog"], "note": "no" if row % 2 else None}
        for row in range(6)
    ]
    source = write_jsonl("in.jsonl", rows)
    assert score(source, model=model, template=template, evidence=True)["exit_code"] == 0
    empty = {"title": "", "posts": [], "note": ""}
    edited = [{name: row | {name: empty[name]} for name in row if row[name]} for row in rows]
    assert_evidence(read_output("out.parquet"), edited, model, template=template)


def test_turns_of_a_chat(chat_model: Path) -> None:
    chats = [
        [
            {"role": "user", "content": text_of(parts(row)[:2])},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": f"And {row}?"},
        ]
        for row in range(5)
    ]
    source = write_parquet("in.parquet", messages=chats)
    assert score(source, model=chat_model, evidence=True)["exit_code"] == 0
    names = ["turn 1 (user)", "turn 2 (assistant)", "turn 3 (user)"]
    edited = [{name: {"messages": chat[:at] + chat[at + 1 :]} for at, name in enumerate(names)} for chat in chats]
    assert_evidence(read_output("out.parquet"), edited, chat_model)


def test_prompts_without_sections_have_empty_evidence(model: Path) -> None:
    ids = [[5, 6, 7], [0, 300, 5, 6]]
    flags = {"model": model, "evidence": True}
    source = write_parquet("ids.parquet", prompt_token_ids=ids)
    assert score(source, labels="Yes= Yes,No= No", **flags)["exit_code"] == 0
    assert [row["evidence"] for row in read_output("out.parquet")] == [[], []]
    assert (
        score(write_parquet("lines.parquet", prompt=["Yes? Answer:"]), "lines.out.parquet", **flags)["exit_code"] == 0
    )
    assert read_output("lines.out.parquet")[0]["evidence"] == []


def test_error_rows_and_what_a_limit_of_length_cuts(model: Path) -> None:
    texts: list[str | None] = [text_of(parts(0)), None, text_of([parts(1)[0]] * 6), text_of(parts(2))]
    flags = {"max_length": 200, "on_long": "truncate-left"}
    source = write_parquet("in.parquet", prompt=texts)
    assert score(source, model=model, evidence=True, **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert (rows[1]["error"], rows[1]["evidence"]) == ("skipped_empty", None)
    assert rows[2]["truncated"]
    cut = {f"paragraph {at + 1}": {"prompt": text_of([parts(1)[0]] * 5)} for at in range(6)}
    edited = edited_texts(3)
    assert_evidence([rows[0], rows[2], rows[3]], [edited[0], cut, edited[2]], model, **flags)


def test_compressed_rows_are_weighed_in_full(model: Path, draft: Path, source: Path) -> None:
    flags = {"draft": draft, "keep": 0.4, "compress_above": 0, "keep_last": 8, "select_chunk": 4}
    assert score(source, model=model, evidence=True, **flags)["exit_code"] == 0
    assert score(source, "plain.parquet", model=model)["exit_code"] == 0
    rows, plain = read_output("out.parquet"), read_output("plain.parquet")
    assert {row["method"] for row in rows} == {"specprefill"}
    assert max(abs(row["score"] - full["score"]) for row, full in zip(rows, plain, strict=True)) > 1e-3
    assert_evidence(rows, edited_texts(12), model, whole=[row["score"] for row in plain])


def test_rows_that_left_early_are_weighed_through_all_layers(
    deep_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "granularity", Granularity(batch_rows=60, window_rows=120))
    source = write_jsonl("in.jsonl", [{"prompt": f"{text[:9]}\n{text}"} for text in prompts()])
    given = EXITS | {"evidence": True, "rationale_when": "exit_layer is not none", "rationale_limit": 10}
    assert score(source, model=deep_model, **given)["exit_code"] == 0
    rows = [row for row in read_output("out.parquet") if row["evidence"]]
    assert len(rows) == 10
    assert all(row["exit_layer"] is not None for row in rows)
    lines = [prompts()[row["row"]] for row in rows]
    full = {"labels": EXITS["labels"], "dtype": "float32"}
    whole = write_jsonl("whole.jsonl", [{"prompt": f"{text[:9]}\n{text}"} for text in lines])
    assert score(whole, "whole.parquet", model=deep_model, **full)["exit_code"] == 0
    edited: list[Edited] = [
        {"line 1": {"prompt": text}, "line 2": {"prompt": f"{text[:9]}\nAnswer:"}} for text in lines
    ]
    own = [row["score"] for row in read_output("whole.parquet")]
    assert_evidence(rows, edited, deep_model, whole=own, **full)


def test_what_prompts_share_without_their_sections_is_computed_once(
    model: Path, source: Path, reference: Reference
) -> None:
    assert score(source, model=model, evidence=True)["exit_code"] == 0
    tokens = read_report()["tokens"]
    wanted = sorted(reference.ids(each["prompt"]) for own in edited_texts(12) for each in own.values())
    shared = [common_prefix(np.array(a), np.array(b)) for a, b in pairwise(wanted)]
    unique = sum(map(len, wanted)) - sum(shared)
    assert unique <= tokens["follow_up"] <= 1.01 * unique
    assert unique < 0.8 * sum(map(len, wanted))


@pytest.mark.parametrize("flags", [{"workers": 2}, {"engine": "hf"}], ids=["workers", "hf"])
def test_the_same_evidence_from_other_processes_and_engines(model: Path, source: Path, flags: dict[str, Any]) -> None:
    assert score(source, model=model, evidence=True, **flags)["exit_code"] == 0
    assert_evidence(read_output("out.parquet"), edited_texts(12), model)
