"""Recurrent modules inside layers: state-space models, gated delta nets, short convolutions.

Such a module reads tokens one after the other after the state of those before. A chunk holds tokens of several nodes,
so during its layer's turn the module is called for each node's tokens by themselves, after the state that the
parent's end left. The module's own forward computes, with a cache of transformers that holds this state. The rest of
the layer stays one call for the whole chunk.

Tokens that no node follows leave no state, so those of many nodes are one call, padded on the right.
"""

from __future__ import annotations

import copy
import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.layout import Tree, group_runs

# States of recurrent modules, as transformers' caches hold them: copied, stacked to a batch, taken out of one.


MOST_STATES = 8  # that a module keeps under its own numbers


def fork_state(state: LinearAttentionLayer) -> LinearAttentionLayer:
    """A copy of a state that can be changed."""
    return changed_state(state, lambda own: own.clone(memory_format=torch.contiguous_format))


def stack_states(states: Sequence[LinearAttentionLayer]) -> LinearAttentionLayer | None:
    """The states of several runs as those of one batch; None if there are none."""
    if not states:
        return None
    every = zip(*map(tensors_of, states), strict=True)
    return changed_state(states[0], lambda own: torch.cat(next(every)))


def changed_state(state: LinearAttentionLayer, change: Callable[[Tensor], Tensor]) -> LinearAttentionLayer:
    """A copy with other tensors, which are made in the order of `tensors_of`."""
    changed = copy.copy(state)
    vars(changed).update({name: dict(own) for name, own in vars(state).items() if isinstance(own, dict)})
    for own in (changed.conv_states, changed.recurrent_states):
        own.update({number: change(each) for number, each in own.items() if each is not None})
    return changed


def pick_states(state: LinearAttentionLayer, rows: Sequence[int]) -> LinearAttentionLayer:
    """Some of the stacked states, as a copy."""
    return changed_state(state, lambda own: own[torch.as_tensor(rows, dtype=torch.long, device=own.device)])


def tensors_of(state: LinearAttentionLayer) -> list[Tensor]:
    """All tensors of a state, in the same order for states of the same module."""
    return [each for own in (state.conv_states, state.recurrent_states) for each in own.values() if each is not None]


# States of modules that read a path token by token: forked where a pack's tree forks, and dropped as soon as possible.
#
# Recurrent modules and layers with a cache of their own read the tokens of one node at a time, after the state that
# the end of its parent left. A state is everything that they keep between two calls. All states here belong to one
# layer.


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
    after, for roots that have some; they are not changed. `fork` makes a copy that can be changed.
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
        self._read: set[int] = set()  # nodes whose states a reader holds

    def before(self, run: NodeRun) -> State | None:
        """The state that a run reads on from, to be changed; None at the beginning of a prompt."""
        state, alone = self._take(run)
        return state if state is None or alone else self._fork(state)

    def read(self, run: NodeRun) -> State | None:
        """`before`, not to be changed; nothing else changes it either."""
        self._read.add(self._tree.parents[run.node])
        return self._take(run)[0]

    def _take(self, run: NodeRun) -> tuple[State | None, bool]:
        # The state before a run, and whether nothing else begins with it.
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
        """Return whether anything reads on after a run."""
        unfinished = run.end < self._tree.offsets[run.node + 1]
        return unfinished or self._children[run.node] > 0 or run.node in self._kept

    def after(self, run: NodeRun, state: State) -> None:
        """Put the state after a run aside, if it is `needed`."""
        if self.needed(run):
            self._states[run.node] = state

    def end_of(self, node: int) -> State:
        return self._states[node]


RUN_TOKENS = 512  # of one call; more tokens are computed in parts, one after the other
STATE_BYTES = 64 << 20  # of the states in one call

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHES = ("cache_params", "past_key_values")
_SCAN = "mamba_selective_scan"
_STEP = "mamba2_selective_state_update"

#: The states that the scans of the running call begin with, in the order of the scans.
_scan_states: ContextVar[Iterator[Tensor] | None] = ContextVar("scan_states", default=None)

#: The least and the longest time step of the running call.
_step_limit: ContextVar[tuple[float, float] | None] = ContextVar("step_limit", default=None)


