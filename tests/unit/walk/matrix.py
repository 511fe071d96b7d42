"""The matrix: what becomes of every causal language model that transformers knows, and the page that says so.

`make architectures` writes the page anew. Each class is built tiny (`tiny_models.py`), prepared as the
product prepares a model, and walked; the oracle is its own eager forward over each prompt alone, in float32.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prefillcli.models.multimodal import text_part
from prefillcli.models.rehearsal import rehearse
from prefillcli.models.shape import UNWALKED, VERIFIED, refusal
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk.forest import UnsupportedModelError, register
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.test_label_logits import LABELS, Look
from tests.unit.walk.tiny_models import NOT_DECODERS, VARIANTS, VOCABULARY, class_names, make_tiny_model
from tests.unit.walk.tiny_multimodal import WHOLE, make_whole_model

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "architectures.md"
INDEX = DOCS / "README.md"
TOLERANCE = 1e-4  # of a logit, where logits spread over a few units
ONE_PACK = Limits(10**6, 10**6)
HELD = Limits(30, 10**6, held_tokens=10**6, whole_nodes=True)  # as for layers that keep states

Prompt = NDArray[np.int32]


@dataclass(frozen=True)
class Outcome:
    """What becomes of a class: `exact`, `refused` or `not a decoder`, and why or within which limits."""

    kind: str
    note: str = ""


def make_prompts() -> list[Prompt]:
    """Two levels of shared prefixes, a long prompt, short ones, a duplicate, and one that another begins with.

    No prompt has a token twice, so that no two of its keys are equal where layers choose among them.
    """
    order, taken = np.random.default_rng(4).permutation(np.arange(3, VOCABULARY)).astype(np.int32), 0

    def words(count: int) -> Prompt:
        nonlocal taken
        taken += count
        return order[taken - count : taken]

    root, middle = words(19), words(11)
    prompts = [np.concatenate([root, middle, words(count)]) for count in (1, 6, 17)]
    prompts += [np.concatenate([root, words(count)]) for count in (3, 14)]
    prompts += [words(53), words(5), words(1), prompts[1][:-2].copy()]
    return [*prompts, prompts[3].copy()]


def make_kept(prompts: Sequence[Prompt]) -> list[Prompt | None]:
    """Kept tokens of each prompt, the same of what prompts share; some prompts are read in full."""
    runs = np.repeat(np.random.default_rng(11).random(40) < 0.5, 3)
    kept: list[Prompt | None] = []
    for number, prompt in enumerate(prompts):
        mask = runs[: len(prompt)].copy()
        mask[:2] = mask[-3:] = True
        kept.append(None if number % 4 == 3 else np.flatnonzero(mask).astype(np.int32))
    return kept


PROMPTS = make_prompts()
KEPT = make_kept(PROMPTS)


class Trial:
    """A class on trial: its tiny model, its own eager forward, and its walk."""

    def __init__(self, family: str, **changes: object) -> None:
        register()
        self._in_registry = family in class_names()
        self.model = make_tiny_model(family, **changes) if self._in_registry else make_whole_model(family)
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        embeddings = getattr(self.model.base_model, "embeddings", None)
        padded = hasattr(embeddings, "position_embeddings") and hasattr(embeddings, "padding_idx")
        self._first_position = embeddings.padding_idx + 1 if padded else 0  # RoBERTa counts from its padding on

    def prepare(self) -> None:
        """Ready for the walk, as the product makes it. Raises UnsupportedModelError where it refuses the class."""
        text = self.model.config.get_text_config()
        causal = self._in_registry or text_part(self.model.config) is not None
        if why := refusal(self.model.config, text, causal=causal):
            raise UnsupportedModelError(why)
        self._rehearsal = rehearse(self.model, text)

    @property
    def own_cache(self) -> bool:
        """Whether it is walked with its own cache."""
        return self._rehearsal.own_cache

    @property
    def limits(self) -> str:
        """Within which limits the walk is exact."""
        gaps = self._rehearsal.gaps
        limits = {
            "own cache": self._rehearsal.own_cache,
            "whole prompts": not gaps,
            "positions have no meaning": gaps and not self.positions_matter,
        }
        return ", ".join(limit for limit, holds in limits.items() if holds)

    # The oracle

    def eager(self, prompts: Sequence[Prompt], kept: Sequence[Prompt | None] | None = None) -> Tensor:
        """Logits [prompts, vocabulary] of the model's own forward: of whole prompts, or of their kept tokens."""
        self.model.set_attn_implementation("eager")
        rows = []
        for number, prompt in enumerate(prompts):
            own = kept[number] if kept is not None else None
            at = np.arange(len(prompt)) if own is None else own
            ids = torch.as_tensor(prompt[at]).long()[None]
            more = {}
            if kept is not None:  # with a mask, transformers does not take gaps for packed sequences
                more["attention_mask"] = torch.ones_like(ids)
                if self._takes_positions:
                    more["position_ids"] = torch.as_tensor(at).long()[None] + self._first_position
            with torch.inference_mode():
                rows.append(self.model(input_ids=ids, use_cache=False, **more).logits[0, -1].float())
        return torch.stack(rows)

    @cached_property
    def whole(self) -> Tensor:
        return self.eager(PROMPTS)

    @cached_property
    def sparse(self) -> Tensor:
        return self.eager(PROMPTS, KEPT)

    @cached_property
    def positions_matter(self) -> bool:
        """Whether kept tokens give something else than the same tokens side by side."""
        squeezed = [prompt if own is None else prompt[own] for prompt, own in zip(PROMPTS, KEPT, strict=True)]
        return bool((self.eager(squeezed) - self.sparse).abs().max() > 10 * TOLERANCE)

    @contextmanager
    def cut_off(self, layers: Sequence[nn.Module], count: int) -> Iterator[None]:
        """The model with its first `count` layers only."""
        owner, name = next(
            (module, name)
            for module in self.model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and list(child) == list(layers)
        )
        whole = getattr(owner, name)
        setattr(owner, name, whole[:count])
        try:
            yield
        finally:
            setattr(owner, name, whole)

    # The walk

    @contextmanager
    def walking(self, chunk: int) -> Iterator[LayerWalk]:
        self._rehearsal.set_attention(self.model)
        with closing(LayerWalk(self.model, chunk_tokens=chunk)) as walk:
            yield walk

    def walked(self, chunk: int, limits: Limits, kept: Sequence[Prompt | None] | None = None) -> Tensor:
        """Logits [prompts, vocabulary] of the walk."""
        tokens, found = PROMPTS, {}
        if kept is not None:
            tokens = [prompt if own is None else prompt[own] for prompt, own in zip(PROMPTS, kept, strict=True)]
        with self.walking(chunk) as walk:
            for pack in make_plan(tokens, limits, positions=kept).packs:
                rows = torch.cat(list(walk.read_logits(pack)))
                found |= {n: row for row, (_, numbers) in zip(rows, pack.reads, strict=True) for n in numbers}
        return torch.stack([found[number] for number in range(len(PROMPTS))])

    # The comparison

    def differences(self) -> dict[str, float]:
        """How far the walk is off its oracle, case by case, in logits that spread over a few units."""
        scale = max(1.0, float(self.whole.std()))
        off = {
            "one pack": self.walked(7, ONE_PACK) - self.whole,
            "one chunk": self.walked(10**4, ONE_PACK) - self.whole,
            "held prefix": self.walked(16, HELD) - self.whole,
        }
        if self._rehearsal.gaps:
            off["kept tokens"] = self.walked(16, ONE_PACK, KEPT) - self.sparse
            off["kept tokens, held prefix"] = self.walked(7, HELD, KEPT) - self.sparse
        worst = {case: float(each.abs().max()) for case, each in off.items()}
        worst["labels after each layer"] = self._off_after_layers()
        return {case: each / scale for case, each in worst.items()}

    def _off_after_layers(self) -> float:
        prompts, worst, layers = PROMPTS[:6:2], 0.0, list(decoder_layers(self.model).layers)
        with self.walking(16) as walk:
            (pack,) = make_plan(prompts, ONE_PACK).packs
            rule = Look(walk, pack, peek=False)
            for _ in walk.read_logits(pack, exits=rule):
                pass
        for layer in range(len(layers) - 1):
            with self.cut_off(layers, layer + 1):
                wanted = self.eager(prompts)[:, list(LABELS)]
            found = torch.stack([rule.seen[layer, number][1] for number in range(len(prompts))])
            worst = max(worst, float((found - wanted).abs().max()))
        return worst


