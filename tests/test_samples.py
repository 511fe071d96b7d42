"""The sample data is what its script writes, and the sample models answer it."""

import io
import json
import re
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from benchmarks.needles import TOPICS
from benchmarks.sample_text import CASES, CREDITORS, SUBJECTS, ask_fairly
from prefillcli.asking.question_file import read_questions
from training.evaluate_samples import SAMPLES, Row, accuracy, auc, draw_rows, right_by_layer, sample_rows, score
from training.make_samples import CREDIT_FILE, LABEL_FILE, PICTURE_FILE, POST_FILE, TICKET_FILE, write_samples
from training.pictures_model import probabilities
from training.respelled_draft import main as respelled_draft
from training.respelled_draft import old_tokens, respell
from training.sample_tokenizer import train_tokenizer
from training.tickets import draw_question, encode_ticket
from training.word_tokenizer import train_word_tokenizer

DEEP, HYBRID = SAMPLES / "models" / "deep", SAMPLES / "models" / "hybrid"
WORDS = SAMPLES / "models" / "draft-words"
TARGET, DRAFT = SAMPLES / "models" / "target", SAMPLES / "models" / "draft"
TYPED, SEEING = SAMPLES / "models" / "tickets", SAMPLES / "models" / "pictures"
PICTURE_TRUTH = {"red": "has_red", "printed": "has_word", "shape": "kind", "says": "word", "number": "count"}
MIB = 2**20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sample_rows()


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    return folder


@pytest.mark.parametrize("name", [POST_FILE, LABEL_FILE])
def test_parquet_samples_are_what_the_script_writes(rewritten: Path, name: str) -> None:
    shipped, again = pq.ParquetFile(SAMPLES / name), pq.ParquetFile(rewritten / name)
    assert again.read().equals(shipped.read())
    if again.metadata.created_by == shipped.metadata.created_by:  # names the version of pyarrow
        assert (rewritten / name).read_bytes() == (SAMPLES / name).read_bytes()


@pytest.mark.parametrize("name", [CREDIT_FILE, TICKET_FILE])
def test_text_samples_are_what_the_script_writes(rewritten: Path, name: str) -> None:
    assert (rewritten / name).read_bytes() == (SAMPLES / name).read_bytes()


def test_pictures_are_what_the_script_draws(rewritten: Path) -> None:
    shipped, again = (pq.read_table(folder / PICTURE_FILE) for folder in (SAMPLES, rewritten))
    assert again.drop(["photo"]).equals(shipped.drop(["photo"]))
    assert again.schema.equals(shipped.schema, check_metadata=True)
    for one, other in zip(shipped["photo"].to_pylist(), again["photo"].to_pylist(), strict=True):
        first, second = (np.asarray(Image.open(io.BytesIO(each["bytes"])), np.float32) for each in (one, other))
        assert first.shape == second.shape
        assert np.abs(first - second).mean() < 2  # another Pillow may draw letters a little otherwise


def test_answers_are_balanced_and_found_in_the_history(rows: list[Row]) -> None:
    posts = pq.read_table(SAMPLES / POST_FILE).to_pylist()
    with (SAMPLES / CREDIT_FILE).open(encoding="utf-8") as lines:
        credits_ = [json.loads(line) for line in lines]
    labels = pq.read_table(SAMPLES / LABEL_FILE).to_pylist()
    asked = [(r["topic"], r) for r in posts] + [(r["creditor"], r) for r in credits_]
    asked += [(r["subject"], r) for r in labels]
    for word, record in asked:
        found = len(re.findall(rf"\b{word}\b", record["prompt"])) - 1  # the question names it once
        assert record["answer"] == ("Yes" if found else "No")
        assert record.get("mentions", found) == found
    for domain in CASES:
        answers = [row.answer for row in rows if row.domain == domain]
        assert answers.count("Yes") == answers.count("No")
    once = [r for r in [*posts, *credits_] if r["mentions"] == 1]
    assert len(once) >= 30  # needles


