"""Two more real models, as their GGUF files come, against transformers' own eager forward on the same weights."""

from __future__ import annotations

import pytest
from sklearn.metrics import roc_auc_score

from recipes.real_model import GEMMA, QWEN, joined_file, reviews
from tests.gguf_files import GgufReference
from tests.jobs.jobs import assert_scored, read_output, score, write_jsonl
from tests.real.conftest import FOLDER

pytestmark = pytest.mark.slow

FACTS = {  # pairs of a true sentence and a false one
    "Paris is the capital of France.": "Paris is the capital of Italy.",
    "Water freezes at zero degrees Celsius.": "Water freezes at fifty degrees Celsius.",
    "The sun rises in the east.": "The sun rises in the west.",
    "Two plus two is four.": "Two plus two is five.",
    "A spider has eight legs.": "A spider has four legs.",
    "Ice is colder than steam.": "Ice is hotter than steam.",
    "The heart pumps blood.": "The heart digests food.",
    "Python is a programming language.": "Python is a brand of cars.",
    "A week has seven days.": "A week has nine days.",
    "The moon is smaller than the earth.": "The moon is larger than the earth.",
}
ASKED = "Is this statement true? Answer with Yes or No only.\n\n"


@pytest.fixture
def gemma() -> GgufReference:
    return GgufReference(joined_file(GEMMA, FOLDER))


@pytest.fixture
def qwen() -> GgufReference:
    return GgufReference(joined_file(QWEN, FOLDER))


def test_a_base_model_with_sliding_windows(gemma: GgufReference) -> None:
    train, test = reviews("Train", FOLDER), reviews("Test", FOLDER)
    examples = "".join(f"Review: {each.text}\nSentiment: {each.sentiment}\n\n" for each in train[:6])
    prompts = [f"{examples}Review: {each.text}\nSentiment:" for each in test[:4]]
    assert min(len(gemma.ids(prompt)) for prompt in prompts) > 512  # a window
    labels = ("positive", "negative")
    source = write_jsonl("in.jsonl", [{"prompt": prompt} for prompt in prompts])
    file = joined_file(GEMMA, FOLDER)
    done = score(source, model=file, labels=",".join(labels), dtype="float32", chat=False)
    assert done["exit_code"] == 0, done
    # The file says add_bos_token, as llama.cpp does; transformers does not read it.
    ids = [[gemma.tokenizer.bos_token_id, *gemma.ids(prompt)] for prompt in prompts]
    wanted = [gemma.answer(each, [[f" {label}"] for label in labels]) for each in ids]
    assert_scored(read_output("out.parquet"), wanted, labels)


def test_an_instruction_model_tells_true_from_false(qwen: GgufReference) -> None:
    sentences = [*FACTS, *FACTS.values()]
    rows = [{"messages": [{"role": "user", "content": ASKED + each}]} for each in sentences]
    done = score(write_jsonl("in.jsonl", rows), model=joined_file(QWEN, FOLDER), dtype="float32", labels="Yes,No")
    assert done["exit_code"] == 0, done
    scored = read_output("out.parquet")
    true = [each in FACTS for each in sentences]
    assert roc_auc_score(true, [row["score"] for row in scored]) >= 0.9
    assert min(row["label_mass"] for row in scored) > 0.9
    for at in (0, len(FACTS), 3):
        ids = qwen.tokenizer.apply_chat_template(rows[at]["messages"], add_generation_prompt=True)["input_ids"]
        answer = qwen.answer(ids, [["Yes"], ["No"]])
        assert abs(scored[at]["score"] - answer.score) < 1e-5
        assert abs(scored[at]["label_mass"] - answer.label_mass) < 1e-5
