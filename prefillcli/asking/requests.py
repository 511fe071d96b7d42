"""Requests for typed decisions, as the APIs of OpenAI and of TypeSafe (System One) have them: the questions of a body,
and the document that they are about.

A text is the document itself. An object or a list becomes compact JSON text, with its keys in their order. A list of
OpenAI's items has a heading before the content of each; calls are numbered, and an output names its call:

    User:
    Where is order 7?

    Call 1 of find_order:
    {"number":7}

    Output of call 1 of find_order:
    It is late.

    Assistant:
    Refusal: I cannot help with that.

Images stand before the document, which has `[Image 1]` in the place of the first one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from prefillcli.errors import UsageError, counted, did_you_mean
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.questions import MOST_OPTIONS, Choice, Option, Predicate, Question, Score
from prefillcli.rows.output.batches import BARE
from prefillcli.rows.output.decisions import DECISIONS, SYSTEM_ONE
from prefillcli.rows.values import brief_json, encode_json

MOST_QUESTIONS = 400  # about one document, as in OpenAI's API
MOST_ASSETS = 100
MOST_DEPTH = 100  # levels of objects and lists in JSON that is made text; OpenAI's API takes 32

Kind = Literal["openai", "systemone"]

# Keys of a body that have no effect on an answer; `x_...` has none either.
_NO_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "seed"),
    *("prompt_cache_key", "prompt_cache_options"),
}
# The type of each part, with the key of its content.
_TEXT = {"input_text": "text"}
_JSON = {"input_json": "data"}
_PARTS: Mapping[str, Mapping[str, str]] = {
    "user": {**_TEXT, **_JSON},
    "developer": _TEXT,
    "system": _TEXT,
    "assistant": {"output_text": "text", "refusal": "refusal"},
}
_MEDIA = ("input_image", "input_audio", "input_file", "input_video")
_IMAGES = ("image", "image_url", "input_image")  # the types of parts of messages in System One's state
_URLS = ("url", "image_url", "image", "file_data", "data")  # the keys of an image's URL in an object
_FILES = ("images", "files")  # keys of a body of System One
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # with the key of what the call says
_OUTPUTS = {f"{kind}_output": kind for kind in _CALLS}
_OPENAI = {"predicate": (), "choice": ("choices",), "score": ("levels",)}
_SYSTEM_ONE = ("noul", "choice", "score")

Asked = TypeVar("Asked", bound=Question)


class RequestError(UsageError):
    """A body is no valid request. The message begins with the place of the fault: `questions[3].choices: ...`."""

    def __init__(self, message: str) -> None:
        super().__init__(message.lstrip(".: "))  # a question of a file has no place of its own


class PlacedUrl(NamedTuple):
    """The URL of an image, and its place in the body."""

    url: str
    place: str


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Questions about one document, each with a name of its own.

    Questions that OpenAI's API leaves without a name are called by their place, `questions[3]`; their answers have no
    name. `model` is the one that is asked for. `state` is what System One's request is about as JSON has it, and
    `given` its questions by name. `images` are URLs and their places in the body.
    """

    kind: Kind
    document: str
    questions: tuple[Question, ...]
    model: str | None = None
    state: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[PlacedUrl, ...] = ()


