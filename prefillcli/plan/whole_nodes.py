"""Blocks that are used whole or not at all: each becomes one node of the forest.

Behind the state of a recurrent layer nothing can be read but what follows the last token that it has seen. So prompts
that leave a block in its middle do not read it: they get nodes of their own from where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefillcli.plan.state_steps import floor_to
from prefillcli.plan.trie import TrieNode, split_node

NEAR_SHARE = 8
"""No block is cut that is shorter than one part in so many of the smallest: prompts share a few tokens by chance."""


def whole_lengths(
    ends: Sequence[int], at: int, room: int, smallest: int, node_tokens: int, step: int = 0
) -> Iterator[int]:
    """Lengths of the blocks behind token `at`: one up to each of the `ends`, as long as there is room.

    A block takes `node_tokens` of the room beside its own. A last one of less than `smallest` tokens is not worth its
    states. With a `step`, of which `at` and the `ends` are multiples, lengths are so too.
    """
    ends = [end for end in ends if end > at]
    while ends and ends[-1] - max([at, *ends[:-1]]) < smallest:
        ends.pop()
    for end in ends:
        length = floor_to(min(end - at, room - node_tokens), step)
        if end - at <= smallest // NEAR_SHARE:
            continue
        if length < min(smallest, end - at):
            return
        yield length
        at, room = at + length, room - length - node_tokens
        if at < end:
            return


def split_whole(roots: list[TrieNode], prompt: int, ends: Sequence[int]) -> list[TrieNode]:
    """Make the path of `prompt` end one node at each of the `ends`, ascending; returns these nodes.

    Prompts that end within such a node, or leave it before its end, are taken out of it and share what they have in
    common among themselves.
    """
    found: list[TrieNode] = []
    end_node = next(node for node in _every(roots) if prompt in node.ending)
    start = 0
    for end in ends:
        path = []
        step: TrieNode | None = end_node
        while step is not None and step.end > start:
            path.append(step)
            step = step.parent
        inside = [node for node in reversed(path) if node.start < end]
        if inside[-1].end > end:
            siblings = _siblings(roots, inside[-1])
            inside[-1] = split_node(inside[-1], end, siblings, siblings.index(inside[-1]))
        alone = len(inside) == 1 and not inside[0].ending
        found.append(inside[0] if alone else _take_out(roots, inside, prompt))
        start = end
    return found


def _take_out(roots: list[TrieNode], inside: Sequence[TrieNode], prompt: int) -> TrieNode:
    """One node in place of those `inside`, each the child of the one before it, for what goes on behind the last."""
    first, last = inside[0], inside[-1]
    whole = TrieNode(prompt, first.start, last.end, first.parent, last.children)
    for child in whole.children:
        child.parent = whole
    last.children = []
    _siblings(roots, first).append(whole)
    for node in reversed(inside):
        siblings = _siblings(roots, node)
        if not node.ending and not node.children:
            siblings.remove(node)
        elif not node.ending and len(node.children) == 1:
            (child,) = node.children
            child.start, child.parent = node.start, node.parent
            siblings[siblings.index(node)] = child
    return whole


def _siblings(roots: list[TrieNode], node: TrieNode) -> list[TrieNode]:
    return roots if node.parent is None else node.parent.children


def _every(roots: Sequence[TrieNode]) -> Iterator[TrieNode]:
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)
