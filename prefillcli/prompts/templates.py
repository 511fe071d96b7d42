"""Templates rendered in a process of their own, which is ended and replaced when a row breaks its limits.

Counting steps catches most templates that run away (`sandbox.py`), not all: one call of a filter may take hours or
fill the memory. So the kernel limits the memory of the process and the processor time of each row. This module watches
the cases that the kernel does not limit: memory on macOS, and a row that only waits. Results come back one by one, so
the row that was at work when the process ended is known: it becomes an error row, and a new process goes on with the
next one."""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from jinja2 import TemplateError, TemplateSyntaxError

from prefillcli.errors import ResourceError, UsageError, brief, did_you_mean
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.encoding import Encoder, NotLiteral
from prefillcli.prompts.images import PLACE
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.nursery import start_process
from prefillcli.prompts.sandbox import compile_template
from prefillcli.prompts.thinking import AS_USUAL, DATE, ChatChoices, Way
from prefillcli.rows.filesystems import read_given, utf8_text
from prefillcli.rows.records import ErrorCode, RowError
from prefillcli.runtime.memory import resident_memory_of

# Whether this system enforces a limit of a process's address space.
KERNEL_LIMITS_MEMORY = sys.platform == "linux"

_TICK = 0.25  # seconds between two looks at a silent process
_AHEAD = 1 << 20  # bytes of rows waiting to be sent, or one row
_READ = 1 << 18
_MOST_NAMES, _MOST_SHOWN = 5, 100  # fields that a message names, and characters
_START_SECONDS = 120.0  # on the clock, for the process to start and to compile the template
_HEAD = 9  # kind in one byte, and length


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of rendering one row, or of compiling the template."""

    # Processor time, give or take a second. Far more than a prompt needs, so slow machines fail the same rows.
    cpu_seconds: int = 10
    wall_seconds: float = 120.0  # time on the clock
    memory_bytes: int = 2 << 30  # memory of the process, the interpreter included
    text_bytes: int = 256 << 20  # length of the text in UTF-8


class RendererClosed(Exception):
    """The renderer was closed before it had finished."""


class Renderer:
    """One template, compiled in its own process that renders rows with it.

    `spec` describes the template, as `sandbox._serve` takes it; its `name` is for messages. Errors of rows get the
    code `code`. The process ends when the renderer is closed or collected, or when this process ends in whatever way.
    Raises UsageError if the template cannot be compiled within the limits, ResourceError if no process can be started.
    """

    def __init__(self, spec: dict[str, Any], *, code: ErrorCode, limits: RenderLimits | None = None) -> None:
        self._spec = spec
        self._code = code
        self._limits = limits or RenderLimits()
        self._closed = False
        self._rendering = threading.Lock()
        self._worker: _Worker | None = None
        self._end = weakref.finalize(self, lambda: None)
        self._compiled = self._started()[1]
        self.columns = tuple(self._compiled["columns"])  # variables that the template needs

    def render(self, rows: Sequence[Any], most: int | None = None) -> list[str | RowError]:
        """The text of each row, or why there is none. A row is the template's variables, or messages.

        With `most` it stops after the text that brings the total above this many characters: the other rows are not
        rendered yet, and not in the list. Raises RendererClosed if the renderer is closed before or, by another
        thread, meanwhile.
        """
        with self._rendering:
            try:
                return self._render([_pack(row) for row in rows], most)
            except BaseException:  # results of these rows may still come from this process
                self._drop()
                raise

    def close(self) -> None:
        """End the process. A rendering in another thread stops."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.kill()
        with self._rendering:
            self._drop()

    def _render(self, rows: Sequence[bytes | _Failure], most: int | None) -> list[str | RowError]:
        done: list[str | RowError] = []
        size = 0
        tried_again = -1
        while len(done) < len(rows):
            worker = self._worker or self._started()[0]
            try:
                for result in worker.render(rows[len(done) :]):
                    done.append(RowError(self._code, result.detail) if isinstance(result, _Failure) else result)
                    size += len(result) if isinstance(result, str) else 0
                    if most is not None and size > most and len(done) < len(rows):
                        self._drop()  # it has begun with rows that are no longer wanted
                        return done
            except _ProcessEnded as ended:
                self._drop()
                if self._closed:
                    raise RendererClosed from None
                if ended.certain or tried_again == len(done):
                    done.append(RowError(self._code, f"rendering {ended}"))
                else:  # the process may have ended for another reason
                    tried_again = len(done)
        return done

    def _started(self) -> tuple[_Worker, dict[str, Any]]:
        # A new process with the template compiled, and what it says of the template.
        if self._closed:
            raise RendererClosed
        name = self._spec["name"]
        worker = self._worker = _Worker(self._limits)
        self._end.detach()
        self._end = weakref.finalize(self, worker.end)
        ready = False
        try:
            worker.receive(b"R")
            ready = True
            worker.send(pickle.dumps(self._spec))
            compiled = json.loads(worker.receive(b"C"))
        except _ProcessEnded as ended:
            self._drop()
            if self._closed:
                raise RendererClosed from None
            if not ready:
                raise ResourceError(f"cannot start the process that renders {name}: it {ended}") from None
            raise UsageError(f"{name}: compiling it {ended}; make it simpler") from None
        if "error" in compiled:
            self._drop()
            raise UsageError(compiled["error"])
        return worker, compiled

    def _drop(self) -> None:
        self._worker = None
        self._end()


