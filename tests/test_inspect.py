"""`prefill inspect`: it shows what `prefill score` does with a row, and shows the prompt as it is."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from prefillcli.cli import app
from prefillcli.core.request import Request
from prefillcli.core.windows import WindowSize
from prefillcli.errors import Interrupted
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.encoding import Encoder, token_texts
from prefillcli.reading.compress.compressor import Neighbour, why_kept
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import Prompt
from prefillcli.scoring.score import score_job
from prefillcli.tools import inspect
from prefillcli.tools.inspection import CommonPrefix, Inspection, shared_prefixes

SAMPLES = Path(__file__).parent.parent / "samples"
POSTS, CREDITS = SAMPLES / "post_recommendation.parquet", SAMPLES / "credit_verification.jsonl"
MODEL = ("-m", SAMPLES / "models" / "target")
PAIR = (*MODEL, "--draft", SAMPLES / "models" / "draft")
COMPRESS = ("--keep", "0.2", "--set", "query_window=8", "--set", "compress_above=0")
TOLERANCE = 1e-5
TRICKY = "a\r\nb\n\n 👩\u200d💻👍🏽 e\u0301o\u0308 日本語\u3000ü\tZ\u0336 \ufffd\x00 <s> naïve  x"

encoder = Encoder(AutoTokenizer.from_pretrained(SAMPLES / "models" / "target"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, without settings from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("PREFILL_MODEL", "PREFILL_LABELS", "PREFILL_QUIET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[Inspection]:
    """What was shown, as data."""
    shown: list[Inspection] = []
    show = inspect.print_inspection
    monkeypatch.setattr(inspect, "print_inspection", lambda what, *a, **k: (shown.append(what), show(what, *a, **k)))
    return shown


def prefill(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def line_of(done: Result) -> dict[str, Any]:
    """The last line on stdout, which is the only one."""
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def scored(source: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """What `prefill score` writes, with the shipped pair."""
    given = {"inputs": [str(source)], "output": str(output), "quiet": True, "max_error_rate": 1.0, "overwrite": True}
    models = {"model": str(SAMPLES / "models" / "target"), "draft": str(SAMPLES / "models" / "draft")}
    assert score_job(load_settings(ScoreSettings, given | models | options, environment={}))["exit_code"] == 0
    return pq.read_table(output).to_pylist()


@pytest.fixture(scope="module")
def posts_scored(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("scored") / "posts.parquet"
    return scored(POSTS, output, keep=0.2, query_window=8, compress_above=0, limit=40)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", [0, 27, 39])
def test_row_is_read_as_score_reads_it(
    row: int, posts_scored: list[dict[str, Any]], inspected: list[Inspection]
) -> None:
    line = line_of(prefill("inspect", POSTS, *PAIR, *COMPRESS, "--row", row, "--limit", 40))
    wanted, (shown,) = posts_scored[row], inspected

    assert (line["status"], line["exit_code"], line["row"], line["id"], line["html"]) == (
        "complete",
        0,
        row,
        None,
        None,
    )
    assert (line["method"], line["prompt_tokens"]) == ("specprefill", wanted["prompt_tokens"])
    assert line["kept_tokens"] == wanted["kept_tokens"] == sum(token.kept for token in shown.tokens)
    assert line["score_compressed"] == pytest.approx(wanted["score"], abs=TOLERANCE)
    assert shown.compressed is not None
    assert shown.compressed.label_mass == pytest.approx(wanted["label_mass"], abs=TOLERANCE)
    assert shown.compressed.prediction == wanted["prediction"]
    assert shown.compressed.logprobs["Yes"] == pytest.approx(wanted["logprob_Yes"], abs=1e-4)
    for token in shown.tokens:
        assert token.kept == (token.why != "dropped")
        assert token.importance is not None
        assert (token.why == "first") == (token.position < 4)
        assert (token.why == "last") == (token.position >= len(shown.tokens) - 64)


def test_row_in_full_has_the_score_of_a_job_without_draft(tmp_path: Path, inspected: list[Inspection]) -> None:
    line = line_of(prefill("inspect", POSTS, *MODEL, "--row", 3, "--limit", 4))
    wanted = scored(POSTS, tmp_path / "full.parquet", draft=None, limit=4)[3]

    assert (line["method"], line["score_compressed"]) == ("full", None)
    assert line["score"] == pytest.approx(wanted["score"], abs=TOLERANCE)
    assert line["kept_tokens"] == line["prompt_tokens"] == wanted["prompt_tokens"]
    assert {token.why for token in inspected[0].tokens} == {"full"}
    assert inspected[0].tokens[0].importance is None
    assert inspected[0].draft is None


def test_without_a_row_the_first_is_shown_with_what_the_model_says_next(inspected: list[Inspection]) -> None:
    done = prefill("inspect", POSTS, *MODEL, "--dtype", "float32", "--limit", 3)
    assert (line_of(done)["row"], line_of(done)["exit_code"]) == (0, 0)
    (shown,) = inspected
    model = AutoModelForCausalLM.from_pretrained(
        SAMPLES / "models" / "target", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([[token.id for token in shown.tokens]])).logits[0, -1].double()
    wanted = logits.softmax(-1).topk(5)
    assert [each.id for each in shown.next] == wanted.indices.tolist()
    assert [each.share for each in shown.next] == pytest.approx(wanted.values.tolist(), rel=1e-3)
    said = done.stderr[done.stderr.index("The likeliest next tokens") :]
    assert "` Answer` `:`" in said.splitlines()[1]
    for each, line in zip(shown.next, said.splitlines()[3:8], strict=True):
        assert line.startswith(f"`{encoder.tokenizer.decode([each.id])}`")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", [3, 31])
def test_margins_are_what_transformers_reads_after_each_layer(row: int, inspected: list[Inspection]) -> None:
    line_of(prefill("inspect", POSTS, *MODEL, "--dtype", "float32", "--row", row, "--limit", 40))
    (shown,) = inspected
    model = AutoModelForCausalLM.from_pretrained(
        SAMPLES / "models" / "target", dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")
    yes, no = (tokenizer.encode(f" {label}", add_special_tokens=False)[-1] for label in ("Yes", "No"))
    with torch.inference_mode():
        states = model(torch.tensor([[token.id for token in shown.tokens]]), output_hidden_states=True).hidden_states
        normed = [model.model.norm(state[0, -1]) for state in states[:-1]] + [states[-1][0, -1]]  # the last one is
        logits = [model.lm_head(state)[[yes, no]] for state in normed]
    assert shown.margins is not None
    assert shown.margins.what == "Yes over No"
    wanted = [float(own[0] - own[1]) for own in logits]
    assert [each.margin for each in shown.margins.layers] == pytest.approx(wanted, abs=1e-4)
    assert len(wanted) == model.config.num_hidden_layers + 1


def test_margins_of_several_labels_are_of_the_answer(inspected: list[Inspection], tmp_path: Path) -> None:
    line_of(prefill("inspect", POSTS, *MODEL, "--row", 3, "--labels", "Yes,No,read", "--html", tmp_path / "p.html"))
    (shown,) = inspected
    assert shown.full is not None
    assert shown.margins is not None
    assert shown.margins.what == f"{shown.full.prediction} over the best other label"
    assert shown.margins.layers[-1].margin > 0
    assert "Layer by layer" in (tmp_path / "p.html").read_text()


WISHES = [
    (None, None), (0.5, None), (None, False), (1.0, None), (None, True), (0.1, True),
    (None, None), (None, None), (0.3, None), (None, None), (None, False), (None, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of some hundred tokens that share much or little, long and short ones, with wishes of their own."""
    prompts = pq.read_table(POSTS)["prompt"].to_pylist()[::20]
    texts = []
    for number in range(len(WISHES)):
        lines = prompts[number // 4].splitlines()[: 12 + 5 * (number % 4)]
        texts.append("\n".join([*lines, f"Would they read about {number}? Answer:"]))
    texts[6] = texts[4][: len(texts[4]) // 2] + " Answer:"
    texts[7] = "Below are a reader. Answer:"
    path = tmp_path_factory.mktemp("mixed") / "mixed.parquet"
    keeps, specprefill = zip(*WISHES, strict=True)
    pq.write_table(pa.table({"prompt": texts, "keep": keeps, "specprefill": specprefill}), path)
    return path


@pytest.mark.parametrize(
    ("row", "flags", "why"),
    [
        (2, COMPRESS, "its column specprefill is false"),
        (3, COMPRESS, "its column keep is 1"),
        (0, ("--set", "keep_last=8"), "--keep is 1"),
        (7, COMPRESS, "of its 8 tokens the first 4 and last 64 stay anyway"),
        (0, ("--keep", "0.2", "--set", "compress_above=8192"), "tokens are not more than compress_above 8,192"),
        (0, ("--keep", "0.9"), "would be read at 0."),
        (0, (*COMPRESS[:4], "--set", "compress_above=100"), "other rows are read in full and compute its first "),
        (0, (*COMPRESS, "--set", "select_chunk=4096", "--set", "compress_per_row=true"), "are all tokens of it"),
    ],
)
def test_reason_of_a_row_in_full(mixed: Path, row: int, flags: Sequence[object], why: str) -> None:
    done = prefill("inspect", mixed, *PAIR, *flags, "--row", row, "-q")
    assert done.exit_code == 0
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"prefill: warning: row {row} is read in full: ")
    assert why in said


def test_fallback_is_told(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.reading.compress.draft import Draft
    from prefillcli.reading.compress.selection import TOO_LONG

    monkeypatch.setattr(Draft, "_refusal", lambda self, tokens: TOO_LONG)
    done = prefill("inspect", mixed, *PAIR, *COMPRESS, "--row", 0)
    assert line_of(done)["method"] == "fallback:draft_length"
    assert line_of(done)["score_compressed"] is None
    assert "read in full: fallback:draft_length: the prompt is longer than" in done.stderr


def test_tokens_kept_for_others_say_so() -> None:
    prompt = Prompt(0, np.arange(100, dtype=np.int32), LabelSet(()))
    kept = np.r_[0:2, 10:20, 30:38, 60:70, 95:100]
    question = Request(prompt, kept, "specprefill")
    # one row in full shares 14 tokens, one of 45 tokens shares 40: its own end begins at its token 35
    others = [Neighbour(500, 10, True, 14), Neighbour(45, 10, False, 40)]
    why = why_kept(question, 10, others, Compression(keep_first=2))

    assert [at for at in range(100) if why[at] != "dropped"] == kept.tolist()
    assert [at for at in range(100) if why[at] == "first"] == [0, 1]
    assert [at for at in range(100) if why[at] == "shared"] == [10, 11, 12, 13, 35, 36, 37]
    assert [at for at in range(100) if why[at] == "chosen"] == [*range(14, 20), *range(30, 35), *range(60, 70)]
    assert [at for at in range(100) if why[at] == "last"] == [*range(95, 100)]


def test_shared_prefixes_are_where_rows_part() -> None:
    assert shared_prefixes([3, 15, 16, 40, 40, 100]) == [
        CommonPrefix(16, 5),
        CommonPrefix(40, 4),
        CommonPrefix(100, 2),
    ]
    assert shared_prefixes([2]) == []
    many = shared_prefixes([*range(100, 120), 101, 105])
    assert [prefix.tokens for prefix in many] == [101, 105, *range(112, 120)]
    assert many[0].rows == 1 + 21


def test_posts_of_a_reader_share_the_history(inspected: list[Inspection]) -> None:
    prefill("inspect", POSTS, *MODEL, "--row", 17, "--limit", 60)
    prompts = [encoder.encode([text], special=True)[0] for text in pq.read_table(POSTS)["prompt"].to_pylist()[:60]]
    assert inspected[0].shared
    for prefix in inspected[0].shared:
        begin = prompts[17][: prefix.tokens]
        assert sum(np.array_equal(begin, tokens[: prefix.tokens]) for tokens in prompts) == prefix.rows


def test_row_by_its_id() -> None:
    done = prefill("inspect", POSTS, *MODEL, "--row", "user-02/post-07", "--id-column", "id", "--limit", 60)
    line = line_of(done)
    assert (line["row"], line["id"]) == (47, "user-02/post-07")
    assert "user-02/post-07 (row 47 of the input)" in done.stderr
    assert line["score"] == line_of(prefill("inspect", POSTS, *MODEL, "--row", 47, "--limit", 60))["score"]


def test_json_lines(tmp_path: Path) -> None:
    line = line_of(prefill("inspect", CREDITS, *MODEL, "--row", "applicant-17", "--id-column", "id", "--limit", 18))
    wanted = scored(CREDITS, tmp_path / "out.parquet", draft=None, limit=18)[17]
    assert (line["row"], line["id"], line["prompt_tokens"]) == (17, "applicant-17", wanted["prompt_tokens"])
    assert line["score"] == pytest.approx(wanted["score"], abs=TOLERANCE)
    rows = [
        {"key": 12, "prompt": "a"},
        {"key": 'say "x"', "prompt": "b"},
        {"key": None, "prompt": "c"},
        {"prompt": "d"},
    ]
    Path("ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [
        line_of(prefill("inspect", "ids.jsonl", *MODEL, "--id-column", "key", "--row", x)) for x in ("12", 'say "x"')
    ]
    assert [(line["row"], line["id"]) for line in found] == [(0, "12"), (1, 'say "x"')]


def test_row_in_a_later_window_is_found_without_tokenising_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.core import windows as search
    from prefillcli.prompts.builder import PromptBuilder

    number = 4_500
    pq.write_table(pa.table({"prompt": [f"text {at} Answer:" for at in range(6_000)]}), "many.parquet")
    built: list[int] = []
    build, windows = PromptBuilder.build, search.windows
    monkeypatch.setattr(PromptBuilder, "build", lambda *a: (built.append(a[1].first_row), build(*a))[1])
    monkeypatch.setattr(search, "windows", lambda *a, **k: windows(*a, **k, size=WindowSize(2_000)))
    line = line_of(prefill("inspect", "many.parquet", *MODEL, "--row", number))
    assert (line["row"], line["exit_code"]) == (number, 0)
    assert len(built) == 1
    assert built[0] <= number < built[0] + 2_048


def failure(*arguments: object) -> tuple[int, str]:
    done = prefill("inspect", *arguments)
    line = line_of(done)
    assert (line["status"], line["exit_code"]) == ("failed", done.exit_code)
    assert line["score"] is None
    assert line["error"] in done.stderr
    assert "Traceback" not in done.stderr
    return done.exit_code, line["error"]


def test_row_that_is_not_there() -> None:
    assert failure(POSTS, *MODEL, "--row", 240) == (2, "--row 240: no such row in the 240 rows read, 0 to 239")
    code, error = failure(POSTS, *MODEL, "--row", "user-99", "--id-column", "id")
    assert (code, error) == (2, "--row user-99: no such row in column 'id' of the 240 rows read")
    code, error = failure(POSTS, *MODEL, "--row", 240, "--id-column", "id")
    assert code == 2
    assert error == "--row 240: no such row in the 240 rows read, 0 to 239, and no such id in column 'id'"
    code, error = failure(CREDITS, *MODEL, "--row", 5, "--limit", 3)
    assert (code, error) == (2, "--row 5: no such row in the 3 rows read, 0 to 2")
    code, error = failure(POSTS, *MODEL, "--row", "user-02/post-07")
    assert code == 2
    assert "--id-column" in error


def test_a_row_is_found_by_its_id_or_else_by_its_number() -> None:
    ids = ["1", "0", "b", "7"]
    pq.write_table(pa.table({"id": ids, "prompt": ["fox", "dog", "cat", "yes"]}), "in.parquet")
    found = {}
    for row in ("1", "0", "b", "7", "2", "3"):
        line = line_of(prefill("inspect", "in.parquet", *MODEL, "--row", row, "--id-column", "id"))
        found[row] = line["row"], line["id"]
    assert found == {"1": (0, "1"), "0": (1, "0"), "b": (2, "b"), "7": (3, "7"), "2": (2, "b"), "3": (3, "7")}


def test_error_row_is_told_with_its_code() -> None:
    pq.write_table(pa.table({"id": ["a", "\x1b[31m", "a"], "prompt": ["fox", None, "dog"]}), "in.parquet")
    assert failure("in.parquet", *MODEL, "--row", 1) == (1, "row 1 has no score: skipped_empty: the prompt is null")
    code, error = failure("in.parquet", *MODEL, "--row", "\x1b[31m", "--id-column", "id")
    assert (code, error) == (1, "row 1 (␛[31m) has no score: skipped_empty: the prompt is null")
    assert line_of(prefill("inspect", "in.parquet", *MODEL, "--row", "a", "--id-column", "id"))["row"] == 0


def test_prompt_that_fits_compressed_only(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.models import law as memory

    limits = memory.pack_limits

    def small(*args: Any, **named: Any) -> Any:
        found = limits(*args, **named)
        return type(found)(tokens=160, max_tokens=160, held_tokens=0, held_cost=0.0)

    monkeypatch.setattr(memory, "pack_limits", small)
    done = prefill("inspect", mixed, *PAIR, *COMPRESS, "--set", "keep_last=16", "--row", 4)
    line = line_of(done)
    assert (line["status"], line["score"], line["method"]) == ("complete", None, "specprefill")
    assert 0 < line["score_compressed"] < 1
    assert "the memory budget holds 160 tokens: the prompt is not read in full" in done.stderr
    code, error = failure(mixed, *MODEL, "--row", 4)
    assert code == 1
    assert error.startswith("row 4 has no score: exceeds_memory: ")


def test_signal_ends_it_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **named: Any) -> None:
        raise Interrupted(15)

    monkeypatch.setattr(inspect, "load_walk", stop)
    done = prefill("inspect", POSTS, *MODEL, "--row", 5)
    line = line_of(done)
    assert (done.exit_code, line["status"], line["row"]) == (143, "interrupted", 5)
    assert done.stderr == "prefill: stopped by SIGTERM\n"


def test_template(inspected: list[Inspection]) -> None:
    template = "{{ post }} on {{ topic }}? Answer:"
    assert prefill("inspect", POSTS, *MODEL, "--template", template, "--row", 30).exit_code == 0
    record = pq.read_table(POSTS).slice(30, 1).to_pylist()[0]
    text = "".join(token.text for token in inspected[0].tokens)
    assert text == f"<s>{record['post']} on {record['topic']}? Answer:"
    assert inspected[0].settings["template"] == template


def test_page_and_terminal(inspected: list[Inspection]) -> None:
    done = prefill("inspect", POSTS, *PAIR, *COMPRESS, "--row", 2, "--limit", 5, "--html", "row.html")
    assert line_of(done)["html"] == "row.html"
    page = Path("row.html").read_text()
    for part in ("specprefill", "Most important stretches", "select_chunk", "row 2"):
        assert part in page
    for part in ("Most important stretches", "always kept: end 64", "difference", "⟦… "):
        assert part in done.stderr
    quiet = prefill("inspect", POSTS, *PAIR, *COMPRESS, "--row", 2, "--limit", 5, "-q")
    assert quiet.stderr == ""
    assert line_of(quiet)["score"] == line_of(done)["score"]


def test_tokens_make_up_the_prompt(inspected: list[Inspection]) -> None:
    pq.write_table(pa.table({"prompt": [TRICKY]}), "in.parquet")
    assert prefill("inspect", "in.parquet", *MODEL, "--row", 0).exit_code == 0
    assert "".join(token.text for token in inspected[0].tokens) == "<s>" + TRICKY
    literal = Tokenizer.from_file(str(SAMPLES / "models" / "target" / "tokenizer.json"))
    literal.encode_special_tokens = True  # text of the data is text
    assert [token.id for token in inspected[0].tokens] == literal.encode(TRICKY).ids


def test_texts_of_tokens_are_what_the_tokens_say() -> None:
    ids = encoder.encode(["Would Sofia read 12?\n\n"], special=True)[0].tolist()
    assert token_texts(encoder.decode, ids) == [encoder.decode([number]) for number in ids]
    ids = encoder.encode(["a👍b"], special=False)[0].tolist()
    texts = token_texts(encoder.decode, ids)
    assert [text for text in texts if text] == ["a", "👍", "b"]
    assert token_texts(encoder.decode, []) == []


def sentencepiece() -> Callable[[Sequence[int]], str]:
    """A decoder as in Llama 2: words begin with ▁, bytes stand for rare characters, a text loses its first space."""
    pieces = ["<unk>", "▁", "▁the", "▁fox", "s", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: tokenizer.decode(list(ids))


def wordpiece() -> Callable[[Sequence[int]], str]:
    """A decoder as in BERT: it joins words with spaces, and takes them away before punctuation."""
    pieces = ["[UNK]", "the", "fox", "##es", ".", "'", "s", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return lambda ids: tokenizer.decode(list(ids))


def test_words_keep_their_spaces() -> None:
    assert token_texts(sentencepiece(), [2, 3, 4, 1, 3]) == ["the", " fox", "s", " ", " fox"]
    assert token_texts(wordpiece(), [1, 2, 3, 1, 2, 4]) == ["the", " fox", "es", " the", " fox", "."]
    emoji = [6 + byte for byte in "👍é".encode()]
    assert [text for text in token_texts(sentencepiece(), [2, *emoji, 3]) if text] == ["the", "👍", "é", " fox"]


DECODERS = {"bytes": (encoder.decode, 2046), "sentencepiece": (sentencepiece(), 262), "wordpiece": (wordpiece(), 9)}


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
def test_texts_of_any_tokens_make_up_the_whole(kind: str, data: st.DataObject) -> None:
    decode, size = DECODERS[kind]
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=80))
    assert "".join(token_texts(decode, ids)) == decode(ids)


@given(st.text())
def test_texts_of_any_prompt_make_up_the_whole(text: str) -> None:
    ids = encoder.encode([text], special=True)[0].tolist()
    assert "".join(token_texts(encoder.decode, ids)) == encoder.decode(ids) == "<s>" + text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["one two three, ", "👩\u200d💻 日本語", "\ufffd", "\x80"])
def test_long_prompts_are_quick(text: str) -> None:
    ids = encoder.encode([text * 40_000], special=True)[0].tolist()[:100_000]
    begun = time.process_time()
    assert "".join(token_texts(encoder.decode, ids)) == encoder.decode(ids)
    assert time.process_time() - begun < 20


def test_documented_example_is_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES.parent)
    monkeypatch.setenv("COLUMNS", "80")
    page = Path("docs/inspect.md").read_text()
    command, shown = page.split("```sh\nprefill ")[1].split("```")[0], page.split("```text\n")[1].split("```")[0]
    done = prefill(*shlex.split(command.replace("\\\n", " ")))

    def words(text: str) -> list[str]:
        return re.sub(r"[+-]?\d+\.\d+(e-\d+)?", "#", text).split()  # the last digits are the machine's

    printed = " ".join(words(done.stderr + done.stdout))
    parts = [" ".join(words(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    assert len(parts) > 3
    assert re.fullmatch(" .* ".join(map(re.escape, parts)), printed), printed
