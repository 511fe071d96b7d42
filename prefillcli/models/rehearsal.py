"""A rehearsal: the walk of a model compared with the model's own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from prefillcli.errors import brief
from prefillcli.models.shape import Shape
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION, UnsupportedModelError
from prefillcli.prefill.key_window import KeyWindow
from prefillcli.prefill.layer_place import embedding_device
from prefillcli.prefill.walk import LayerWalk

_REHEARSAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def rehearse(model: PreTrainedModel, config: Any) -> None:
    """Walk a few prompts and compare their logits with the model's own eager forward.

    Prompts share prefixes over two levels and spread over chunks and packs. Raises UnsupportedModelError if
    they differ: a score that is silently wrong is worse than none.
    """
    family, vocabulary = config.model_type, int(config.vocab_size)
    rng = np.random.default_rng(0)
    root, middle = rng.integers(0, vocabulary, 23), rng.integers(0, vocabulary, 11)
    tails = [rng.integers(0, vocabulary, n) for n in (1, 7, 12)]
    prompts = [np.concatenate([root, middle, tail]).astype(np.int32) for tail in tails]
    prompts += [
        np.concatenate([root, tails[2]]).astype(np.int32),
        rng.integers(0, vocabulary, 19).astype(np.int32),
    ]
    device = embedding_device(model)
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            wanted = [
                model(input_ids=torch.as_tensor(p, dtype=torch.long, device=device)[None], use_cache=False).logits[
                    0, -1
                ]
                for p in prompts
            ]
        model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(model, chunk_tokens=9)
        try:
            found: dict[int, torch.Tensor] = {}
            for pack in make_plan(prompts, Limits(48, 1 << 20, held_tokens=1 << 20)).packs:
                logits = torch.cat(list(walk.read_logits(pack)))
                found |= {n: logits[i] for i, (_, numbers) in enumerate(pack.reads) for n in numbers}
        finally:
            walk.close()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{family} cannot be walked layer by layer: {error}") from None
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(
            f"{family} cannot be walked layer by layer: {type(error).__name__}: {brief(error)}"
        ) from error
    window = Shape(config).sliding_window
    if window is not None and KeyWindow(window) not in walk.windows:
        raise UnsupportedModelError(f"{family} does not tell its attention function of its sliding window")
    worst = max(float((found[i] - w.float()).abs().max()) for i, w in enumerate(wanted))
    scale = max(float(w.float().abs().max()) for w in wanted)
    if not worst <= _REHEARSAL_TOLERANCE[wanted[0].dtype] * max(scale, 1.0):
        raise UnsupportedModelError(
            f"{family} cannot be walked layer by layer: its logits differ by {worst:.2g} from its own forward"
        )