def recurrent_modules(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that keep states in a cache of transformers. Raises UnsupportedModelError."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in layer.modules()]
    found = [module for module, kind in kinds if _updates_states(kind)]
    if any(module is layer for module in found):
        raise UnsupportedModelError(f"{type(layer).__name__} keeps states of its own, which the walk does not know")
    return found


class LayerRecurrence:
    """The recurrent modules of one layer, during its turn in the walk over a pack.

    `kept` are nodes whose last states are asked for; `given` are the states that roots begin after, one of each
    module. Before each call of the layer, `chunk` sets the tokens of the pack that it computes. A `read` computes the
    calls, instead of the fastest way.
    """

    def __init__(
        self,
        layer: nn.Module,
        tree: Tree,
        *,
        kept: Collection[int] = (),
        given: Mapping[int, Sequence[LinearAttentionLayer]] | None = None,
        read: ReadRuns | None = None,
    ) -> None:
        self._modules = recurrent_modules(layer)
        self._tree = tree
        self._read = read
        self._runs: list[NodeRun] = []
        self._states = [
            PathStates(tree, fork_state, kept=kept, given={root: own[at] for root, own in (given or {}).items()})
            for at in range(len(self._modules))
        ]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def __enter__(self) -> Self:
        for module, states in zip(self._modules, self._states, strict=True):
            kind: Any = type(module)
            _go_through(kind, _SCAN, _begun)
            _go_through(kind, _STEP, _limited)
            forward = module.forward
            module.forward = lambda *a, _m=module, _f=forward, _s=states, **k: self._call(_m, _f, _s, a, k)
        return self

    def __exit__(self, *exc: object) -> None:
        for module in self._modules:
            del module.forward

    def chunk(self, start: int, end: int) -> None:
        """The next call of the layer computes the pack's tokens `start:end`."""
        self._runs = node_runs(self._tree, start, end) if self._modules else []

    def end_of(self, node: int) -> tuple[LinearAttentionLayer, ...]:
        """The states after a kept node, one of each module."""
        return tuple(states.end_of(node) for states in self._states)

    def _call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        states: PathStates[LinearAttentionLayer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = ModuleCall(module, forward, args, kwargs, self._runs[-1].end - self._runs[0].start)
        first = self._runs[0].start
        if self._read is not None:
            self._read(call, self._runs, self._tree, states)
            return call.output
        ends: list[tuple[NodeRun, LinearAttentionLayer | None]] = []
        for run in self._runs:
            if states.needed(run) or run.tokens > RUN_TOKENS:
                state = states.before(run)
                for start in range(run.start, run.end, RUN_TOKENS):
                    state = state or LinearAttentionLayer(number_of_states=MOST_STATES)
                    call.compute(slice(start - first, min(start + RUN_TOKENS, run.end) - first), state)
                if state is not None:
                    states.after(run, state)
            else:
                ends.append((run, states.read(run)))
        for fresh in (True, False):
            call.compute_ends([(run.start - first, run.end - first, s) for run, s in ends if (s is None) is fresh])
        return call.output


class ModuleCall:
    """One call of a module over a chunk, computed in parts."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: int,
    ) -> None:
        self._module, self._forward, self._tokens = module, forward, tokens
        bound = inspect.signature(forward).bind(*args, **kwargs)
        self._given: dict[str, Any] = bound.arguments | bound.arguments.pop("kwargs", {})
        self._given.pop("attention_mask", None)  # a pack has no padding
        self._cache = next(name for name in _CACHES if name in inspect.signature(forward).parameters)
        self.device = next(value.device for value in self._given.values() if self._is_rows(value))
        self._outputs: list[Tensor] = []
        self._single = True

    @property
    def output(self) -> Any:
        """The module's output for the whole chunk."""
        return self._outputs[0] if self._single else tuple(self._outputs)

    def compute(self, tokens: slice, state: LinearAttentionLayer) -> None:
        """Some consecutive tokens, after a state that is changed."""
        count = tokens.stop - tokens.start
        for place, rows in self._places(self._forward_rows(lambda value: value[:, tokens], (1, count), state)):
            place[:, tokens] = rows

    def compute_steps(self, state: LinearAttentionLayer) -> None:
        """Each token by itself, after its own of the stacked states, which are changed."""
        out = self._forward_rows(lambda value: value.transpose(0, 1), (self._tokens, 1), state)
        for place, rows in self._places(out):
            place[0] = rows[:, 0]

    def compute_ends(self, runs: list[tuple[int, int, LinearAttentionLayer | None]]) -> None:
        """Runs of tokens that no node follows: all with a state, or all without."""
        states = {(start, end): state for start, end, state in runs}
        for group in group_runs([(start, end) for start, end, _ in runs], self.device):
            first, most = states[group.runs[0]], len(group.runs)
            if first is not None:
                most = max(1, STATE_BYTES // max(1, sum(tensor.nbytes for tensor in tensors_of(first))))
            for at in range(0, len(group.runs), most):
                part = slice(at, at + most)
                index, valid = group.index[part], group.valid[part]
                before = stack_states([state for run in group.runs[part] if (state := states[run]) is not None])
                self.put(index, valid, self.compute_at(index, before))

    @property
    def kind(self) -> Hashable:
        """Everything but the tokens that may decide how a library computes the module."""
        weights = ((tuple(each.shape), each.dtype, each.device) for each in self._module.parameters())
        return type(self._module), tuple(weights)

    def compute_at(self, index: Tensor, state: LinearAttentionLayer | None) -> Any:
        """The module's output for the tokens `index` [runs, tokens], each run after its own of the stacked states,
        which are changed."""

        def pick(value: Tensor) -> Tensor:
            return value[0].index_select(0, index.flatten()).view(*index.shape, *value.shape[2:])

        return self._forward_rows(pick, tuple(index.shape), state)

    def put(self, index: Tensor, valid: Tensor, out: Any) -> None:
        """Take an output of `compute_at` for those tokens that are `valid`."""
        for place, rows in self._places(out):
            place[0].index_copy_(0, index[valid], rows[valid])

    def _forward_rows(
        self, pick: Callable[[Tensor], Tensor], shape: tuple[int, ...], state: LinearAttentionLayer | None
    ) -> Any:
        # The module's own forward over some of its input's rows: `shape` is their (runs, tokens).
        given = {name: pick(value) if self._is_rows(value) else value for name, value in self._given.items()}
        given[self._cache] = None if state is None else _OneLayer(state)
        begins = None
        if state is not None and state.has_previous_state[0] and shape[1] > 1:
            begins = _in_order(state.recurrent_states[0])
        token = _scan_states.set(begins)
        limit = _step_limit.set(getattr(self._module, "time_step_limit", None))
        try:
            with _short_scans(self._module, shape[1]):
                out = self._forward(**given)
        finally:
            _scan_states.reset(token)
            _step_limit.reset(limit)
        if shape[1] == 1 < shape[0] and isinstance(out, Tensor) and out.shape[:2] == (shape[0], shape[0]):
            # Falcon-H1's norm drops the side of a single token, so that every row meets every other row's gate.
            out = out.diagonal(dim1=0, dim2=1).T[:, None]
        if any(part.shape[:2] != shape for part in ([out] if isinstance(out, Tensor) else out)):
            raise UnsupportedModelError(f"{type(self._module).__name__} does not give a row for each token")
        return out

    def _is_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, self._tokens)

    def _places(self, out: Any) -> Iterator[tuple[Tensor, Tensor]]:
        # The tensors of the output for the whole chunk, each with the output of a part.
        self._single = isinstance(out, Tensor)
        parts = [out] if self._single else list(out)
        if not self._outputs:
            self._outputs = [part.new_empty(1, self._tokens, *part.shape[2:]) for part in parts]
        yield from zip(self._outputs, parts, strict=True)


# Computes a call over these runs of a chunk, parents before their children, with the states between them.
ReadRuns = Callable[[ModuleCall, Sequence[NodeRun], Tree, PathStates[LinearAttentionLayer]], None]


class _OneLayer(Cache):  # type: ignore[misc]  # it has no types
    def __init__(self, state: LinearAttentionLayer) -> None:
        super().__init__(layers=_Same(state))
        self._state = state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._state.has_previous_state[state_idx or 0])


class _Same(list[Any]):
    def __init__(self, item: Any) -> None:
        super().__init__([item])

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


@cache
def _updates_states(kind: Any) -> bool:
    if kind.__module__.startswith("torch."):
        return False
    methods = [
        inspect.unwrap(each) for base in kind.__mro__ for each in vars(base).values() if inspect.isfunction(each)
    ]
    return any(_UPDATES & set(method.__code__.co_names) for method in methods)


@contextmanager
def _short_scans(module: nn.Module, tokens: int) -> Iterator[None]:
    # Scans pad to whole parts of `module.chunk_size` tokens, so shorter runs are one shorter part.
    size = getattr(module, "chunk_size", None)
    if not isinstance(size, int) or tokens >= size:
        yield
        return
    parts: Any = module
    parts.chunk_size = min(size, max(16, 1 << (tokens - 1).bit_length()))
    try:
        yield
    finally:
        parts.chunk_size = size


# Scans of Mamba's first version cannot begin with a state. They are linear in it, so its contribution is added here.


def _in_order(state: Tensor | None) -> Iterator[Tensor] | None:
    # The state that each scan of a module's call begins with: some modules have one scan, some one for each of their
    # heads.
    if state is None:
        return None
    return iter([state]) if state.dim() == 3 else (state[:, head] for head in count())


def _begun(scan: Callable[..., Any], given: inspect.BoundArguments) -> Any:
    # A scan that begins with the next state of the running call.
    states = _scan_states.get()
    if states is None:
        return scan(*given.args, **given.kwargs)
    with_last = given.arguments["return_last_state"]
    given.arguments["return_last_state"] = True
    out, last = scan(*given.args, **given.kwargs)
    out, last = _add_first_state(out, last, next(states), given.arguments)
    return (out, last) if with_last else out


def _add_first_state(out: Tensor, last: Tensor, first: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    # A scan's output [batch, width, tokens] and last state [batch, width, states], if it begins with `first`.
    dt = given["dt"]
    if given["delta_bias"] is not None:
        dt = dt + given["delta_bias"].to(dt.dtype)[..., None]
    if given["delta_softplus"]:
        dt = nn.functional.softplus(dt)
    # h(t) = exp(A dt(t)) h(t - 1) + B u(t) is linear: beginning with h(0) adds exp(A (dt(1) + ... + dt(t))) h(0) to
    # h(t), and C times that to the output.
    behind = torch.cumsum(dt.float(), dim=-1)
    begins, reads = first.float(), given["C"].float()
    added = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    for start in range(0, out.shape[-1], 64):  # [batch, width, tokens, states] at a time
        part = slice(start, start + 64)
        left = torch.exp(given["A"][None, :, None, :].float() * behind[:, :, part, None]) * begins[:, :, None, :]
        added[:, :, part] = torch.einsum("bdls,bsl->bdl", left, reads[:, :, part])
    if given["z"] is not None:
        added *= nn.functional.silu(given["z"].float())
    decayed = torch.exp(given["A"][None].float() * behind[:, :, -1, None]) * begins
    return out + added.to(out.dtype), last + decayed.to(last.dtype)


# A single token after a state is its own step in Mamba's second version, and steps forget the limits of time
# that scans keep to.


def _limited(step: Callable[..., Any], given: inspect.BoundArguments) -> Any:
    # A step that keeps to the time limits of the running call.
    limit = _step_limit.get()
    if limit is not None:
        dt, bias = given.arguments["dt"], given.arguments["dt_bias"]
        if bias is not None:
            dt = dt + bias.to(dt.dtype)
        if given.arguments["dt_softplus"]:
            dt = nn.functional.softplus(dt)
        given.arguments |= {"dt": dt.clamp(*limit), "dt_bias": None, "dt_softplus": False}
    return step(*given.args, **given.kwargs)


@cache
def _go_through(kind: Any, name: str, through: Callable[[Callable[..., Any], inspect.BoundArguments], Any]) -> None:
    # Redirect calls of the function that a module's class knows by this name `through` another, with all arguments.
    home = sys.modules[kind.__module__]
    own = getattr(home, name, None)
    if own is None or hasattr(own, "goes_through"):
        return
    signature = inspect.signature(own)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return through(own, given)

    call.goes_through = through  # type: ignore[attr-defined]
    setattr(home, name, call)


# Recurrent modules over new tokens of several branches, in decoding.


class BranchRecurrence:
    """The recurrent modules of one layer over new tokens of several branches.

    `ends` are the states after each branch so far, one of each module. They stay as they are.
    """

    def __init__(self, ends: Sequence[Sequence[LinearAttentionLayer]]) -> None:
        self._branches = len(ends)
        self._states = [stack_states(own) for own in zip(*ends, strict=True)]

    def __bool__(self) -> bool:
        return bool(self._states)

    def keep(self, branches: Sequence[int]) -> None:
        """Go on with these branches alone, under new numbers: 0, 1, 2 ..."""
        self._branches = len(branches)
        self._states = [pick_states(state, branches) for state in self._states]

    @contextmanager
    def calls(self, layer: nn.Module, branches: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """In this context the layer computes this many tokens of each branch, one branch after the other."""
        modules = (
            recurrent_modules(layer) if self._states else []
        )  # weights that are streamed come back in other modules
        for at, module in enumerate(modules):
            forward = module.forward
            module.forward = lambda *a, _m=module, _f=forward, _at=at, **k: self._call(
                ModuleCall(_m, _f, a, k, sum(counts)), _at, branches, counts
            )
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _call(self, call: ModuleCall, at: int, branches: Sequence[int], counts: Sequence[int]) -> Any:
        if max(counts) == 1 and list(branches) == list(range(self._branches)):
            call.compute_steps(self._states[at])
            return call.output
        states = [pick_states(self._states[at], [branch]) for branch in range(self._branches)]
        start = 0
        for branch, tokens in zip(branches, counts, strict=True):
            call.compute(slice(start, start + tokens), states[branch])
            start += tokens
        self._states[at] = stack_states(states)
        return call.output
