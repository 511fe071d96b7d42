"""The models of a job, ready to work: the engine, small models beside it, and what they have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prefillcli.engines.base import Engine
from prefillcli.models.open import Opened
from prefillcli.options.settings import JobSettings

if TYPE_CHECKING:
    from prefillcli.walk.walk import LayerWalk

AnyEngine = TypeVar("AnyEngine", bound=Engine, covariant=True)


@dataclass(slots=True)
class Models(Generic[AnyEngine]):
    """Models ready to work.

    A resumed run must take over what is `settled`, so that it cuts the same packs. `before` is that of an earlier
    attempt with the same settings, else empty. With `planned` another worker has settled it for all.
    """

    engine: AnyEngine
    opened: Opened
    settings: JobSettings
    settled: dict[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    budget: int = 0
    """Bytes that one pack may take."""
    pack_seconds: float = 0.0  # as of `Loaded`
    small: Sequence[Any] = ()
    """The weights of the small models beside the model."""
    beside: dict[str, Any] = field(default_factory=dict)
    """The things loaded beside the model: `draft`, `first`."""
    _small_walks: dict[int, LayerWalk] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)

    def small_walk(self, number: int = 0, chunk_tokens: int | None = None) -> LayerWalk:
        """Return a walk over a small model, which all users share in turn. The first one sets the number of tokens of
        a chunk."""
        from prefillcli.models.law import choose_chunk, memory_law
        from prefillcli.walk.narrow import in_smaller_numbers
        from prefillcli.walk.walk import FASTEST, LayerWalk

        if number not in self._small_walks:
            small = self.opened.small[number].files
            if chunk_tokens is None:
                chunk_tokens = choose_chunk(memory_law(small.config, small.dtype), self.budget, self.opened.device)
            model, narrow = self.small[number], self.opened.small[number].narrow
            how = FASTEST if narrow is None else in_smaller_numbers(model, narrow)
            walk = self._small_walks[number] = LayerWalk(model, chunk_tokens=chunk_tokens, arithmetic=how)
            self._closing.callback(walk.close)
        return self._small_walks[number]

    def held_bytes(self) -> int:
        """Return the most bytes of the budget that K,V take which the engine keeps between packs."""
        from prefillcli.models.law import memory_law

        if self.settings.packs.prefix_kv not in ("auto", "keep"):
            return 0
        return (
            self.engine.limits.held_tokens
            * memory_law(self.opened.files.config, self.opened.files.dtype).all_key_values
        )

    def add(self, name: str, found: Any) -> None:
        """Keep something beside the model, under this name, until it is closed with it; None: nothing."""
        if found is not None:
            self.beside[name] = found
            self._closing.callback(found.close)

    def close(self) -> None:
        with self._closing:
            self.engine.close()