@dataclass(frozen=True, slots=True)
class _Failure:
    """A row that has no text."""

    detail: str


class _ProcessEnded(Exception):
    """The process is gone; the text says why. `certain` if its row was the cause."""

    def __init__(self, why: str, *, certain: bool) -> None:
        super().__init__(why)
        self.certain = certain


class _Worker:
    """The process, seen from here: it is sent rows and answers with their texts."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._unsent = bytearray()
        self._received = bytearray()
        self._process = start_process({**asdict(limits), "limit_memory": KERNEL_LIMITS_MEMORY})
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._out.fileno(), select.POLLIN)

    def render(self, rows: Sequence[bytes | _Failure]) -> Iterator[str | _Failure]:
        # The text of each row, or its failure. Raises _ProcessEnded when the process ends before it has answered.
        coming = (row for row in rows if isinstance(row, bytes))
        for row in rows:
            if isinstance(row, _Failure):
                yield row
                continue
            while len(self._unsent) < _AHEAD and (following := next(coming, None)) is not None:
                self.send(following)
            kind, content = self._message(self._limits.wall_seconds)
            if kind == b"M":
                raise _ProcessEnded(f"took more than {_size(self._limits.memory_bytes)} of memory", certain=True)
            text = content.decode("utf-8", "surrogatepass")
            yield text if kind == b"T" else _Failure(text)

    def send(self, content: bytes) -> None:
        # Queue bytes; they are written while this process waits for answers.
        self._unsent += len(content).to_bytes(8, "big")
        self._unsent += content

    def receive(self, kind: bytes) -> bytes:
        found, content = self._message(_START_SECONDS)
        if found != kind:
            raise _ProcessEnded(f"took more than {_size(self._limits.memory_bytes)} of memory", certain=True)
        return content

    def kill(self) -> None:
        # End the process and wait until it is gone; any thread may call this.
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        # `kill`, and close the pipes: only when no thread waits for a message.
        self.kill()
        self._in.close()
        self._out.close()

    def _message(self, seconds: float) -> tuple[bytes, bytes]:
        since = time.monotonic()
        received = self._received
        while True:
            if len(received) >= _HEAD:
                size = int.from_bytes(received[1:_HEAD], "big")
                if size > self._limits.text_bytes:
                    raise _ProcessEnded("gave more than it may", certain=True)
                if len(received) >= _HEAD + size:
                    message = bytes(received[:1]), bytes(received[_HEAD : _HEAD + size])
                    del received[: _HEAD + size]
                    return message
            self._exchange()
            if time.monotonic() - since > seconds:
                self.kill()
                raise _ProcessEnded(f"took more than {seconds:g} s", certain=False)

    def _exchange(self) -> None:
        # Wait a moment to write some of the unsent bytes, or to read. Raises _ProcessEnded.
        if self._unsent:
            self._poll.register(self._in.fileno(), select.POLLOUT)
        events = dict(self._poll.poll(_TICK * 1000))
        if self._unsent:
            self._poll.unregister(self._in.fileno())
        if self._in.fileno() in events:
            try:
                del self._unsent[: self._in.write(self._unsent) or 0]
            except BrokenPipeError:
                self._unsent.clear()  # answers before its end are read first
        if self._out.fileno() in events:
            data = self._out.read(_READ)
            if not data:
                raise self._why_ended()
            self._received += data
        elif not KERNEL_LIMITS_MEMORY and resident_memory_of(self._process.pid) > self._limits.memory_bytes:
            self.kill()
            raise _ProcessEnded(f"took more than {_size(self._limits.memory_bytes)} of memory", certain=True)

    def _why_ended(self) -> _ProcessEnded:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return _ProcessEnded(f"took more than {self._limits.cpu_seconds} s of processor time", certain=True)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _ProcessEnded(f"ended the process that does it ({how})", certain=False)


def _pack(row: Any) -> bytes | _Failure:
    # Pickle keeps values as they are. Its only reader is the process that is started here; nothing is unpickled here.
    try:
        return pickle.dumps(row, protocol=5)
    except RecursionError:
        return _Failure("RecursionError: a value is nested too deeply")
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # such as an interval of months
        return _Failure(f"a value has a type that templates cannot have: {brief(error)}")


def _size(size: int) -> str:
    return f"{size / 2**30:g} GiB" if size >= 1 << 30 else f"{size / 2**20:g} MiB"


_MARKS = ("{{", "{%", "{#")
_LAST_BREAK = re.compile(r"(\r\n|\n|\r)\Z")


def read_template(template: str) -> tuple[str, str]:
    """The Jinja text of `--template`, itself text or a file's path, and a name for messages.

    Text is taken whole. The line break that ends a file's last line, which editors add, is not part of its text.
    Raises UsageError if it is neither, or not UTF-8.
    """
    if not names_template(template):
        return template, "--template"
    shown = template if len(template) < 200 else f"{template[:100]}..."
    try:
        data = read_given("--template", template)
    except UsageError as error:
        reason = str(error).removeprefix(f"--template {template}: ")
        raise UsageError(
            f"--template {shown}: neither Jinja text (it has no {{{{ column }}}}) nor a readable file ({reason})"
        ) from None
    return _LAST_BREAK.sub("", utf8_text("--template", template, data)), template


def names_template(template: str) -> bool:
    """Return whether a `--template` is the path of a file, not Jinja text itself."""
    return not any(mark in template for mark in (*_MARKS, "\n"))


def is_rendered(instructions: str) -> bool:
    """Return whether what a question asks has columns of the row in it, `{{ product }}`."""
    return "{{" in instructions or "{%" in instructions


class RowTemplate(Renderer):
    """A compiled template, as `--template` gives it, or a text that messages call by this `name`: rows are its
    variables.

    Raises UsageError with the line of a syntax error, or if the template cannot be compiled within the limits.
    """

    def __init__(self, template: str, limits: RenderLimits | None = None, *, name: str = "") -> None:
        self.text, name = (template, name) if name else read_template(template)
        spec = {"kind": "template", "text": self.text, "name": name}
        super().__init__(spec, code=ErrorCode.TEMPLATE_ERROR, limits=limits)


class LayoutTemplate(Renderer):
    """The compiled template of a model's layout: rows are the values of questions. Raises UsageError if it cannot be
    compiled within the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(
            {"kind": "layout", "text": text, "name": "the template of the model's layout"},
            code=ErrorCode.CHAT_ERROR,
        )


