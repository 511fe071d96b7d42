"""Nodes that end at multiples of a step, so that recurrent layers read every path in the same pieces.

What a recurrent layer makes of a token depends, in its last bits, on where it was interrupted before. With a step
that happens at depths that are multiples of it and nowhere else, whatever other prompts share. So the few tokens
between such a depth and a branch are computed again for each prompt behind it.
"""

from __future__ import annotations

from prefillcli.plan.trie import TrieNode

STATE_STEP = 64
"""Tokens of a piece. Half of them are computed again for a branch, on average; fewer make smaller products."""


def floor_to(depth: int, step: int) -> int:
    """The last multiple of `step` up to `depth`; with `step` 0 the depth as it is."""
    return depth - depth % step if step else depth


def align_nodes(roots: list[TrieNode], step: int) -> None:
    """Let every node with something behind it end at a multiple of `step`, in place.

    What was behind such a multiple goes to the nodes below it. A prompt that ended there gets a node of its own.
    """
    lists: list[tuple[list[TrieNode], TrieNode | None]] = [(roots, None)]
    while lists:
        siblings, parent = lists.pop()
        at = 0
        while at < len(siblings):
            node = siblings[at]
            cut = floor_to(node.end, step)
            if not node.children or cut == node.end:
                at += 1
                lists.append((node.children, node))
                continue
            below = node.children
            if node.ending:
                below.insert(0, TrieNode(node.prompt, node.start, node.end, node, ending=node.ending))
            if cut > node.start:
                node.end, node.ending = cut, []
                at += 1
                lists.append((below, node))
            else:  # nothing is left of it
                siblings[at : at + 1] = below
            for each in below:
                each.start = max(cut, node.start)
                each.parent = node if cut > node.start else parent