def request_of(values: Any, url: str | None = None, *, stateless: bool = False) -> DecisionRequest:
    """Return the request of a body, or of the columns of a row that stand for one.

    `url` says whose request it is; without one, `input` is OpenAI's and `state` System One's. Keys with a null count
    as missing. A `stateless` request of System One may be about nothing. Raises RequestError.
    """
    if not isinstance(values, Mapping):
        raise RequestError("body is not an object")
    given = {key: value for key, value in values.items() if value is not None}
    stateless = stateless and url != DECISIONS and not {"input", "state"} & given.keys()
    if url is None and not stateless and ("input" in given) == ("state" in given):
        raise RequestError(f"{'both' if 'input' in given else 'neither'} input and state: give one of them")
    openai = "input" in given if url is None else url == DECISIONS
    if url not in (None, DECISIONS, SYSTEM_ONE):
        raise RequestError(f"url {brief_json(url)}: only {DECISIONS} and {SYSTEM_ONE} ask typed questions")
    subject = "input" if openai else "state"
    others = {key for key in given if key.startswith("x_")} | _NO_EFFECT
    others |= set() if openai else {*_FILES, "assets"}
    needed = ("questions",) if stateless else (subject, "questions")
    _object(given, "", needed=needed, known=others)
    if not isinstance(given.get("model", ""), str):
        raise RequestError("model: must be a text")
    model, images = given.get("model"), list[PlacedUrl]()
    if openai:
        document = _document(given["input"], images)
        questions = _listed(given["questions"])
        return DecisionRequest("openai", document, questions, model, document, images=tuple(images))
    for key in _FILES:
        images += _files(given.get(key, []), key)
    marks = _assets(given["assets"], images) if "assets" in given else {}
    state = _marked(_without_images(given.get("state"), "state", images), marks)
    document = "" if stateless else _content(state, "state")
    asked = _marked(given["questions"], marks)
    questions = _mapped(asked)
    return DecisionRequest("systemone", document, questions, model, state, asked, tuple(images))


def is_request_file(settings: JobSettings, available: Collection[str]) -> bool:
    """Return whether rows with these columns are bare requests, unless an option makes other prompts of them."""
    found = "questions" in available and ("input" in available or "state" in available)
    return found and not makes_prompts(settings)


def makes_prompts(settings: JobSettings) -> bool:
    """Return whether an option says how rows become prompts, so that they are no requests, whatever they look like."""
    columns = settings.pairs.pair_column, settings.likelihood.target_column
    others = settings.prompts.template, settings.asking.questions, *columns
    return settings.prompts.is_given("prompt_column") or any(others)


def carried_request(texts: Mapping[str, str | None], *, stateless: bool = False) -> DecisionRequest:
    """Return the request of a row, by the JSON texts of its carried columns: `url` and `body`, or those of `BARE` that
    it has. It may be `stateless`.

    The values that prompts are made of lack nulls, but an option of System One may have one as its description. Raises
    RequestError.
    """
    try:
        values = {name: json.loads(text) for name, text in texts.items() if text is not None}
    except RecursionError:
        raise RequestError("body is nested too deeply") from None
    if "body" in texts:
        return request_of(values.get("body"), values.get("url"), stateless=stateless)
    known = [name for name in BARE if name not in (*_FILES, "assets") or "input" not in values]
    return request_of({name: values[name] for name in known if name in values}, stateless=stateless)


# What a request is about.


def _document(value: Any, images: list[PlacedUrl]) -> str:
    # The text of what is asked about; its images are added to `images`.
    if isinstance(value, str):
        return _text(value, "input")
    if not isinstance(value, list) or not value:
        raise RequestError("input: must be a text, or a list of items")
    calls: dict[Any, tuple[str, str]] = {}
    return "\n\n".join(_item(each, f"input[{number}]", calls, images) for number, each in enumerate(value))


def _item(value: Any, place: str, calls: dict[Any, tuple[str, str]], images: list[PlacedUrl]) -> str:
    # The heading and the content of an item. `calls` has the type and the title of each call so far by its id.
    kind = _type(value, place, ("message", *_CALLS, *_OUTPUTS), usual="message")
    if kind == "message":
        own = _object(value, place, needed=("role", "content"), known=("type", "phase", "id", "status"))
        role = _one_of(own["role"], f"{place}.role", tuple(_PARTS))
        seen = images if role == "user" else None
        return f"{role.capitalize()}:\n{_parts(own['content'], f'{place}.content', _PARTS[role], seen)}"
    known = ("type", "id", "status", "namespace")
    if kind in _CALLS:
        own = _object(value, place, needed=("call_id", "name", _CALLS[kind]), known=known)
        call = _text(own["call_id"], f"{place}.call_id")
        if call in calls:
            raise RequestError(f"{place}.call_id: {brief_json(call)} is the id of an earlier call")
        names = [_text(own[key], f"{place}.{key}") for key in ("namespace", "name") if key in own]
        calls[call] = kind, title = kind, f"{len(calls) + 1} of {'.'.join(names)}"
        said = _text(own[_CALLS[kind]], f"{place}.{_CALLS[kind]}", empty=True)
        return f"Call {title}:\n{said}"
    own = _object(value, place, needed=("call_id", "output"), known=known)
    call = _text(own["call_id"], f"{place}.call_id")
    called, title = calls.get(call, ("", ""))
    if called != _OUTPUTS[kind]:
        raise RequestError(f"{place}.call_id: {brief_json(call)} is the id of no {_OUTPUTS[kind]} before it")
    return f"Output of call {title}:\n{_parts(own['output'], f'{place}.output', _TEXT, images)}"


