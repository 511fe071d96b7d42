"""The walk and its peers that run with the program's own packages, for `benchmarks.serving`.

Each opens a model and gives the method that scores all prompts, with the settings that it used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.serving import Method, Options, Scores, Settings, batches, option_shares, share
from prefillcli.engines.base import Engine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray

#: Cores on which vLLM computes.
CORES = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or f"0-{(os.cpu_count() or 1) - 1}"


@contextmanager
def walk(
    model: Path,
    dtype: str,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    narrow: Literal["int8"] | None = None,
    **options: Any,
) -> Iterator[tuple[Method, Settings]]:
    """The engine of `prefill score`, with the packs and chunks that it chooses by itself; `options` are the job's.

    With `narrow` that of `--compute`, whose rows are not read again.
    """
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.models.find import read_model_files
    from prefillcli.models.open import Opened, Small
    from prefillcli.options.settings import JobSettings
    from prefillcli.scoring.loading import load_walk

    files = read_model_files(model, dtype=dtype)
    small = () if narrow is None else (Small(files, narrow=narrow),)
    settings = JobSettings.of({"inputs": ("rows",), **options})
    loaded = load_walk(Opened(files, torch.device("cpu"), None, small, files.max_length), settings)
    engine = loaded.engine
    if narrow is not None:
        engine = TorchEngine(loaded.small_walk(chunk_tokens=loaded.settled["chunk_tokens"]), limits=engine.limits)
    about = {"threads": torch.get_num_threads(), "chunk_tokens": loaded.settled["chunk_tokens"]}
    about |= {"pack_tokens": engine.limits.tokens, "narrow": narrow, **options}
    with ExitStack() as stack:
        stack.callback(loaded.close)
        yield lambda: _scores(engine, prompts, labels), about


@contextmanager
def questions(
    model: Path,
    dtype: Any,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    asked: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    **options: Any,
) -> Iterator[tuple[Method, Settings]]:
    """The program itself, from texts and a question file to the probabilities of all options."""
    from prefillcli import Scorer

    names = [each["name"] for each in asked]
    rows = [{"text": each} for each in texts]
    with Scorer(model, questions=list(asked), dtype=dtype, on_long="error", **options) as scorer:

        def run() -> Scores:
            found: list[float] = []
            for row in scorer.score(rows, on_error="raise").to_pylist():
                for name in names:
                    shares = row.get(f"{name}.probabilities")  # a predicate has that of yes alone
                    found += [row[name], 1 - row[name]] if shares is None else shares.values()
            return np.array(found)

        yield run, options


@contextmanager
def plain(
    model: Path, dtype: str, prompts: Sequence[TokenArray], labels: tuple[int, int]
) -> Iterator[tuple[Method, Settings]]:
    """A loop over transformers' forward."""
    from benchmarks.methods import plain_loop

    network = _transformers_model(model, dtype)
    yield lambda: share(plain_loop(network, prompts)[:, list(labels)].numpy()), {"threads": torch.get_num_threads()}


