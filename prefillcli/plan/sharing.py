"""How many prompts share each part of a forest."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.plan.trie import TrieNode


def shared_nodes(roots: Sequence[TrieNode]) -> list[tuple[TrieNode, int]]:
    """Every node with the number of prompts that begin with it; parents come before their children."""
    nodes: list[TrieNode] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children)
    below = {id(node): len(node.ending) for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None:
            below[id(node.parent)] += below[id(node)]
    return [(node, below[id(node)]) for node in nodes]
