"""An engine without a model: the log-probabilities are a hash of the tokens. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer

from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Engine,
    Loaded,
    LoadRequest,
    Treatment,
    sequences,
)
from prefillcli.models.open import Opened
from prefillcli.options.engines import EngineKind
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack

KIND = EngineKind("fake", "tests.unit.engines.fake", frozenset())
MAX_LENGTH = 2048


class FakeTokenizer:
    """What prefill asks of a tokenizer, by the tokenizers library alone."""

    chat_template = None
    cls_token_id = unk_token_id = unk_token = None
    bos_token_id = 0

    def __init__(self, path: Path) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.all_special_ids = [number for number, token in self.added_tokens_decoder.items() if token.special]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(number) for number in ids]


def open_models(settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
    path = Path(str(settings.lm.model))
    tokenizer = FakeTokenizer(path)
    sizes = SimpleNamespace(vocab_size=len(tokenizer))
    files: Any = SimpleNamespace(
        path=path, origin=path, dtype="fake", dtype_why=None, config=sizes, head=None, encoder=False
    )
    device: Any = None
    return Opened(files, device, tokenizer, (), MAX_LENGTH)


def load(request: LoadRequest) -> Loaded[FakeEngine]:
    return Loaded(FakeEngine())


class FakeEngine(Engine):
    """Answers three prompts at a time."""

    whole_packs = False
    waits = False
    limits = Limits(tokens=1 << 62, max_tokens=MAX_LENGTH)

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        answers = []
        for prompt, tokens in sequences(pack):
            tick(len(pack.tokens) / len(pack.prompts))
            answers.append(Answer(prompt, logprobs(tokens.tolist(), labels(prompt)), 0, len(tokens), 0.001))
            if len(answers) == 3:
                yield answers
                answers = []
        yield answers

    def close(self) -> None:
        pass


def logprobs(tokens: list[int], labels: LabelSet) -> Any:
    """What the engine says of a prompt."""
    sequences = [each.tolist() for each in labels.sequences]
    read = [[*tokens, *each[:end]] for each in sequences for end in range(1, len(each) + 1)]
    values = np.log([(1 + crc32(repr(each).encode()) % 1000) / 3000 for each in read])
    return labels.divided(labels.logprobs(values))