def test_posts_of_one_user_share_everything_before_the_question() -> None:
    records = pq.read_table(SAMPLES / POST_FILE).to_pylist()
    prefixes = {(r["user"], r["profile"] + r["history"]) for r in records}
    assert len(prefixes) == 12
    assert all(r["prompt"] == r["profile"] + r["history"] + r["question"] for r in records)
    assert len({r["profile"].splitlines()[0] for r in records}) == 1  # the instruction


@pytest.mark.nightly
def test_prompts_are_short_and_long(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = {d: [len(tokenizer(r.prompt)["input_ids"]) for r in rows if r.domain == d] for d in CASES}
    assert max(lengths["labeling"]) <= 80
    assert min(lengths["post_recommendation"]) >= 1500
    assert min(max(lengths["post_recommendation"]), max(lengths["credit_verification"])) >= 4000


def test_earlier_questions_never_tell_a_later_answer() -> None:
    rng = Random(7)
    answers = []
    for _ in range(300):
        asked = ask_fairly(rng, CASES["credit_verification"](rng, 3), 24)
        assert len({q.word for q in asked}) == len(asked)
        answers += [(q.answer, n) for n, q in enumerate(asked)]
    for turn in range(3):
        share = [answer for answer, n in answers if n == turn]
        assert 0.4 < share.count("Yes") / len(share) < 0.6


def test_asked_words_and_answers_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    words = [f" {w}" for w in (*TOPICS, *CREDITORS, *SUBJECTS, "Yes", "No")]
    assert all(len(ids) == 1 for ids in tokenizer(words, add_special_tokens=False)["input_ids"])


def test_tokenizer_covers_all_bytes_and_puts_bos_first(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.is_fast
    assert tokenizer.unk_token is None
    assert tokenizer.model_max_length >= 8192
    assert tokenizer.bos_token_id != tokenizer.eos_token_id
    text = "naïve 你好 🙂 \x00\x7f\t\r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_both_models_read_the_same_tokens() -> None:
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


@pytest.mark.nightly
def test_the_deep_model_answers_before_its_last_layers(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (DEEP / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(DEEP, dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == 12
    found = right_by_layer(model, tokenizer, [row for row in draw_rows("by layer", 40) if row.domain == "labeling"])
    shares = np.mean(found["labeling"], axis=0)
    assert shares[-1] >= 0.95
    assert shares[5] >= 0.95
    assert shares[0] < 0.8


@pytest.mark.nightly
def test_the_hybrid_model_answers_new_rows_of_any_length(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (HYBRID / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    kinds = model.config.layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (3, 1)
    assert accuracy(score(model, tokenizer, draw_rows("hybrid", 10))) >= 0.9


@pytest.mark.nightly
def test_the_tickets_model_answers_new_typed_questions(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (TYPED / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(TYPED).eval()
    rng, right = Random("new tickets"), defaultdict(list)
    for _ in range(200):
        text, question, answer = draw_question(rng)
        ids, places = encode_ticket(tokenizer, text, question, answer)
        with torch.inference_mode():
            likeliest = model(torch.tensor([ids])).logits[0].argmax(dim=-1)
        right[question.type].append(all(likeliest[place] == ids[place + 1] for place in places))
    assert {kind: sum(own) / len(own) > 0.9 for kind, own in right.items()} == dict.fromkeys(right, True)
    assert right.keys() == {"predicate", "choice", "score"}


@pytest.mark.slow
def test_the_pictures_model_answers_the_recipes_questions_in_plain_transformers() -> None:
    model = AutoModelForImageTextToText.from_pretrained(
        SEEING, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    processor = AutoProcessor.from_pretrained(SEEING)
    asked = read_questions(str(SAMPLES.parent / "recipes" / "questions" / "pictures.yaml")).questions
    right = defaultdict(list)
    for row in pq.read_table(SAMPLES / PICTURE_FILE).to_pylist()[:120]:
        image = Image.open(io.BytesIO(row["photo"]["bytes"]))
        for each in asked:
            found = probabilities(model, processor, image, each.question, row["caption"] or "")
            assert sum(found.values()) > 0.9
            answer = str(row[PICTURE_TRUTH[each.name]])
            right[each.question.type].append(max(found, key=lambda name: found[name]).lower() == answer.lower())
    shares = {kind: sum(own) / len(own) for kind, own in right.items()}
    assert shares["predicate"] >= 0.95
    assert shares["choice"] >= 0.85
    assert shares["score"] >= 0.8


@pytest.mark.nightly
def test_the_words_draft_reads_its_own_tokens_and_answers_new_rows() -> None:
    tokenizer = AutoTokenizer.from_pretrained(WORDS)
    assert tokenizer.backend_tokenizer.to_str() == train_word_tokenizer().backend_tokenizer.to_str()
    model = AutoModelForCausalLM.from_pretrained(WORDS, dtype=torch.float32).eval()
    assert accuracy(score(model, tokenizer, draw_rows("words", 10))) >= 0.9


@pytest.mark.nightly
def test_a_token_of_the_words_draft_begins_as_what_it_says_in_the_drafts_tokens() -> None:
    old, new = train_tokenizer(), train_word_tokenizer()
    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    model = respell(draft, old, new).eval()
    ids = old_tokens(old, new)
    for text in ("<s>", " chess", "\n", " Yes", "é"):
        spelled = new(text, add_special_tokens=False)["input_ids"]
        assert [number for piece in spelled for number in ids[piece]] == old(text, add_special_tokens=False)[
            "input_ids"
        ]
    for number in (new.bos_token_id, new.convert_tokens_to_ids("▁2012")):
        wanted = draft.model.embed_tokens.weight[ids[number]].mean(dim=0)
        torch.testing.assert_close(model.model.embed_tokens.weight[number], wanted)
    assert accuracy(score(model, new, draw_rows("respelled", 8))) >= 0.9  # before any training


def test_a_draft_is_respelled_for_the_words_of_any_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a red fox, a red fox", "the red hen"]}), tmp_path / "rows.parquet")
    respelled_draft([str(DRAFT), str(tmp_path / "rows.parquet"), "--output", str(tmp_path / "own")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert tokenizer.tokenize("a red hen") == ["a", "▁red", "▁", "h", "e", "n"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    old = AutoTokenizer.from_pretrained(DRAFT)
    before = AutoModelForCausalLM.from_pretrained(DRAFT).model.embed_tokens.weight
    wanted = before[old(" red", add_special_tokens=False)["input_ids"]].mean(dim=0)
    found = model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("▁red")]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("folder", [DRAFT, WORDS], ids=["draft", "words"])
def test_draft_is_several_times_cheaper(folder: Path) -> None:
    costs = []
    for own in (TARGET, folder):
        config = AutoConfig.from_pretrained(own)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        weights = sum(p.numel() for p in model.model.layers.parameters())
        attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * 4000
        costs.append(weights + attention)  # multiply-adds for a token amid a prompt of 4,000
        assert config.max_position_embeddings >= 8192
    assert costs[0] > 2.5 * costs[1]


def test_samples_are_small() -> None:
    data = sum(
        (SAMPLES / name).stat().st_size for name in (POST_FILE, CREDIT_FILE, LABEL_FILE, TICKET_FILE, PICTURE_FILE)
    )
    models = sum(file.stat().st_size for file in (SAMPLES / "models").rglob("*"))
    assert data < 5 * MIB
    assert models < 24 * MIB


@pytest.mark.nightly
def test_target_answers_short_and_long_rows(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    rng = Random(5)
    subset = [
        r
        for d, n in (("labeling", 200), ("credit_verification", 15))
        for r in rng.sample([r for r in rows if r.domain == d], n)
    ]
    posts = [r for r in rows if r.domain == "post_recommendation"]
    scored = score(model, tokenizer, [*subset, *posts[::20], *posts[-40:]])
    long = [s for s in scored if s.tokens >= 4000]
    assert len(long) >= 40
    for part in ([s for s in scored if s.tokens < 100], long, scored):
        assert accuracy(part) >= 0.95
        assert auc(part) >= 0.95
    assert min(s.mass for s in scored) > 0.9  # the labels are what the model expects
