"""What guessing tokens ahead is worth: `python -m benchmarks.speculation [--model FOLDER] [--draft FOLDER]`.

Texts behind the needle prompts of `prefill bench`. First the share of tokens that are guessed right, one at a time: by
the model over a retrieval cache, for budgets and chunks; by the same model over the first and the latest tokens of the
prompt, as many (StreamingLLM); and by the draft model over them. Then passes and seconds a token of each drafter, in
turn with plain lock-step decoding. Progress goes to stderr, tables and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.console import log
from prefillcli.bench.material import needle
from prefillcli.decode.behind import KeptForward, KeptPack, MakeDrafter
from prefillcli.decode.continuations import DRAFTERS, Beginning, Continuation, DecodingReport, Speculation, Writing
from prefillcli.decode.drafters import DraftModel, JobDrafters, StreamingDrafter
from prefillcli.decode.lockstep import Chooser, Drafter, write_texts
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.walk import LayerWalk

SAMPLES = Path("samples/models")
ONE_PACK = Limits(1 << 30, 1 << 30)


def needle_rows(tokenizer: Any, rows: int, lines: int) -> tuple[list[Beginning], list[str]]:
    """Prompts that mention what they ask about once, each continued by the line that does, up to its topic.

    What follows has to be found: the topic, then the rest of a line that stands once in the prompt. The topics are
    given too.
    """
    found, topics = [], []
    for number in range(rows):
        text = needle(Random(number), lines, "Yes")
        asked = text.rsplit("about ", 1)[1].split("?")[0]
        (line,) = [line for line in text.splitlines()[1:-1] if asked in line] or [""]
        quoted = line[: line.index(asked)] if line else ""
        tokens = tokenizer(f" Yes\n{quoted}".rstrip(), add_special_tokens=False)["input_ids"]
        prompt = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
        found.append(Beginning(prompt, tuple(tokens), f"needle {number}"))
        topics.append(asked)
    return found, topics


class KeptRowsToWrite:
    """Prompts that were walked once; texts are written behind them as often as asked."""

    def __init__(self, walk: LayerWalk, rows: Sequence[Beginning]) -> None:
        self._walk = walk
        (self._pack,) = make_plan([row.prompt for row in rows], ONE_PACK).packs
        self._kept = KeptPack(self._pack)
        list(walk.read_logits(self._pack, kept=self._kept))
        read_of = {number: read for read, (_, numbers) in enumerate(self._pack.reads) for number in numbers}
        self._reads = [read_of[number] for number in range(len(rows))]
        self._rows = rows

    def write(
        self, writing: Writing, report: DecodingReport, make_drafter: MakeDrafter = lambda forward: None
    ) -> tuple[list[Continuation], float]:
        """The texts, and the seconds that they took."""
        begun = time.perf_counter()
        forward = KeptForward(self._walk, self._kept.select(self._reads))
        texts = write_texts(forward, self._rows, writing, drafter=make_drafter(forward), report=report)
        return texts, time.perf_counter() - begun


def acceptance(
    rows: KeptRowsToWrite, wanted: list[Continuation], how: Writing, name: str, drafters: JobDrafters | None,
    of_model: Callable[[], Drafter] | None = None,
) -> float:  # fmt: skip
    """The share of guesses that were right, one at a time."""
    report = DecodingReport()
    if drafters is not None:
        make: MakeDrafter = partial(drafters.of, writing=how, report=report)
    else:
        make = lambda forward: of_model() if of_model is not None else None  # noqa: E731
    texts, _ = rows.write(how, report, make)
    if [text.tokens for text in texts] != [text.tokens for text in wanted]:
        log(f"  {name}: other texts than without guesses")
    counts = report.drafters[name]
    return counts.accepted / max(counts.proposed, 1)


def streaming(walk: LayerWalk, vocabulary: int, tokens: int, longest: int) -> Callable[[], StreamingDrafter]:
    """A model over the first 16 tokens of a prompt and the latest ones, `tokens` in all."""
    draft = DraftModel(walk, longest)
    return lambda: StreamingDrafter(draft, Chooser(), vocabulary=vocabulary, sinks=16, recent=tokens - 16)


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.")] = SAMPLES / "target",
    draft: Annotated[Path, typer.Option(help="The draft model's folder.")] = SAMPLES / "draft",
    rows: Annotated[int, typer.Option(help="Prompts.")] = 4,
    lines: Annotated[int, typer.Option(help="Lines of a prompt's history.")] = 150,
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 48,
    budget: Annotated[list[int] | None, typer.Option(help="Tokens of a retrieval cache; repeatable.")] = None,
    chunk: Annotated[list[int] | None, typer.Option(help="Tokens of a chunk; repeatable.")] = None,
    guesses: Annotated[int, typer.Option(help="Tokens that are guessed ahead where time is measured.")] = 6,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Measure acceptance and speed."""
    place = torch.device(device)
    found: dict[str, Any] = {"model": str(model), "device": device, "dtype": dtype, "threads": torch.get_num_threads()}
    tokenizer = AutoTokenizer.from_pretrained(model)
    beginnings, topics = needle_rows(tokenizer, rows, lines)
    found["prompt_tokens"] = [len(row.prompt) for row in beginnings]
    log(f"prompts of {found['prompt_tokens']} tokens")
    budgets, chunks = budget or [128, 256, 512, 1024], chunk or [4, 8, 16]
    with ExitStack() as stack:
        target, small = (
            stack.enter_context(closing(LayerWalk(load_model(read_model_files(each, dtype=dtype), place),
                                                  chunk_tokens=2048)))
            for each in (model, draft)
        )  # fmt: skip
        kept = KeptRowsToWrite(target, beginnings)
        texts, _ = kept.write(Writing(tokens, speculation=Speculation("off")), DecodingReport())
        quotes = [tokenizer.decode(text.tokens).lstrip() for text in texts]
        found["quoted"] = sum(quote.startswith(topic) for quote, topic in zip(quotes, topics, strict=True))
        log(f"{found['quoted']} of {rows} texts begin with the topic of the line")
        found["acceptance"] = _acceptances(kept, texts, target, small, tokens, budgets, chunks)
        found["speed"] = _speeds(kept, small, tokens, budgets[-1], chunks[len(chunks) // 2], guesses, rounds)
    print(json.dumps(found))


def _acceptances(
    kept: KeptRowsToWrite, wanted: list[Continuation], target: LayerWalk, small: LayerWalk, tokens: int,
    budgets: list[int], chunks: list[int],
) -> list[dict[str, Any]]:  # fmt: skip
    vocabulary = int(target.model.config.get_text_config().vocab_size)
    table = Table("tokens seen", *(f"retrieval, chunk {chunk}" for chunk in chunks), "first and latest", "draft model")
    found = []
    for budget in budgets:
        log(f"acceptance, {budget} tokens")
        row: dict[str, Any] = {"budget": budget}
        for chunk in chunks:
            how = Writing(tokens, speculation=Speculation("retrieval", tokens=1, budget=budget, chunk=chunk))
            row[f"retrieval {chunk}"] = acceptance(kept, wanted, how, "retrieval", JobDrafters())
        one = Writing(tokens, speculation=Speculation("draft", tokens=1))
        for name, walk in (("streaming", target), ("draft", small)):
            row[name] = acceptance(kept, wanted, one, "draft", None, streaming(walk, vocabulary, budget, 1 << 20))
        table.add_row(str(budget), *(f"{value:.3f}" for name, value in row.items() if name != "budget"))
        found.append(row)
    Console(width=120).print(table)
    return found


def _speeds(
    kept: KeptRowsToWrite, small: LayerWalk, tokens: int, budget: int, chunk: int, guesses: int, rounds: int
) -> list[dict[str, Any]]:
    names = ["off", *DRAFTERS]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    reports = {}
    for turn in range(rounds + 1):
        log(f"speed, round {turn}")
        for name in names:
            how = Writing(tokens, speculation=Speculation(name, tokens=guesses, budget=budget, chunk=chunk))
            reports[name] = DecodingReport()
            drafters = JobDrafters()  # that has not seen these texts
            drafters.draft = DraftModel(small, 1 << 20)
            _, took = kept.write(how, reports[name], partial(drafters.of, writing=how, report=reports[name]))
            if turn:
                seconds[name].append(took)
    table = Table("drafter", "row passes / token", "ms / token", "plain / it", "right, by drafter")
    found = []
    for name in names:
        report = reports[name]
        ratios = [plain / own for plain, own in zip(seconds["off"], seconds[name], strict=True)]
        right = {each: counts.accepted / max(counts.proposed, 1) for each, counts in report.drafters.items()}
        row: dict[str, Any] = {
            "drafter": name,
            "row_passes": report.row_passes / report.tokens,
            "seconds": statistics.median(seconds[name]) / report.tokens,
            "ratio": statistics.median(ratios),
            "right": right,
        }
        found.append(row)
        shares = ", ".join(f"{each} {share:.2f}" for each, share in right.items())
        table.add_row(name, f"{row['row_passes']:.2f}", f"{row['seconds'] * 1e3:.2f}", f"{row['ratio']:.2f}", shares)
    Console(width=120).print(table)
    return found


if __name__ == "__main__":
    typer.run(main)