class WrongError(AssertionError):
    """A class is walked and gives other logits than its own forward."""


def outcome_of(family: str) -> Outcome:
    """Build, prepare and walk a class and its variants. Raises WrongError if one is neither exact nor refused."""
    if why := NOT_DECODERS.get(family):
        return Outcome("not a decoder", why)
    plain = _try(family)
    notes = [plain.note] if plain.note else []
    for title, changes in VARIANTS.get(family, {}).items():
        other = _try(family, **changes)
        if other != plain:
            notes.append(f"with {title}: {other.kind}" + (f", {other.note}" if other.note else ""))
    return Outcome(plain.kind, "; ".join(notes))


def _try(family: str, **changes: object) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = Trial(family, **changes)
        if not trial.whole.std() > 0.3:
            raise WrongError(f"{family}: its logits must differ enough to tell a wrong answer")
        try:
            trial.prepare()
        except UnsupportedModelError as error:
            return Outcome("refused", _why(family) or _reason(str(error)))
        worst = trial.differences()
        if off := {case: f"{each:.2g}" for case, each in worst.items() if not each <= TOLERANCE}:
            raise WrongError(f"{family} {changes or ''} is walked, and is off its own forward: {off}")
        return Outcome("exact", trial.limits)


def _why(family: str) -> str | None:
    return _WHY_REFUSED.get(family) or UNWALKED.get(family) or UNWALKED.get(f"{family}_text")


