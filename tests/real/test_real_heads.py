"""A head for real reviews and a real model answers as transformers' hidden states and scikit-learn's ridge say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.real_model import Review, reviews
from tests.gguf_files import GgufReference
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, write_parquet
from tests.jobs.test_fitted_heads import by_hand, fit
from tests.real.conftest import FOLDER

ASK = "Does the drug help?"
NAMES = ("positive", "negative")
JUDGED, ASKED = 48, 8  # reviews
TOP, DEPTH = 20, 30  # the highest layer that heads may read, and the model's layers
LAYERS = (9, 11, 12, 14, 15, 17, 18, 20)  # eight from 30 % of the depth to the highest, counted from 1


def short(split: str, count: int) -> list[Review]:
    """The first reviews that are read quickly."""
    return [each for each in reviews(split, FOLDER) if len(each.text) < 180][:count]


def states_of(saved: Path, reference: GgufReference, texts: list[str]) -> dict[int, np.ndarray]:
    """The hidden states after each layer, counted from 1, at the last token of a chat about each text:
    transformers'."""
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for text in texts:
        chat = [{"role": "user", "content": f"{text}\n\n{ASK}"}]
        ids = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        found.append([states[layer][0, -1].numpy() for layer in LAYERS])
    return {layer: np.stack([own[at] for own in found]).astype(np.float64) for at, layer in enumerate(LAYERS)}


@pytest.fixture(scope="module")
def wanted(saved: Path, reference: GgufReference) -> np.ndarray:
    """The probability of yes for each review that is asked about, by hand."""
    judged, asked = short("Train", JUDGED), short("Test", ASKED)
    truth = np.array([NAMES.index(each.sentiment) for each in judged])
    states, others = (states_of(saved, reference, [each.text for each in own]) for own in (judged, asked))
    return by_hand(states, truth, len(NAMES), others)[:, 0]


def test_a_head_for_reviews_by_hand(real: Path, wanted: np.ndarray) -> None:
    judged, asked = short("Train", JUDGED), short("Test", ASKED)
    given = {"model": real, "ask": ASK, "dtype": "float32"}
    right = ["yes" if each.sentiment == "positive" else "no" for each in judged]
    summary = fit({"text": [each.text for each in judged], "right": right}, truth="right", most_layers=TOP, **given)
    assert summary["exit_code"] == 0, summary
    layer = summary["heads"][0]["layer"]
    assert layer in LAYERS
    done = score(write_parquet("in.parquet", text=[each.text for each in asked]), head="a.head", **given)
    assert done["exit_code"] == 0, done
    rows = read_output("out.parquet")
    assert np.abs([row["answer"] for row in rows] - wanted).max() < TOLERANCE
    assert np.ptp(wanted) > 0.1  # it tells reviews apart
    assert {row["method"] for row in rows} == {"head"}
    heads = read_report()["heads"]
    assert (heads["read_layers"], heads["model_layers"], heads["loaded_layers"]) == (layer, DEPTH, layer)
