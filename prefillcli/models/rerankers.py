"""What the files of a reranker say of it, as sentence-transformers saves them.

`modules.json` names a `LogitScore`, whose folder has the ids of the two tokens that are compared. The chat template
renders messages of the roles query and document, and `config_sentence_transformers.json` has the instruction, which is
the system message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.files import read_json

LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


@dataclass(frozen=True, slots=True)
class Reranker:
    """A reranker as its files describe it. `tokens` are compared for its score, the positive one first; a head has
    none, and of one token alone the logit is the score."""

    tokens: tuple[int, ...] | None
    instruction: str | None
    begins_answer: bool  # whether its chats end where the assistant begins to speak


def read_reranker(folder: Path) -> Reranker | None:
    """The reranker that the files in a model's folder describe; None if they describe none. Raises UsageError."""
    modules, about = (_read(folder / name) for name in ("modules.json", "config_sentence_transformers.json"))
    named = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    paths = [str(each.get("path")) for each in named if each.get("type") == LOGIT_SCORE]
    about = about if isinstance(about, dict) else {}
    if not paths and about.get("model_type") != "CrossEncoder":
        return None
    tokens = None
    if paths:
        file = folder / Path(paths[0]).name / "config.json"  # never outside the folder
        found = _read(file)
        ids = [found.get(name) for name in ("true_token_id", "false_token_id")] if isinstance(found, dict) else [None]
        tokens = tuple(each for each in ids if type(each) is int)
        if type(ids[0]) is not int:
            raise UsageError(f"{file}: it names no true_token_id, the token whose logit is the model's score")
    prompts, name = about.get("prompts"), about.get("default_prompt_name")
    instruction = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    given = _read(folder / "sentence_bert_config.json")
    for key in ("processing_kwargs", "chat_template", "add_generation_prompt"):
        given = given.get(key) if isinstance(given, dict) else None
    return Reranker(tokens, instruction if isinstance(instruction, str) else None, given is True)


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