def _reason(message: str) -> str:
    """A refusal's first line without the family and without what changes from machine to machine."""
    _, _, why = message.partition(" cannot be walked layer by layer: ")
    return re.sub(r" by [\d.e+-]+", "", (why or message).splitlines()[0]).replace("|", "\\|")


#: Of classes whose checkpoints are loaded in another way.
_WHY_REFUSED = {"mllama": "leaves out layers where there are no images; its checkpoints are loaded without them"}


def listed(page: str) -> dict[str, Outcome]:
    """What the page says of each family."""
    found = {}
    for line in re.findall(r"^\| ((?:exact|refused|not a decoder) .*) \|$", page, re.MULTILINE):
        kind, note, families = line.split(" | ")
        for family in re.findall(r"`(.+?)`", families):
            assert family not in found, family
            found[family] = Outcome(kind, note)
    return found


def rows_of(families: Iterable[str], outcomes: dict[str, Outcome]) -> str:
    """The page's lines: families with the same outcome are in one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for family in families:
        alike.setdefault((outcomes[family].kind, outcomes[family].note), []).append(f"`{family}`")
    return "\n".join(f"| {kind} | {note} | {', '.join(names)} |" for (kind, note), names in sorted(alike.items()))


def counted(kinds: Sequence[str]) -> str:
    """What the manual says about the outcomes of all classes."""
    exact, refused = kinds.count("exact"), kinds.count("refused")
    return (
        f"Of the {len(kinds)} causal language models of transformers, {exact + refused} are decoders of their own: "
        f"{exact} give the logits of their own eager forward, and {refused} are refused."
    )


def make_page(outcomes: dict[str, Outcome]) -> str:
    """The page, from the outcomes of all classes."""
    sentence = fill(counted([outcomes[family].kind for family in class_names()]), 120)
    intro = _INTRO.format(counts=sentence, verified=fill(", ".join(VERIFIED.values()) + ".", 120))
    tables = [rows_of(class_names(), outcomes), _MULTIMODAL, rows_of(WHOLE, outcomes), ""]
    return intro + "\n".join(tables)


_TABLE = """| outcome | limits, or why | families |
| --- | --- | --- |"""
_INTRO = (
    """# Architectures

Which models can be walked layer by layer:

{counts}

Every class is built with a few small layers and random weights, and its walk is compared with its own forward over
each prompt alone, in float32. No logit may differ by more than 0.0001, with shared prefixes, packs, kept tokens, odd
chunks, and after each layer. `make test-matrix` does this, and `make architectures` writes this page.

A model is compared with its own forward when it is loaded, too. If the two differ, it is refused, never scored
wrongly. These families, with which all tests of the walk are run, need no such comparison:
{verified}

The tables have the `model_type` of `config.json`. Some are exact within limits:

- **own cache**: layers are called with the attention and the cache of transformers, for one run of tokens at a time.
  Shared prefixes are computed once there, too. Many short rows are slower, and the model cannot be a draft.
- **whole prompts**: `--keep` is refused.
- **positions have no meaning**: kept tokens are read side by side.

"""
    + _TABLE
    + "\n"
)
_MULTIMODAL = f"""
## Multimodal checkpoints

Only the text model of a multimodal checkpoint is loaded. Mostly it is one of the table above: that of `llava` is a
`llama`, that of `internvl` a `qwen2`. These have no text class of their own, and are loaded without their towers:

{_TABLE}"""


def main() -> None:
    """Write the page, and the counts in that of the features."""
    outcomes = {}
    for family in [*class_names(), *WHOLE]:
        outcomes[family] = outcome_of(family)
        print(rows_of([family], outcomes), flush=True)
    PAGE.write_text(make_page(outcomes))
    sentence = counted([outcomes[family].kind for family in class_names()])
    INDEX.write_text(
        re.sub(r"Of the \d+ causal .*?refused\.", fill(sentence, 120), INDEX.read_text(), flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
