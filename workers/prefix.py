"""The prefix cache: which tokens' cells are in the KV cache, and which sequences hold them.

A radix tree over the tokens of running and of finished sequences. A node is a run of tokens whose cells exist once,
however many sequences hold them: in a unified KV cache a copy from one sequence to another only shares cells. What
holds a node holds all nodes above it, so the deepest one says where to copy from.

What has finished is kept by a *holder*, a sequence id that never decodes. Its cells are given up leaf by leaf when they
are needed, the least worth first. Worth is GreedyDual-Size-Frequency (Cherkasova, 1998) with a cost and a size both
proportional to the tokens: uses since it came, on top of the worth of what was given up last, which is how it ages.

Pure: what llama.cpp has to do is noted as `Move`s, to be done in their order before the next step.
"""

from __future__ import annotations

from collections.abc import Iterator

from arriero.workers.engine.seam import TO_THE_END, Move


class Node:
    """Tokens [start, end) of every sequence that comes through here."""

    __slots__ = ("children", "live", "owners", "parent", "start", "tokens", "uses", "worth")

    def __init__(self, parent: Node | None, start: int, tokens: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, Node] = {}
        """By their first token."""
        self.owners: set[int] = set()
        self.live = 0
        """Owners that run."""
        self.uses = 0
        self.worth = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> Iterator[Node]:
        """This node and those above it, but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """Sequence ids below `slots` run; the `holders` ids from there on keep what has finished. Without holders nothing
    is shared, and slots are only cleared."""

    def __init__(self, slots: int, holders: int, retained_max: int) -> None:
        self._slots = slots
        self.enabled = holders > 0
        self._retained_max = retained_max
        self._free_holders = list(range(slots + holders - 1, slots - 1, -1))
        self._root = Node(None, 0, [])
        self._tips: dict[int, Node] = {}
        """By sequence id: the deepest node that it holds. Running sequences without any are at the root."""
        self._age = 0.0
        self._moves: list[Move] = []
        self.cells = 0
        """Cells of all nodes."""
        self.retained = 0
        """Of these, the ones that no running sequence holds: they can be given up."""

    def moves(self) -> list[Move]:
        """What has to be done now; forgotten here."""
        moves, self._moves = self._moves, []
        return moves

    def depth(self, slot: int) -> int:
        """Tokens of a running sequence that the tree holds; those after them are its own."""
        tip = self._tips.get(slot)
        return 0 if tip is None else tip.end

    def path(self, slot: int) -> Iterator[Node]:
        tip = self._tips.get(slot)
        return iter(()) if tip is None else tip.path()

    def match(self, tokens: list[int], limit: int) -> tuple[int, list[Node]]:
        """How many of the first `limit` tokens are here, and the nodes that they are in."""
        node, depth = self._root, 0
        nodes: list[Node] = []
        while depth < limit and (child := node.children.get(tokens[depth])) is not None:
            nodes.append(child)
            depth += common(child.tokens, tokens, depth, limit)
            if depth < child.end:
                break
            node = child
        return depth, nodes

    def share(self, slot: int, tokens: list[int], limit: int) -> int:
        """Give a running sequence, whose cells are all in the tree, what else of its first `limit` tokens is there.
        Returns its depth now."""
        before = self.depth(slot)
        depth, nodes = self.match(tokens, limit)
        if depth <= before:
            return before
        tip = self._split(nodes[-1], depth)
        self._moves.append(Move(min(tip.owners), slot, before, depth))
        self._hold(slot, tip)
        return depth

    def extend(self, slot: int, tokens: list[int], end: int) -> None:
        """Take in the cells of tokens [depth, end) of a running sequence, for others to share. Where the same are here
        already, the sequence's own are given up for them."""
        if not self.enabled:
            return
        before = self.depth(slot)
        if end <= before:
            return
        depth, nodes = self.match(tokens, end)
        tip = self._split(nodes[-1], depth) if nodes else self._root
        if depth > before:
            self._moves += (Move(-1, slot, before, depth), Move(min(tip.owners), slot, before, depth))
            self._hold(slot, tip)
        if end == depth:
            return
        fresh = tokens[depth:end]
        self.cells += len(fresh)
        if tip.owners == {slot} and not tip.children:
            tip.tokens += fresh
        else:
            node = Node(tip, depth, fresh)
            tip.children[fresh[0]] = node
            self._hold(slot, node)

    def leave(self, slot: int, *, retain: bool) -> None:
        """A running sequence is over or loses its slot; what was its alone is kept if it may be."""
        tip = self._tips.pop(slot, None)
        if tip is not None:
            if retain and tip.owners == {slot} and self._retained_max > 0:
                self._keep(slot, tip)
            self._drop(slot, tip)
            self.evict(self.retained - self._retained_max)
        self._moves.append(Move(-1, slot, 0, TO_THE_END))

    def evict(self, cells: int) -> None:
        """Give up retained cells, at least so many where there are."""
        while cells > 0 and (tip := self._least()) is not None:
            cells -= len(tip.tokens)
            self._cut(tip)

    # --- inside --------------------------------------------------------------------------------------------

    def _hold(self, sequence: int, tip: Node) -> None:
        """The sequence now holds everything down to `tip`."""
        runs = sequence < self._slots
        self._tips[sequence] = tip
        for node in tip.path():
            if sequence in node.owners:
                break
            node.owners.add(sequence)
            if runs:
                if not node.live and len(node.owners) > 1:
                    self.retained -= len(node.tokens)
                node.live += 1
                node.uses += 1
                node.worth = self._age + node.uses

    def _drop(self, sequence: int, tip: Node) -> None:
        """The sequence holds nothing of this path any more; what nobody holds is gone."""
        runs = sequence < self._slots
        for node in tip.path():
            node.owners.discard(sequence)
            if not node.owners:
                if not runs:
                    self.retained -= len(node.tokens)
                self.cells -= len(node.tokens)
                assert node.parent is not None
                del node.parent.children[node.tokens[0]]
            elif runs and node.live == 1:
                self.retained += len(node.tokens)
            node.live -= runs

    def _keep(self, slot: int, tip: Node) -> None:
        """Hand the path to a holder; holders of less of the same path are not needed any more."""
        while not self._free_holders and (least := self._least()) is not None:
            self._cut(least)
        if not self._free_holders:
            return
        holder = self._free_holders.pop()
        self._moves.append(Move(slot, holder, 0, tip.end))
        covered = {one for node in tip.path() for one in node.owners if one >= self._slots and self._tips[one] is node}
        self._hold(holder, tip)
        for one in covered:
            self._release(one)

    def _release(self, holder: int) -> None:
        self._drop(holder, self._tips.pop(holder))
        self._free_holders.append(holder)
        self._moves.append(Move(-1, holder, 0, TO_THE_END))

    def _least(self) -> Node | None:
        """The leaf of the least worth that no running sequence holds."""
        leaves = (tip for holder, tip in self._tips.items() if holder >= self._slots)
        return min(
            (tip for tip in leaves if not tip.live and not tip.children), key=lambda tip: tip.worth, default=None
        )

    def _cut(self, leaf: Node) -> None:
        """Give up a leaf; its holder keeps what is above it, unless another does so anyway."""
        self._age = leaf.worth
        (holder,) = leaf.owners
        parent = leaf.parent
        assert parent is not None
        if parent is self._root or len(parent.owners) > 1:
            self._release(holder)
            return
        self._moves.append(Move(-1, holder, leaf.start, TO_THE_END))
        self.cells -= len(leaf.tokens)
        self.retained -= len(leaf.tokens)
        del parent.children[leaf.tokens[0]]
        self._tips[holder] = parent

    def _split(self, node: Node, depth: int) -> Node:
        """The node that ends at `depth`, a place within `node` or its end."""
        if depth == node.end:
            return node
        at = depth - node.start
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.start, node.tokens[:at])
        upper.owners, upper.live, upper.uses, upper.worth = set(node.owners), node.live, node.uses, node.worth
        parent.children[upper.tokens[0]] = upper
        node.parent, node.start, node.tokens = upper, depth, node.tokens[at:]
        upper.children[node.tokens[0]] = node
        return upper


def common(run: list[int], tokens: list[int], start: int, limit: int) -> int:
    """How many tokens from `start` on, below `limit`, are those of `run`: bisected, for slices compare fast."""
    low, high = 0, min(len(run), limit - start)
    if run[:high] == tokens[start : start + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
