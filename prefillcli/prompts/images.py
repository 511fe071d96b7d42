"""Images in prompts: read from a row's columns and chats, and put where the chat template has their places."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from prefillcli.errors import counted
from prefillcli.images.image import FEATURE, FIRST_FEATURE, ImageError, ImageLayout, PlacedImage, RowImage
from prefillcli.images.numbers import FeatureNumbers
from prefillcli.rows.records import ErrorCode, RowError
from prefillcli.stats.arrays import Int32Array

PLACE: dict[str, str] = {"type": "image"}  # a part of a message where an image of the row stands
_KINDS = ("image", "image_url", "input_image")  # of parts with an image
_HELD = ("image", "image_url", "url", "path", "base64", "bytes", "data")  # keys of a part that may hold it


class Processing(Protocol):
    """What a model's processor makes of images: see `models/image_processing.py`."""

    placeholder: int
    written: str
    around: tuple[str, str]

    def layout(self, width: int, height: int, several: bool = False) -> ImageLayout:
        """Return the tokens of an image of this size."""


class PlacedTokens(NamedTuple):
    """The tokens of a prompt with its images, int32 [tokens], their positions where they are not 0, 1, 2, ..., and how
    many of the tokens stand for images."""

    tokens: Int32Array
    images: tuple[PlacedImage, ...]
    positions: Int32Array | None
    of_images: int


class ImagePlaces:
    """Puts images into the prompts of one model; equal images have equal numbers, whoever builds the prompts.

    The model's processor is opened at the first image, by `open_processing`, which raises UsageError. Threads may
    share it.
    """

    def __init__(self, open_processing: Callable[[], Processing], numbers: FeatureNumbers) -> None:
        self._open = open_processing
        self._numbers = numbers
        self._lock = threading.RLock()
        self._processing: Processing | None = None

    @property
    def processing(self) -> Processing:
        """The model's processor."""
        with self._lock:
            if self._processing is None:
                self._processing = self._open()
            return self._processing

    @property
    def written(self) -> str:
        """The text of the token that stands for an image in a rendered chat."""
        return self.processing.written

    def spaced(self, text: str) -> str:
        """A rendered text with what the model's images have around them, as far as it is text that is tokenised with
        its neighbours."""
        before, after = self.processing.around
        written = self.written
        return text.replace(written, before + written + after) if before or after else text

    def layout(self, image: RowImage, *, several: bool = False) -> ImageLayout:
        """The tokens of an image. Raises ImageError for one that the processor refuses."""
        with self._lock:
            return self.processing.layout(image.width, image.height, several)

    def put(self, tokens: Int32Array, images: Sequence[RowImage]) -> PlacedTokens | RowError:
        """The tokens of a prompt with these images where placeholders stand, one for each, in their order."""
        places = np.flatnonzero(tokens == self.processing.placeholder)
        if len(places) != len(images):
            return RowError(ErrorCode.CHAT_ERROR, _unlike(len(places), len(images)))
        several = len(images) > 1
        try:
            layouts = [self.layout(image, several=several) for image in images]
        except ImageError as error:
            return RowError(ErrorCode.INVALID_IMAGE, str(error))
        placed = tuple(
            replace(
                self._numbers.placed(image, layout.features, several=several),
                tokens=len(layout.tokens),
                operations=layout.operations,
            )
            for image, layout in zip(images, layouts, strict=True)
        )
        pieces: list[Int32Array] = []
        at = 0
        for place, layout, own in zip(places.tolist(), layouts, placed, strict=True):
            pieces += [tokens[at:place], _numbered(layout, own)]
            at = place + 1
        whole = np.concatenate([*pieces, tokens[at:]]).astype(np.int32)
        return PlacedTokens(whole, placed, _positions(whole, placed, layouts), sum(len(e.tokens) for e in layouts))


def _unlike(places: int, images: int) -> str:
    found = "no place" if not places else counted(places, "place")
    return f"the prompt has {found} for an image, and the row has {counted(images, 'image')}"


def _numbered(layout: ImageLayout, placed: PlacedImage) -> Int32Array:
    # The tokens of an image, with the numbers of its features.
    tokens = layout.tokens.copy()
    features = tokens == FEATURE
    tokens[features] = np.arange(placed.first, placed.first + placed.features)
    return tokens