Message = dict[str, Any]


_MEDIUM = re.compile("(input_)?(image|audio|video|file)(_url)?")


def messages_of(value: Sequence[Any], system: str | None, *, places: bool = False) -> list[Message] | RowError:
    """The messages of a row, with the `system` message before them unless the row has its own. With `places`, those of
    its images are `prompts.images.PLACE`."""
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            found = f" but of {named(item)}" if isinstance(item, dict) else ""
            why = f"message {number} is not an object of a role and a content{found}"
            return RowError(ErrorCode.WRONG_TYPE, why)
        if "content" not in item and "tool_calls" not in item:
            return RowError(ErrorCode.CHAT_ERROR, f"message {number} has no content")
        content = item.get("content")
        for part in content if isinstance(content, list) else ():
            if places and part == PLACE:
                continue
            if isinstance(part, dict) and _MEDIUM.fullmatch(kind := str(part.get("type") or next(iter(part), ""))):
                # A template may write a mark for it, or the part itself, as if the model had seen it.
                return RowError(
                    ErrorCode.CHAT_ERROR, f"message {number} has a part of type {kind!r}: only text is read"
                )
        messages.append(item)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def without_escapes(value: Any) -> Any:
    """Return a value of the data; of messages, with the JSON text of tool calls' arguments spelt without `\\uXXXX`.

    Templates may be given what that text says: control tokens must not hide behind escapes when they are looked for.
    """
    if not isinstance(value, list) or not any(isinstance(item, dict) and item.get("tool_calls") for item in value):
        return value
    return [
        item | {"tool_calls": [_with_arguments(call, _unescaped(_arguments(call))) for call in item["tool_calls"]]}
        if isinstance(item, dict) and isinstance(item.get("tool_calls"), list)
        else item
        for item in value
    ]


