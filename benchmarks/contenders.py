"""The walk and its peers that run with the program's own packages, for `benchmarks.serving`.

Each opens a model and gives the method that scores all prompts, with the settings that it used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.serving import Method, Scores, Settings, batches, share
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
    from prefillcli.options.groups import LoadingOptions
    from prefillcli.scoring.loading import load_walk

    files = read_model_files(model, dtype=dtype)
    small = () if narrow is None else (Small(files, narrow=narrow),)
    loaded = load_walk(Opened(files, torch.device("cpu"), None, small, files.max_length), LoadingOptions(**options))
    engine = loaded.engine
    if narrow is not None:
        engine = TorchEngine(loaded.small_walk(chunk_tokens=loaded.plan["chunk_tokens"]), limits=engine.limits)
    about = {"threads": torch.get_num_threads(), "chunk_tokens": loaded.plan["chunk_tokens"]}
    about |= {"pack_tokens": engine.limits.tokens, "narrow": narrow, **options}
    with ExitStack() as stack:
        stack.callback(loaded.close)
        yield lambda: _scores(engine, prompts, labels)[0], about


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
        scores, cached = _scores(engine, prompts, labels)
        if cached:
            raise RuntimeError(f"the prefix cache was not empty: {cached} tokens of the first prompt came from it")
        return scores

    with ExitStack() as stack:
        stack.callback(engine.close)
        yield run, {"cores": cores, "libiomp": libiomp, **options}


def use_vllm_cores(cores: str, libiomp: bool) -> bool:
    """Have vLLM's processes compute on these cores, with Intel's OpenMP if asked and installed. Whether it is."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if libiomp := libiomp and library.exists():
        os.environ["LD_PRELOAD"] = str(library)
    return libiomp


def _scores(engine: Engine, prompts: Sequence[TokenArray], labels: tuple[int, int]) -> tuple[Scores, int]:
    """Plan and answer. The scores, and the cached tokens of the first prompt's answer."""
    found: dict[int, Scores] = {}
    cached: dict[int, int] = {}
    asked = LabelSet.of([[label] for label in labels])
    plan = make_plan(prompts, engine.limits)
    for pack in plan.packs:
        for answers in engine.answer(pack, lambda _: asked, lambda _: None):
            found |= {each.prompt: each.logprobs for each in answers}
            cached |= {each.prompt: each.shared_tokens for each in answers}
    first = plan.packs[0].reads[0][1][0]
    return share(np.stack([found[row] for row in range(len(prompts))])), cached[first]


def _transformers_model(model: Path, dtype: str) -> Any:
    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import load_weights

    return load_weights(read_model_files(model, dtype=dtype), torch.device("cpu"), attention="sdpa")
