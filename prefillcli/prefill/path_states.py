"""States of modules that read a path token by token: forked where a pack's tree forks, dropped when nobody needs them.

Recurrent modules and layers with a cache of their own read the tokens of one node at a time, behind the state that
the end of its parent left. A state is whatever they keep between two calls. States are those of one layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from prefillcli.prefill.layout import Tree

State = TypeVar("State")


class NodeRun(NamedTuple):
    """Tokens `start:end` of a pack, all of one node."""

    node: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def node_runs(tree: Tree, start: int, end: int) -> list[NodeRun]:
    """Tokens `start:end` of a pack, node by node."""
    runs = []
    at = start
    node = bisect_right(tree.offsets, start) - 1
    while at < end:
        after = min(tree.offsets[node + 1], end)
        if after > at:
            runs.append(NodeRun(node, at, after))
        at, node = after, node + 1
    return runs


class PathStates(Generic[State]):
    """The states in a layer, by the node whose tokens they have read.

    `kept` are nodes whose last states are asked for at the end, with `end_of`. `given` are the states that roots begin
    behind, where that is not nothing; they are not changed. `fork` makes a copy that can be changed.
    """

    def __init__(
        self,
        tree: Tree,
        fork: Callable[[State], State],
        *,
        kept: Collection[int] = (),
        given: Mapping[int, State] | None = None,
    ) -> None:
        self._tree = tree
        self._fork = fork
        self._kept = frozenset(kept)
        self._given = dict(given or {})
        self._children = [0] * len(tree.parents)  # that have not begun
        for parent in tree.parents:
            if parent >= 0:
                self._children[parent] += 1
        self._states: dict[int, State] = {}
        self._read: set[int] = set()  # nodes whose states are with somebody who reads them

    def before(self, run: NodeRun) -> State | None:
        """The state that a run reads on from, to be changed; None at the beginning of a prompt."""
        state, alone = self._take(run)
        return state if state is None or alone else self._fork(state)

    def read(self, run: NodeRun) -> State | None:
        """`before`, not to be changed; nor does anything else change it."""
        self._read.add(self._tree.parents[run.node])
        return self._take(run)[0]

    def _take(self, run: NodeRun) -> tuple[State | None, bool]:
        """The state before a run, and whether nothing else begins with it."""
        if run.start > self._tree.offsets[run.node]:
            return self._states.pop(run.node), True
        parent = self._tree.parents[run.node]
        if parent < 0:
            return self._given.get(run.node), False
        self._children[parent] -= 1
        if self._children[parent] or parent in self._kept:
            return self._states[parent], False
        return self._states.pop(parent), parent not in self._read

    def needed(self, run: NodeRun) -> bool:
        """Whether anything reads on behind a run."""
        unfinished = run.end < self._tree.offsets[run.node + 1]
        return unfinished or self._children[run.node] > 0 or run.node in self._kept

    def after(self, run: NodeRun, state: State) -> None:
        """Put the state behind a run aside, if it is `needed`."""
        if self.needed(run):
            self._states[run.node] = state

    def end_of(self, node: int) -> State:
        """The state behind a kept node."""
        return self._states[node]