def _unescaped(arguments: Any) -> Any:
    if isinstance(arguments, str) and "\\u" in arguments:
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(arguments), ensure_ascii=False)
    return arguments


def named(value: Mapping[str, Any]) -> str:
    """Return the names of an object's fields, for a message."""
    return ", ".join(list(map(repr, value))[:_MOST_NAMES])[:_MOST_SHOWN]


class ChatTemplate(Renderer):
    """The chat template of a tokenizer: rows are lists of messages.

    If a model `answers`, chats end where the assistant begins to speak, or, with `choices`, as these say; `way` is
    what brings them there. Raises UsageError if there is none, if it cannot be compiled within the limits, or if it
    cannot do what the choices ask.
    """

    def __init__(
        self,
        tokenizer: Any,
        limits: RenderLimits | None = None,
        *,
        answers: bool = True,
        choices: ChatChoices | None = None,
    ) -> None:
        from transformers import PreTrainedTokenizerBase  # takes long to import; the tokenizer has done so

        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            raise UsageError(
                f"{type(tokenizer).__name__} turns chats into text by code of its own, which is not run\n"
                "write the messages as text with --template, and give --no-chat"
            )
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            names = list(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else ()
            if not names:
                raise UsageError(f"the model's chat template: {error}") from None
            raise UsageError(
                f"the model has chat templates named {', '.join(names)}, and none is the default\n"
                "write the one to use to chat_template.jinja in its folder"
            ) from None
        if choices is not None and choices.thinking == "off":
            choices = replace(choices, thought_tokens=_thought_tokens(tokenizer))
        spec = {
            "kind": "chat",
            "text": text,
            "answers": answers,
            "choices": choices,
            "variables": dict(tokenizer.special_tokens_map),
            "name": "the model's chat template",
        }
        super().__init__(spec, code=ErrorCode.CHAT_ERROR, limits=limits)
        self._forms: dict[_Kinds, _Form] = {}  # how chats of each kind are given to it
        self.way = Way(**self._compiled["way"])
        try:
            self._require_able(choices or AS_USUAL)
        except UsageError:
            self.close()
            raise

    def _require_able(self, choices: ChatChoices) -> None:
        known = [name for name in self.columns if name not in _GIVEN]
        if "strftime_now" in self.columns:
            known.append(DATE)
        for name in choices.options:
            if name not in known:
                reads = f"it reads {', '.join(known)}" if known else "it reads none"
                raise UsageError(
                    f"--chat-option {name}: the model's chat template reads no such variable"
                    f"{did_you_mean(name, known)}\n{reads}"
                )
        if not self.way.arrives:
            raise UsageError(
                "--thinking off: the model's chat template says nothing of thoughts, nor has the tokenizer <think>\n"
                "leave it out, or give the text that the answer follows with --answer-prefix"
            )

    def texts(self, chats: Sequence[list[Message]]) -> list[str | RowError]:
        """The text of each chat, or why there is none.

        Messages are given in the form that the template reads: some print a list of text parts, or arguments of a tool
        call, as Python spells them. A chat of which the template leaves a message out in every form, as many do for a
        role that they do not know, is an error: the model would not read it.
        """
        kinds = [_kinds(chat) for chat in chats]
        forms = [self._forms.get(own, _FORMS[0]) if own is not None else _FORMS[0] for own in kinds]
        texts = self.render([form.of(chat) for form, chat in zip(forms, chats, strict=True)])
        for at, (chat, own, used) in enumerate(zip(chats, kinds, forms, strict=True)):
            if own is None:
                if not isinstance(texts[at], RowError):
                    texts[at] = RowError(self._code, "RecursionError: a value is nested too deeply")
                continue
            form = self._forms.get(own)
            if form is None:
                texts[at] = self._first(own, chat, texts[at])
                continue
            if form != used:  # it was found meanwhile
                (texts[at],) = self.render([form.of(chat)])
            if form.left_out is not None and not isinstance(texts[at], RowError):
                texts[at] = RowError(self._code, form.left_out)
        return texts

    def _first(self, kinds: _Kinds, chat: list[Message], text: str | RowError) -> str | RowError:
        # The text of the first chat of its kind, in the first form that the template reads: others will have the same.
        # `text` is that of the usual form.
        if len(self._forms) >= _MOST_KINDS:
            self._forms.clear()
        tried: list[list[Message]] = []
        why: str | None = None
        for form in _FORMS:
            shaped = form.of(chat)
            if shaped in tried:
                continue
            found = self.render([shaped])[0] if tried else text
            tried.append(shaped)
            if isinstance(found, RowError):
                continue
            left_out = self._left_out(shaped, found)
            if left_out is None and not _is_spelt(shaped, found):
                self._forms[kinds] = form
                return found
            if len(tried) == 1:
                why = left_out
        if isinstance(text, RowError):  # others of its kind may have none of their own
            return text
        self._forms[kinds] = replace(_FORMS[0], left_out=why)
        return text if why is None else RowError(self._code, why)

    def _left_out(self, chat: list[Message], text: str) -> str | None:
        # The first message that may say something else, and the text is the same: of each kind, the first and the last
        # one are tried.
        kinds = _kinds(chat) or ()
        last = {kind: at for at, kind in enumerate(kinds)}
        for at in sorted({*map(kinds.index, last), *last.values()}):
            if kinds[at].says:
                changed = [[*chat[:at], more, *chat[at + 1 :]] for more in _saying_more_once(chat[at])]
                if text in self.render(changed):
                    why = f"the chat template writes nothing of message {at + 1} (role {chat[at]['role'][:40]!r})"
                    return f"{why}: give it a role and a form of content that it knows"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The form in which messages are given to a chat template."""

    content: str  # one of _CONTENTS
    arguments: str  # of tool calls: one of _ARGUMENTS
    left_out: str | None = None  # which message no form brings into the text

    def of(self, chat: list[Message]) -> list[Message]:
        """The chat in this form, as far as it can have it."""
        return [self._message(message) for message in chat]

    def _message(self, message: Message) -> Message:
        done = dict(message)
        content = message.get("content")
        if self.content == "texts" and _is_text_parts(content):
            done["content"] = "\n".join(part["text"] for part in content)
        elif self.content == "parts" and isinstance(content, str):
            done["content"] = [{"type": "text", "text": content}]
        if isinstance(message.get("tool_calls"), list):
            done["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return done

    def _call(self, call: Any) -> Any:
        arguments = _arguments(call)
        if self.arguments == "objects" and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                found = json.loads(arguments)
                arguments = found if isinstance(found, dict) else arguments
        if self.arguments == "texts" and isinstance(arguments, dict):
            with suppress(TypeError, RecursionError):
                arguments = json.dumps(arguments, ensure_ascii=False)
        return _with_arguments(call, arguments)


# Arguments are objects, as transformers documents them, before they are texts, as OpenAI's API has them.
_CONTENTS, _ARGUMENTS = ("as given", "texts", "parts"), ("objects", "texts")
_FORMS = [_Form(content=content, arguments=arguments) for arguments in _ARGUMENTS for content in _CONTENTS]


def _is_text_parts(content: Any) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _arguments(call: Any) -> Any:
    # Of a call, in the form that OpenAI has given it.
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _with_arguments(call: Any, arguments: Any) -> Any:
    return call if arguments is None else call | {"function": call["function"] | {"arguments": arguments}}


def _is_spelt(chat: Sequence[Message], text: str) -> bool:
    # Whether a text has parts or arguments of the chat as Python, or JSON in JSON, spells them.
    for message in chat:
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list) and content and str(content) in text:
            return True
        for call in calls if isinstance(calls, list) else ():
            arguments = _arguments(call)
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return True
            if isinstance(arguments, str) and (
                json.dumps(arguments) in text or json.dumps(arguments, ensure_ascii=False) in text
            ):
                return True
    return False


# What a chat template is given in any case.
_GIVEN = frozenset({"messages", "add_generation_prompt", "strftime_now", "raise_exception"})
_THOUGHT_TOKENS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thought>", "</thought>"))


def _thought_tokens(tokenizer: Any) -> tuple[str, str] | None:
    # The tokens that open and close a thought.
    vocabulary = tokenizer.get_vocab()
    return next((pair for pair in _THOUGHT_TOKENS if all(token in vocabulary for token in pair)), None)


class _Kind(NamedTuple):
    """The signs by which a chat template may tell messages: the role, and the keys and types of what one says."""

    role: str
    says: tuple[tuple[str, type], ...]
    several: bool  # whether the content has parts, and more than one
    pictured: bool  # whether some of them are places of images
    arguments: tuple[type, ...]  # of tool calls


_Kinds = tuple[_Kind, ...]
_MOST_KINDS = 10_000  # sequences of kinds that are remembered
_MOST_PARTS = 100  # of a message that are tried


def _kinds(chat: Sequence[Message]) -> _Kinds | None:
    # None if a value is nested too deeply.
    try:
        return tuple(map(_kind, chat))
    except RecursionError:
        return None


def _kind(message: Message) -> _Kind:
    more, calls = _saying_more(message), message.get("tool_calls")
    says = tuple((key, type(more[key])) for key in more if more[key] != message[key])
    content = message.get("content")
    several = isinstance(content, list) and len(content) > 1
    pictured = isinstance(content, list) and PLACE in content
    arguments = tuple(type(_arguments(call)) for call in calls) if isinstance(calls, list) else ()
    return _Kind(message["role"], says, several, pictured, arguments)


def _saying_more(message: Message) -> Message:
    # The message with a letter after each text that it says; the same where it says nothing.
    said = {"content": _longer_parts, "tool_calls": _longer}
    return message | {key: longer(message[key]) for key, longer in said.items() if key in message}


def _saying_more_once(message: Message) -> Iterator[Message]:
    # The same, with one text part at a time where there are any: some templates write only one of them.
    content = message.get("content")
    if not _is_text_parts(content) or len(content) < 2:
        yield _saying_more(message)
        return
    for at, part in enumerate(content[:_MOST_PARTS]):
        if part["text"].strip():
            yield message | {"content": [*content[:at], part | {"text": _longer(part["text"])}, *content[at + 1 :]]}


def _longer_parts(content: Any) -> Any:
    # Of the parts of a message, templates write only texts as they are.
    if not isinstance(content, list):
        return _longer(content)
    texts = [isinstance(part, dict) and "text" in part for part in content]
    return [part | {"text": _longer(part["text"])} if own else part for part, own in zip(content, texts, strict=True)]


def _longer(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}x" if value.strip() else value
    if isinstance(value, dict):
        return {key: _longer(item) for key, item in value.items()}
    return [_longer(item) for item in value] if isinstance(value, list) else value


_VARIABLES = ("label", "labels")


def rationale_texts(template: str, labels: Sequence[str]) -> dict[str, str]:
    """The text between a row's prompt and the model's continuation, for each of these answers, by label.

    Raises UsageError for a template with a syntax error or another variable, and for one that gives no text.
    """
    return _texts_of(_rationale_template(template), labels)


def _texts_of(render: Callable[[dict[str, Any]], str], labels: Sequence[str]) -> dict[str, str]:
    texts = {}
    for label in labels:
        try:
            texts[label] = render({"label": label, "labels": list(labels)})
        except Exception as error:  # whatever an expression raises
            raise UsageError(f"--rationale-template: cannot be rendered for {label!r}: {brief(error)}") from None
        if not texts[label].strip():
            raise UsageError(
                f"--rationale-template: it gives no text for the answer {label!r}\n"
                "write what a rationale begins with, like '{{ label }} because'"
            )
    return texts


def _rationale_template(template: str) -> Callable[[dict[str, Any]], str]:
    try:
        render, names = compile_template(template, "--rationale-template")
    except TemplateSyntaxError as error:
        raise UsageError(
            f"--rationale-template: line {error.lineno}: {error.message}\nwrite Jinja text, like "
            "'{{ label }} because'"
        ) from None
    except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        raise UsageError(f"--rationale-template: cannot be compiled: {brief(error)}") from None
    for name in names:
        if name not in _VARIABLES:
            raise UsageError(
                f"--rationale-template: there is no variable {name}{did_you_mean(name, _VARIABLES)}\n"
                "it may use label, the row's answer, and labels, all of them"
            )
    return render


# After a prompt: the label, and the words of a template that a model continues.


_WORD = "x"  # before a text that follows a prompt's last word
OWN_WORDS = 256  # the most tokens of such words, with a row's own label


class Beginnings:
    """The tokens after which a text begins, by the prompt's labels and the one that it got.

    The `template` gives the words for each label (`rationale_texts`); rows may have their own labels.
    """

    def __init__(self, tokenizer: Any, labels: Labels, template: str) -> None:
        self._encoder = Encoder(tokenizer)
        self._render = _rationale_template(template)
        self._names = labels.names
        self._texts = list(_texts_of(self._render, labels.names).values())
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, labels: LabelSet, label: int) -> tuple[int, ...]:
        """The tokens after a prompt with these labels that got this one; none where the template gives no text for a
        row's own, or more than `OWN_WORDS` tokens."""
        own = tuple(labels.spellings[label][0].tolist())
        if len(own) > 1 and own[-1] == self._encoder.tokenizer.eos_token_id:  # of --label-end: the text goes on
            own = own[:-1]
        if labels.texts:
            try:
                text, name = _texts_of(self._render, labels.texts)[labels.texts[label]], labels.texts[label].strip()
                found = self._encoded(own, name, text.strip(), literal=True)
            except (UsageError, NotLiteral):
                return ()
            return found if len(found) <= OWN_WORDS else ()
        if (own, label) not in self._known:
            self._known[own, label] = self._encoded(own, self._names[label], self._texts[label].strip())
        return self._known[own, label]

    def text(self, beginning: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of `tokens` after a beginning, without special tokens and surrounding white space."""
        before, whole = self._decode(beginning), self._decode([*beginning, *tokens])
        return (whole[len(before) :] if whole.startswith(before) else self._decode(tokens)).strip()

    def _encoded(self, own: tuple[int, ...], name: str, text: str, *, literal: bool = False) -> tuple[int, ...]:
        # A label's own tokens, as it is scored, and the tokens after it. A text that does not begin with the label
        # follows a space if the label does. With `literal` no part of it becomes a control token.
        if text.startswith(name):
            return (*own, *self._following(name, text[len(name) :], literal))
        # Whether its tokens bring the space before a word.
        spaced = self._encoder.decode([*self._ids(_WORD), *own])[len(_WORD) :].startswith(" ")
        return tuple(self._following(_WORD, f" {text}", literal) if spaced else self._ids(text, literal))

    def _following(self, before: str, text: str, literal: bool) -> list[int]:
        # The tokens of a text after another one.
        first, whole = self._ids(before, literal), self._ids(before + text, literal)
        return whole[len(first) :] if whole[: len(first)] == first else self._ids(text, literal)

    def _ids(self, text: str, literal: bool = False) -> list[int]:
        controls = self._encoder.controls
        literal = literal and controls.may_be_in(text, joined=False) and controls.literal_backend is not None
        return self._encoder.encode([text], special=False, literal=literal)[0].tolist() if text else []

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._encoder.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