def _positions(tokens: Int32Array, images: Sequence[PlacedImage], layouts: Sequence[ImageLayout]) -> Int32Array | None:
    # The base position of each token: text counts on by 1, the features of an image all have the position at which it
    # begins, and what comes after it is its `advance` later.
    if all(layout.offsets is None for layout in layouts):
        return None
    steps = np.ones(len(tokens), np.int32)
    features = np.flatnonzero(tokens >= FIRST_FEATURE)
    at = 0
    for placed, layout in zip(images, layouts, strict=True):
        own = features[at : at + placed.features]
        at += placed.features
        if layout.offsets is not None and len(own):
            steps[own] = 0
            steps[own[-1]] = layout.advance
    return np.concatenate([[0], np.cumsum(steps[:-1])]).astype(np.int32)


@dataclass(frozen=True)
class PromptImages:
    """The images of a job's rows.

    Those in `columns` stand before a row's text. `read` makes images of a value: a file, a path, a URL, or a list of
    these; it raises ImageError. With the `places` of a model they come into its prompts.
    """

    columns: tuple[str, ...]
    read: Callable[[Any], Sequence[RowImage]]
    places: ImagePlaces

    def of_columns(self, values: Sequence[Any]) -> list[RowImage]:
        """Return the images of a row's columns, in their order. Raises ImageError that names the column."""
        found: list[RowImage] = []
        for name, value in zip(self.columns, values, strict=True):
            if value is None or value == "" or (isinstance(value, list) and not value):
                continue
            try:
                found += self.read(value)
            except ImageError as error:
                raise ImageError(f"column {name}: {error}") from None
        return found

    def in_chat(self, chat: list[Any], first: Sequence[RowImage]) -> tuple[list[Any], list[RowImage]]:
        """Return the messages with `PLACE` for each image, and the images in their order.

        The images of columns, `first`, come where the chat has places without an image; without any, to the front of
        the last message of the user. Raises ImageError.
        """
        found: list[list[RowImage | None]] = []
        messages: list[Any] = []
        for number, message in enumerate(chat, 1):
            message, own = self._of_message(message, number)
            messages.append(message)
            found.append(own)
        free = sum(image is None for own in found for image in own)
        if free and free != len(first):
            raise ImageError(
                f"the messages have {counted(free, 'part')} for an image without one, and the row has "
                f"{counted(len(first), 'image')} in its columns"
            )
        if not free and first:
            at = _last_of_user(messages)
            messages[at] = _with_places(messages[at], len(first))
            found[at] = [*first, *found[at]]
        given = iter(first)
        return messages, [next(given) if image is None else image for own in found for image in own]

    def _of_message(self, message: Any, number: int) -> tuple[Any, list[RowImage | None]]:
        # A message with its own images; None for a part that has none.
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message, []
        parts: list[Any] = []
        found: list[RowImage | None] = []
        for part in content:
            if not is_image(part):
                parts.append(part)
                continue
            value = _held(part)
            try:
                own: Sequence[RowImage | None] = [None] if value is None else self.read(value)
                if not own:
                    raise ImageError("a part of it is an image, and empty")
            except ImageError as error:
                raise ImageError(f"message {number}: {error}") from None
            parts += [PLACE] * len(own)
            found += own
        return {**message, "content": parts}, found


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, dict) and (part.get("type") or next(iter(part), "")) in _KINDS


def _held(part: Mapping[str, Any]) -> Any:
    # The image in a part: a file, a path or URL, or an object with one.
    value = next((part[key] for key in _HELD if part.get(key) is not None), None)
    if isinstance(value, dict) and "url" in value:
        return value["url"]
    return value


def _last_of_user(messages: Sequence[Any]) -> int:
    at = [at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
    if not at:
        raise ImageError("the chat has no message of the user, before which the row's images would stand")
    return at[-1]


def _with_places(message: Mapping[str, Any], count: int) -> dict[str, Any]:
    # A message with places for images before what it says.
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return {**message, "content": [*([PLACE] * count), *parts]}
