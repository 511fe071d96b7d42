"""What `prefill bench --rationale` compares: the task that its options and prompts make, and the ways to write."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.bench.contenders import Equipment
from prefillcli.bench.material import Material
from prefillcli.bench.text_methods import GeneratedTexts, LockStepTexts, TextMethod, TextTask
from prefillcli.bench.text_report import TEXT_METHODS, TEXT_REFERENCE
from prefillcli.bench.vllm_method import VllmTextMethod, start_vllm
from prefillcli.compress.draft import Draft
from prefillcli.data.prompts.beginnings import Beginnings
from prefillcli.data.prompts.templates import rationale_texts
from prefillcli.data.rows import Float64Array
from prefillcli.decode.continuations import Beginning, Writing
from prefillcli.decode.speculation.draft_model import DraftModel
from prefillcli.decode.speculation.registry import DRAFTERS
from prefillcli.errors import PrefillError
from prefillcli.models.law import memory_law
from prefillcli.models.open import stop_tokens
from prefillcli.options.rationale import DEFAULT_TEMPLATE
from prefillcli.plan.pack import Limits
from prefillcli.prefill.forest import UnsupportedModelError

MOST_WORDS = 16
"""Tokens between a prompt and its text, at most."""
PADDED_TOKENS = 32_768
"""Prompt tokens of a padded batch: a mask of as many times the longest prompt must fit beside them."""
TOGETHER = {"generate": 1, "generate-padded": PADDED_TOKENS}
"""The ways of transformers, and how many prompt tokens they generate behind together."""


def text_task(equipment: Equipment, material: Material, tokens: int) -> TextTask:
    """To write up to so many tokens behind each prompt, after the label that it gets.

    Prompts whose K,V of all layers do not fit are left out of the material, with a note.
    """
    limits = _limits(equipment, tokens)
    material.leave_out_longer_than(min(limits.max_tokens, equipment.opened.files.max_length - tokens - MOST_WORDS))
    labels, prompts = equipment.labels, material.prompts
    words = Beginnings(equipment.tokenizer, labels, rationale_texts(DEFAULT_TEMPLATE, labels.names))

    def beginning(number: int, logprobs: Float64Array) -> Beginning:
        prompt = prompts[number]
        return Beginning(prompt.tokens, words.tokens(prompt.labels, int(logprobs.argmax())), str(prompt.row))

    return TextTask(
        prompts=[prompt.tokens for prompt in prompts],
        labels=lambda number: labels.sets[prompts[number].labels],
        beginning=beginning,
        writing=Writing(tokens, stop_tokens(equipment.opened.files)),
        limits=limits,
        longest=equipment.opened.files.max_length,
    )


def _limits(equipment: Equipment, tokens: int) -> Limits:
    """Packs whose K,V of all layers fit in the budget twice: once kept, once to be written behind."""
    files, budget = equipment.opened.files, equipment.limits
    law = memory_law(files.config, files.dtype)
    most = int(budget.max_tokens * law.token / (law.token + 2 * law.all_key_values)) - tokens
    if most < 1:
        raise PrefillError("K,V of all layers do not fit for any prompt with a text\nraise --memory")
    return Limits(tokens=min(budget.tokens, most), max_tokens=most, whole_nodes=budget.whole_nodes)


def text_methods(
    names: Sequence[str], equipment: Equipment, material: Material, tokens: int, draft: Draft | None
) -> list[TextMethod]:
    """The ways to write by name, the reference among them; without names all but vLLM. Close them in any case."""
    writer = _writer(equipment, material, draft)
    asked = names or [name for name in TEXT_METHODS if name != "vllm"]
    found: list[TextMethod] = [LockStepTexts(TEXT_REFERENCE, "off", equipment.walking)]
    for name in asked:
        if name in DRAFTERS:
            if DRAFTERS[name].needs_draft and writer is None:
                continue
            found.append(LockStepTexts(name, name, equipment.walking, writer))
        elif name in TOGETHER:
            found.append(GeneratedTexts(name, equipment.model, equipment.walking, TOGETHER[name]))
        elif name == "vllm":
            found.append(VllmTextMethod(start_vllm(equipment, material, tokens + MOST_WORDS)))
    return found


def _writer(equipment: Equipment, material: Material, draft: Draft | None) -> DraftModel | None:
    """The draft as what guesses tokens; None if it has others than the model, or cannot: a note says why."""
    small = equipment.opened.draft
    if draft is None or small is None or equipment.opened.draft_tokenizer is not None:
        return None
    try:
        return DraftModel(draft.walk, small.max_length)
    except UnsupportedModelError as error:
        material.notes.append(f"the draft cannot guess tokens: {error}")
        return None
