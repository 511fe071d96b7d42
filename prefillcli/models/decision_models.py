"""Decision models: checkpoints that were trained to answer typed questions, each in a layout of its own.

Asked in another layout, such a model gives probabilities without meaning. Its files say which one it needs: a GGUF
file by `<family>.decision.type` (llama.cpp), a folder by a file of its own.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from prefillcli.errors import UsageError
from prefillcli.models import decider, decision_adapters, pplx
from prefillcli.models.files import READOUT, lacks_vocabulary, positive, read_json
from prefillcli.models.gguf_header import POINTER_HEAD, GgufHeader, read_gguf_header
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.layouts import Layout, LayoutForm
from prefillcli.rows.proof import gguf_parts

_PREFIX = "decision."  # of the settings of a GGUF file, after the family
_TEMPLATE = "tokenizer.chat_template.systemone"
_MOST_CODES = 255


class _Kind(NamedTuple):
    # How a type of model is read: its codes in their order, of which it may lack some that are no single token, the
    # ways in which each may be spelt, codes that are spelt otherwise, and fields of its `LayoutForm` and its `Layout`.
    # Or else the text of the token at which each option is read.
    codes: tuple[str, ...]
    spellings: tuple[str, ...] = ("{}",)
    own_codes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    all_codes: bool = False
    form: Mapping[str, Any] = MappingProxyType({})
    others: Mapping[str, Any] = MappingProxyType({})
    marker: str = ""


_PAIRS = tuple("".join(each) for each in product(string.ascii_uppercase, repeat=2))
_SHORT = (*string.ascii_uppercase, *_PAIRS)
_DIGITS, _MARKED = (tuple(f"{at:02}" for at in range(100)), tuple(f"#{at}" for at in range(200)))
# The types of GGUF files that are read.
_READ: Mapping[str, _Kind] = {
    "openjev": _Kind(
        tuple(string.ascii_uppercase + string.ascii_lowercase), all_codes=True, others={"true_first": True}
    ),
    "nimble": _Kind(_SHORT, others={"lists_all": True}),
    "pplx-decider": _Kind(_SHORT, others={"codes_alone": True}),  # its head is zero for other tokens
    "lev": _Kind(
        _SHORT,
        form={"mirrored": True},
        others={
            "ratings": 9,
            "sorts_keys": True,
            "buckets": ((8, "small"), (26, "mid"), (math.inf, "large")),
        },
    ),
    "lfm2-d1": _Kind(
        (*string.ascii_uppercase, *_DIGITS, *string.ascii_lowercase, *_MARKED, *_PAIRS),
        spellings=("{}", " {}"),
        own_codes={
            "true": ("yes", "Yes", "YES"),
            "false": ("no", "No", "NO"),
            **{digit: (digit,) for digit in string.digits},
            **{f"{at}": (f"{at}", f" {at}") for at in range(100, _MOST_CODES)},
        },
        form={"stateless": True},
        others={"true_first": True},
    ),
    "kev": _Kind((), marker="<|box_end|>"),
}
# A file that only such a model's folder has, and its type.
_FOLDERS: Mapping[str, str] = {
    decider.CONFIG: "decider",
    pplx.CONFIG: "pplx-decider",
}
# The same beside the adapter_config.json of a LoRA.
_ADAPTERS: Mapping[str, str] = {
    decision_adapters.LEV: "lev",
    decision_adapters.NIMBLE: "nimble",
    "training_config.json": "kev",
    decision_adapters.CALIBRATION: "lev",
}
TEMPERATURES = "temperatures.json"  # one for each of these types of questions
_TYPES = ("choice", "score", "noul")
SAYS_SO = (
    *_FOLDERS,
    *_ADAPTERS,
    decision_adapters.HEAT,
    TEMPERATURES,
)  # files of a folder that say how its model is asked


def require_layout(model: Path, option: str, layout: str, beside: Path | None = None) -> None:
    """Raise UsageError for the model of an option that needs a layout of its own which is not read, or whose
    temperatures are wrong, unless the `layout` asked for is that of any model. Only `--model` is asked in layouts, its
    own or that of an `--adapter`, and `--first` in that of the model `beside` which it is."""
    if layout == "generic":
        if model.is_dir() and lacks_vocabulary(model):
            raise UsageError(
                f"{option} {model}: it has {READOUT} and no head for its vocabulary, so it answers in its own layout "
                "alone\nleave --layout generic out"
            )
        return
    if (found := decision_type(model)) is None:
        read_temperatures(model)
        return
    kind, said_by = found
    asked = option == "--model" or (option == "--adapter" and said_by in _ADAPTERS)
    own = layout_form(model, layout) if asked or beside is not None else None
    if own is not None and asked:
        return
    if own is not None and own.readout:
        raise UsageError(f"{option} {model}: it has {READOUT}, which is read as --model alone\ntake another model")
    if own is not None and beside is not None and own == layout_form(beside, layout):
        return
    read = f"folders of decider and PPLX-Decider and, of GGUF files, {', '.join(_READ)} are read, as --model"
    why = f"that is not read; {read}" if own is None or beside is None else "the layout of --model is another"
    raise UsageError(
        f"{option} {model}: a decision model of the type {kind} (by {said_by}), which answers only in the layout that "
        f"it was trained on, and {why}\n"
        "take another model; --layout generic asks it like any other, for answers that it was not trained to give"
    )


def require_alike(layout: Layout, other: Layout, said: str) -> None:
    """Raise UsageError unless the model of an option, which is `said`, asks as `--model` does, whose prompts it
    reads."""
    if not layout.asks_like(other):
        raise UsageError(
            f"{said}: a decision model of the type {other.form.type}, whose prompts or codes are not as --model's\n"
            "take a model that was trained on the same ones"
        )


def layout_form(model: Path, layout: str) -> LayoutForm | None:
    """Return how a decision model is asked in its own layout, because that is read and the `layout` asked for is no
    other; None for any other model. Raises UsageError for a damaged GGUF file, and for a decider model whose layout is
    unknown."""
    if layout == "generic" or (found := decision_type(model)) is None:
        return None
    kind, said_by = found
    if said_by == decider.CONFIG:
        return decider.read_form(model)
    if said_by == pplx.CONFIG:
        return pplx.read_form(model)
    known = gguf_parts(model) if said_by not in _ADAPTERS else kind != "kev" and decision_adapters.is_read(model)
    return LayoutForm(kind, **_READ[kind].form) if kind in _READ and known else None


def decision_type(model: Path) -> tuple[str, str] | None:
    """Return the type of the decision model in a folder or GGUF file, and what says so; None for any other model.
    Raises UsageError for a damaged GGUF file."""
    if parts := gguf_parts(model):
        header = read_gguf_header(parts[0])
        if (kind := header.setting(f"{_PREFIX}type")) is not None:
            return str(kind)[:60], f"{header.architecture}.{_PREFIX}type"
        return ("decider", decider.CONFIG) if decider.has_config(model) else None
    adapter = (model / "adapter_config.json").is_file()
    for name, kind in {**_FOLDERS, **(_ADAPTERS if adapter else {})}.items():
        if (model / name).is_file():
            return kind, name
    return None


def read_layout(model: Path, tokenizer: Any) -> Layout | None:
    """Return the layout of a decision model; None for any other model. Raises UsageError for one that is incomplete,
    or whose codes its tokenizer does not have."""
    form = layout_form(model, "auto")
    if form is None:
        return None
    if form.type == "decider":
        return decider.read_decider(model, tokenizer, _codes(tokenizer, _READ["pplx-decider"]))
    if form.readout:
        return pplx.read_pplx(model, _codes(tokenizer, _READ[form.type]))
    kind = _READ[form.type]
    template, heats = _told(model)
    if kind.marker:
        numbers = {str(number): (number,) for number in range(_MOST_CODES)}
        return Layout(form, template, numbers, heats, marker=_marker(model, tokenizer, kind.marker))
    codes = _codes(tokenizer, kind)
    needed = kind.codes if kind.all_codes else kind.codes[: kind.others.get("ratings", 0)]
    if (lost := next((code for code in needed if code not in codes), None)) is not None:
        raise UsageError(f"{model}: its tokenizer has no token {lost!r}, which stands for an option\nconvert it again")
    if not gguf_parts(model):
        decision_adapters.require_codes(model, codes)
    return Layout(
        form,
        template,
        codes,
        heats,
        own_codes=_tokens(tokenizer, kind.own_codes),
        whole_numbers=bool(gguf_parts(model)),
        **kind.others,
    )


def _told(model: Path) -> tuple[str, dict[str, float]]:
    # The template of a GGUF model or an adapter, and its temperatures by the type of a question, or by that and the
    # number of its options. Raises UsageError.
    if not (parts := gguf_parts(model)):
        return decision_adapters.read_template(model), decision_adapters.read_heats(model)
    header = read_gguf_header(parts[0])
    template = header.fields.get(_TEMPLATE)
    if not isinstance(template, str):
        raise UsageError(f"{model}: a decision model without its template, {_TEMPLATE}\nconvert it again")
    return template, _temperatures(model, header)


def _marker(model: Path, tokenizer: Any, text: str) -> int:
    # The token of this text. Raises UsageError for a model without it, or without a head to read options by.
    (tokens,) = Encoder(tokenizer).encode([text], special=False)
    lost = [] if len(tokens) == 1 else [f"token {text!r}, at which options are read"]
    if all(each.name != POINTER_HEAD for part in gguf_parts(model) for each in read_gguf_header(part).tensors):
        lost.append(f"tensor {POINTER_HEAD}, which reads them")
    if lost:
        raise UsageError(f"{model}: it has no {lost[0]}\nconvert it again")
    return int(tokens[0])


def _codes(tokenizer: Any, kind: _Kind) -> dict[str, tuple[int, ...]]:
    # The codes that a model has, with their tokens: the first ones, but of those with codes of their own all.
    found = _tokens(tokenizer, {code: [each.format(code) for each in kind.spellings] for code in kind.codes})
    return found if kind.own_codes else dict(islice(found.items(), _MOST_CODES))


def _tokens(tokenizer: Any, spelt: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    # The tokens of each code's spellings that are one. A code that is one of them must be a token itself.
    encoder, every = Encoder(tokenizer), [text for texts in spelt.values() for text in texts]
    coded = dict(zip(every, encoder.encode(every, special=False), strict=True))
    single = {text: int(tokens[0]) for text, tokens in coded.items() if len(tokens) == 1}
    found = {
        code: tuple(dict.fromkeys(single[text] for text in texts if text in single))
        for code, texts in spelt.items()
        if code in single or code not in texts
    }
    return {code: tokens for code, tokens in found.items() if tokens}


def _temperatures(model: Path, header: GgufHeader) -> dict[str, float]:
    # By the type of a question, or by that and the number of its options.
    begins = f"{header.architecture}.{_PREFIX}temperature."
    found = {name.removeprefix(begins): value for name, value in header.fields.items() if name.startswith(begins)}
    return {name: positive(value, f"{model}: {begins}{name}", "convert it again") for name, value in found.items()}


def read_temperatures(folder: Path) -> Mapping[str, float]:
    """Return the temperatures by type of question in the folder of a model or an adapter, or of a GGUF file; none
    without its `temperatures.json` (AINode). Raises UsageError for one that is no number above 0."""
    file = (folder if folder.is_dir() else folder.parent) / TEMPERATURES
    found: Any = read_json(file) if file.is_file() else None
    own = {name: found[name] for name in _TYPES if name in found} if isinstance(found, dict) else {}
    cure = "mend it, or leave all of them out with --layout generic"
    return {name: positive(value, f"{file}: {name}", cure) for name, value in own.items()}