def _parts(value: Any, place: str, kinds: Mapping[str, str], images: list[PlacedUrl] | None = None) -> str:
    # The content of a message, an output or instructions: a text, or parts of these kinds, each on its lines. Images
    # are added to `images`, where there may be some.
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{place}: must be a text, or a list of parts")
    return "\n".join(_part(each, f"{place}[{number}]", kinds, images) for number, each in enumerate(value))


def _part(value: Any, place: str, kinds: Mapping[str, str], images: list[PlacedUrl] | None) -> str:
    if isinstance(value, dict) and value.get("type") == "input_image" and images is not None:
        own = _object(value, place, needed=("type", "image_url"), known=("detail", "prompt_cache_breakpoint"))
        images.append(PlacedUrl(_text(own["image_url"], f"{place}.image_url"), place))
        return _place_of(images)
    if isinstance(value, dict) and value.get("type") in _MEDIA:
        raise RequestError(f"{place}: {value['type']} is not supported here")
    kind = _type(value, place, tuple(kinds))
    key = kinds[kind]
    content = _object(value, place, needed=("type", key), known=("prompt_cache_breakpoint",))[key]
    place = f"{place}.{key}"
    if kind in _JSON:
        if not isinstance(content, dict) and not _are_objects(content):
            raise RequestError(f"{place}: must be an object, or a list of objects")
        return _json(content, place)
    said = _text(content, place, empty=True)
    return f"Refusal: {said}" if kind == "refusal" else said


def _place_of(images: Sequence[PlacedUrl]) -> str:
    # What stands in a document for the last of its images.
    return f"[Image {len(images)}]"


def _assets(value: Any, images: list[PlacedUrl]) -> dict[str, str]:
    # The marks of assets by their placeholders; their images are added to `images`.
    if not isinstance(value, dict):
        raise RequestError("assets: must be an object, with an asset for each placeholder")
    _count(value, "assets", 1, MOST_ASSETS, "asset")
    marks = {}
    for name, each in value.items():
        place = f"assets[{brief_json(name)}]"
        own = _object(each, place, needed=("data_base64",), known=("type", "format"))
        _one_of(own.get("type", "image"), f"{place}.type", ("image",))
        if not name.strip():
            raise RequestError("assets: a placeholder is empty")
        data = _text(own["data_base64"], f"{place}.data_base64")
        images.append(PlacedUrl(f"data:image;base64,{data}", place))
        marks[name] = _place_of(images)
    return marks


def _marked(value: Any, marks: Mapping[str, str], level: int = 0) -> Any:
    # A value with the marks of assets instead of their placeholders in its texts.
    if not marks or level > MOST_DEPTH:
        return value
    if isinstance(value, str):
        return _placeholders(tuple(marks)).sub(lambda found: marks[found[0]], value)
    if isinstance(value, list):
        return [_marked(each, marks, level + 1) for each in value]
    if isinstance(value, dict):
        return {key: _marked(each, marks, level + 1) for key, each in value.items()}
    return value