def padded_batches(model: PreTrainedModel, prompts: Sequence[TokenArray], tokens: int) -> torch.Tensor:
    """Last logits float32 [prompts, vocabulary] of a causal model whose head is one matrix, with SDPA and no cache.

    Padding goes to the right. Causal attention then hides it from every real token, so no mask is needed and SDPA
    takes its fast causal kernel. The head reads each row's last real token only.
    """
    model.set_attn_implementation("sdpa")
    head = model.get_output_embeddings()
    found: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        for batch in batches([len(prompt) for prompt in prompts], tokens):
            ids = torch.zeros(len(batch), len(prompts[batch[0]]), dtype=torch.long)
            for place, row in enumerate(batch):
                ids[place, : len(prompts[row])] = torch.as_tensor(prompts[row])
            hidden = model.get_decoder()(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
            last = [len(prompts[row]) - 1 for row in batch]
            found |= zip(batch, head(hidden[range(len(batch)), last]).float(), strict=True)
    return torch.stack([found[row] for row in range(len(prompts))])


@contextmanager
def padded(
    model: Path,
    dtype: str,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    batch_tokens: int,
    zentorch: bool = False,
) -> Iterator[tuple[Method, Settings]]:
    """Batches of rows of about one length. `zentorch`: AMD's plug-in compiles, with frozen weights."""
    network = _transformers_model(model, dtype)
    if zentorch:
        import_module("zentorch")  # it registers itself
        vars(import_module("torch._inductor.config"))["freezing"] = True
        decoder = network.get_decoder()
        decoder.forward = torch.compile(decoder.forward, backend="zentorch", dynamic=True)
    about = {"threads": torch.get_num_threads(), "batch_tokens": batch_tokens, "zentorch": zentorch}
    yield lambda: share(padded_batches(network, prompts, batch_tokens)[:, list(labels)].numpy()), about


@contextmanager
def vllm(
    model: Path,
    dtype: str,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    cores: str,
    libiomp: bool,
    **options: Any,
) -> Iterator[tuple[Method, Settings]]:
    """The engine of `prefill score --engine vllm`. Each run begins with an empty prefix cache.

    `libiomp`: its processes load Intel's OpenMP first where it is installed, which vLLM recommends on CPUs.
    """
    from prefillcli.engines.vllm import VllmEngine

    libiomp = use_vllm_cores(cores, libiomp)
    engine = VllmEngine(model, dtype=dtype, max_length=max(map(len, prompts)), options=options)

    def run() -> Scores:
        engine.forget()
        return _scores(engine, prompts, labels, from_empty_cache=True)

    with ExitStack() as stack:
        stack.callback(engine.close)
        yield run, {"cores": cores, "libiomp": libiomp, **options}


@contextmanager
def vllm_questions(
    model: Path,
    dtype: str,
    prompts: Sequence[TokenArray],
    labels: tuple[int, int],
    options: Sequence[Options],
    cores: str,
    libiomp: bool,
    **settings: Any,
) -> Iterator[tuple[Method, Settings]]:
    """The same engine, asked for the tokens of every option."""
    from prefillcli.engines.vllm import VllmEngine
    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import saved_weights

    libiomp = use_vllm_cores(cores, libiomp)
    asked = [LabelSet.of([[each] for each in own]) for own in options]
    longest = max(len(prompt) + max(map(len, own)) for prompt, own in zip(prompts, options, strict=True))
    folder = saved_weights(read_model_files(model, dtype=dtype))
    if folder is None:
        raise SystemExit("the cache has no room for the model's safetensors")
    engine = VllmEngine(folder, dtype=dtype, max_length=longest, options=settings)

    def run() -> Scores:
        engine.forget()
        return option_shares([each.tolist() for each in _answers(engine, prompts, asked, True)])

    with ExitStack() as stack:
        stack.callback(engine.close)
        yield run, {"cores": cores, "libiomp": libiomp, **settings}


def use_vllm_cores(cores: str, libiomp: bool) -> bool:
    """Have vLLM's processes compute on these cores, with Intel's OpenMP if asked and installed. Whether it is."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if libiomp := libiomp and library.exists():
        os.environ["LD_PRELOAD"] = str(library)
    return libiomp


def _scores(
    engine: Engine, prompts: Sequence[TokenArray], labels: tuple[int, int], from_empty_cache: bool = False
) -> Scores:
    """P(first label) of each prompt."""
    asked = LabelSet.of([[label] for label in labels])
    return share(np.stack(_answers(engine, prompts, [asked] * len(prompts), from_empty_cache)))


def _answers(
    engine: Engine, prompts: Sequence[TokenArray], labels: Sequence[LabelSet], from_empty_cache: bool
) -> list[Any]:
    """Plan and answer: the log-probabilities of each prompt's labels. Raises RuntimeError if the engine had something
    in its cache that it should not have."""
    found: dict[int, Any] = {}
    cached: dict[int, int] = {}
    plan = make_plan(prompts, engine.limits)
    for pack in plan.packs:
        for answers in engine.answer(pack, labels.__getitem__, lambda _: None):
            found |= {each.prompt: each.logprobs for each in answers}
            cached |= {each.prompt: each.shared_tokens for each in answers}
    if from_empty_cache and (own := cached[plan.packs[0].reads[0][1][0]]):
        raise RuntimeError(f"the prefix cache was not empty: {own} tokens of the first prompt came from it")
    return [found[row] for row in range(len(prompts))]


def _transformers_model(model: Path, dtype: str) -> Any:
    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import load_weights

    return load_weights(read_model_files(model, dtype=dtype), torch.device("cpu"), attention="sdpa")