@lru_cache(64)
def _placeholders(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _files(value: Any, place: str) -> Iterator[PlacedUrl]:
    # The URLs of the files in a list of URLs, or of objects that have one.
    if not isinstance(value, list):
        raise RequestError(f"{place}: must be a list")
    for number, each in enumerate(value):
        at = f"{place}[{number}]"
        if isinstance(each, str):
            yield PlacedUrl(_text(each, at), at)
            continue
        if not isinstance(each, dict):
            raise RequestError(f"{at}: must be a URL, or an object with one")
        yield PlacedUrl(_url_in(each, at), at)


def _url_in(value: Mapping[str, Any], place: str) -> str:
    # The URL in an object: `url`, `image_url` or `file_data`, itself or in an object.
    key = next((key for key in _URLS if value.get(key) is not None), None)
    if key is None:
        raise RequestError(f"{place}: no {', '.join(_URLS)}")
    found = value[key]
    return _url_in(found, f"{place}.{key}") if isinstance(found, dict) else _text(found, f"{place}.{key}")


def _without_images(value: Any, place: str, images: list[PlacedUrl], level: int = 0) -> Any:
    # A state without its messages' images, which are added to `images`: their places are text.
    if level > MOST_DEPTH:  # which whoever makes it text refuses
        return value
    if isinstance(value, list):
        return [_without_images(each, f"{place}[{at}]", images, level + 1) for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if isinstance(kind := value.get("type"), str) and kind in _IMAGES and any(value.get(key) for key in _URLS):
        images.append(PlacedUrl(_url_in(value, place), place))
        return {"type": "text", "text": _place_of(images)}
    return {key: _without_images(each, f"{place}.{key}", images, level + 1) for key, each in value.items()}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


# Questions.


def _listed(value: Any) -> tuple[Question, ...]:
    # Those of OpenAI's API.
    if not isinstance(value, list):
        raise RequestError("questions: must be a list")
    _count(value, "questions", 1, MOST_QUESTIONS, "question")
    names: dict[str, int] = {}
    for number, each in enumerate(value):
        if isinstance(each, dict) and each.get("name") is not None:
            place = f"questions[{number}].name"
            name = _text(each["name"], place)
            if (first := names.setdefault(name, number)) != number:
                raise RequestError(f"{place}: {brief_json(name)} is the name of questions[{first}]")
    return tuple(_question(each, f"questions[{number}]", names) for number, each in enumerate(value))


def typed_question(value: Mapping[str, Any], name: str) -> Question:
    """Return the question of this name in a question file, in the form of either API. Raises RequestError."""
    own = {key: each for key, each in value.items() if each is not None}
    if own.get("type") == "noul" or "criteria" in own:
        return _primitive(own | {"type": "noul"} if own.get("type") == "predicate" else own, name, "")
    return _question(own | {"name": name}, "", ())


def _question(value: Any, place: str, names: Collection[str]) -> Question:
    kind = _type(value, place, tuple(_OPENAI))
    own = _object(value, place, needed=("type", "instructions", *_OPENAI[kind]), known=("name",))
    asked = _parts(own["instructions"], f"{place}.instructions", _PARTS["user"])
    _text(asked, f"{place}.instructions")
    name = own.get("name")
    if name is None:
        name = place
        while name in names:  # somebody else's
            name += "'"
    if kind == "predicate":
        return Predicate(asked, name=name)
    if kind == "choice":
        return _made(Choice, asked, name, _options(own["choices"], f"{place}.choices", "value"), f"{place}.choices")
    return _made(Score, asked, name, _options(own["levels"], f"{place}.levels", "label"), f"{place}.levels")


def _options(value: Any, place: str, key: str) -> list[Option]:
    # The options of a choice, or the levels of a scale; `key` is that of what they are called.
    if not isinstance(value, list):
        raise RequestError(f"{place}: must be a list of objects")
    found = []
    for number, each in enumerate(value):
        own = _object(each, at := f"{place}[{number}]", needed=(key,), known=("description",))
        if not isinstance(own[key], str if key == "label" else str | bool):
            raise RequestError(f"{at}.{key}: must be a text" + ", true or false" * (key == "value"))
        found.append(Option(own[key], _text(own.get("description", ""), f"{at}.description", empty=True) or None))
    return found


def _mapped(value: Any) -> tuple[Question, ...]:
    # Those of System One.
    if not isinstance(value, dict):
        raise RequestError("questions: must be an object, with a question for each id")
    _count(value, "questions", 1, MOST_QUESTIONS, "question")
    if not all(name.strip() for name in value):
        raise RequestError("questions: an id is empty")
    return tuple(_primitive(each, name, f"questions[{brief_json(name)}]") for name, each in value.items())


def _primitive(value: Any, name: str, place: str) -> Question:
    kind = _type(value, place, _SYSTEM_ONE)
    needed = ("type",) if kind == "noul" else ("type", "criteria")
    own = _object(value, place, needed=needed, known=("instructions", "criteria"))
    asked = _content(own["instructions"], f"{place}.instructions") if "instructions" in own else ""
    criteria, place = own.get("criteria"), f"{place}.criteria"
    if kind == "noul":
        sides = {} if criteria is None else _object(criteria, place, needed=(), known=("true", "false"))
        told = {key: _content(each, f"{place}.{key}") for key, each in sides.items()}
        if not asked and not told:
            raise RequestError(f"{place.removesuffix('.criteria')}: neither instructions nor criteria")
        return Predicate(asked, name=name, true=told.get("true"), false=told.get("false"))
    if kind == "choice":
        if not isinstance(criteria, dict):
            raise RequestError(f"{place}: must be an object, with a description or null for each option")
        options = [
            Option(key, None if each is None else _content(each, f"{place}[{brief_json(key)}]"))
            for key, each in criteria.items()
        ]
        return _made(Choice, asked, name, options, place)
    if not isinstance(criteria, list):
        raise RequestError(f"{place}: must be a list of levels, the lowest first")
    levels = [Option(_content(each, f"{place}[{number}]")) for number, each in enumerate(criteria)]
    return _made(Score, asked, name, levels, place)


def _made(kind: Callable[..., Asked], asked: str, name: str, options: Sequence[Option], place: str) -> Asked:
    _count(options, place, 2, MOST_OPTIONS, "option" if kind is Choice else "level")
    with _errors_at(place):  # of two that are equal, or without a text
        return kind(asked, tuple(options), name=name)


# Values of JSON at their places.


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise RequestError(f"{place}: {error}") from None


def _type(value: Any, place: str, known: Sequence[str], usual: str | None = None) -> str:
    if not isinstance(value, dict):
        raise RequestError(f"{place}: must be an object")
    found = value.get("type")
    if found is None and usual is None:
        raise RequestError(f"{place}: has no type")
    return _one_of(usual if found is None else found, f"{place}.type", known)


def _one_of(value: Any, place: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        near = did_you_mean(value[:60], known) if isinstance(value, str) else ""
        raise RequestError(f"{place}: {brief_json(value)} is not {' or '.join(known)}{near}")
    return value


def _object(value: Any, place: str, *, needed: Collection[str], known: Collection[str]) -> dict[str, Any]:
    # An object without its nulls, with the needed keys and no unknown ones.
    if not isinstance(value, dict):
        raise RequestError(f"{place}: must be an object")
    own = {key: each for key, each in value.items() if each is not None}
    for key in own:
        if key not in needed and key not in known:
            at = f"{place}.{key}".removeprefix(".") if key.isidentifier() else f"{place}[{brief_json(key)}]"
            raise RequestError(f"{at}: not supported here{did_you_mean(key[:60], needed)}")
    for key in needed:
        if key not in own:
            raise RequestError(f"{place}: {key} is missing".removeprefix(": "))
    return own


def _count(values: Collection[Any], place: str, least: int, most: int, what: str) -> None:
    if not least <= len(values) <= most:
        limit = f"at least {least}" if len(values) < least else f"at most {most}"
        raise RequestError(f"{place}: {counted(len(values), what)}, {limit}")


def _text(value: Any, place: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{place}: must be a text")
    if not empty and not value.strip():
        raise RequestError(f"{place}: is empty")
    return value


def _content(value: Any, place: str) -> str:
    # A text, or the JSON text of an object or a list.
    if isinstance(value, str):
        return _text(value, place)
    if not isinstance(value, dict | list):
        raise RequestError(f"{place}: must be a text, an object or a list")
    if not value:
        raise RequestError(f"{place}: is empty")
    return _json(value, place)


def _json(value: Any, place: str) -> str:
    # The depth is counted, because the one at which Python gives up depends on the caller.
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = (each for one in level for each in (one.values() if isinstance(one, dict) else one))
        # Each object once, so that what holds itself several times does not grow
        level = list({id(each): each for each in inner if isinstance(each, dict | list)}.values())
        if not level:
            break
    else:
        raise RequestError(f"{place}: nested more than {MOST_DEPTH} levels deep")
    try:
        return encode_json(value)
    except ValueError:
        raise RequestError(f"{place}: a number in it is not finite") from None
