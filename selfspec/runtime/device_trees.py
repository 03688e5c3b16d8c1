"""Token trees of rounds on the device: their shape, their verification, and lookup of tokens in the text there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.runtime.device_rules import Verdicts
from selfspec.runtime.device_tokens import Chosen, leading
from selfspec.speculation.drafts import Draft
from selfspec.speculation.host_sync import to_device
from selfspec.speculation.tree_batch import tree_mask
from selfspec.types.draft_work import Work

TREE_ROWS = 16  # most rows of a tree's verification, the root's included: as one row, they are one tile of a kernel
MATCHED = 8  # most tokens at the end of the text that lookup compares with earlier ones


class DeviceTree:
    """A token tree of a fixed shape with m nodes, verified by the rules `greedy` and `match`.

    Its nodes are a chain of `length` drafted tokens, then the `candidates` - 1 further tokens of each of its positions,
    then a chain of `lookup` tokens below the root. `parents` are as in `Draft`, `depth` is that of the deepest node,
    and `depths` `[1 + m]` are those of the root and of each node. `paths` `[1 + m, depth]` are the nodes from the root
    down to each of them; behind a path's end, the i-th number is i.
    """

    def __init__(self, length: int, candidates: int, lookup: int, device: torch.device) -> None:
        chain = Draft.chain([0] * length).with_candidates([[0] * (candidates - 1)] * length)
        n = len(chain)
        parents = (*chain.parents, *(n + i - 1 if i else -1 for i in range(lookup)))
        shape = Draft((0,) * len(parents), parents, None, (-1,) * len(parents))
        m, self.depth = len(shape), shape.depth
        self.parents, self.path_to = parents, shape.path_to
        self._positions = [*range(length), *(i for i in range(length) for _ in range(candidates - 1))]  # drafted
        visible, column = tree_mask(shape), torch.ones(1 + m, 1, dtype=torch.bool)
        whole = [[*(path := shape.path_to(node)), *range(len(path), self.depth)] for node in range(-1, m)]
        # Of nodes that are equally deep, the first has the highest rank.
        ranks = [m * depth - node for node, depth in enumerate(shape.depths)]
        self.depths = torch.tensor((0, *shape.depths), device=device)
        self.paths = torch.tensor(whole, device=device)
        self._parent_rows = torch.tensor([1 + parent for parent in parents], device=device)
        self._of_position = torch.tensor(self._positions, device=device)
        self._unrelated = ~visible[1:].to(device)
        self._ranks = torch.tensor(ranks, device=device)
        self._visible = torch.cat([column, visible, ~column], 1).t().contiguous().to(device)
        self._lookup_steps = torch.arange(lookup, device=device)

    def mask(self, start: Tensor, numbers: Tensor) -> Tensor:
        """Return which of the slots `numbers` `[S]` each row sees, `[B, 1 + m, S]`.

        `start` `[B]`: the roots' slots.
        """
        at = (numbers - start.unsqueeze(1)).clamp(0, len(self._visible) - 1)
        return self._visible.index_select(0, at.flatten()).view(*at.shape, -1).transpose(1, 2)

    def counts(self, drafted: Tensor, found: Tensor) -> Tensor:
        """Return whether each node counts, `[B, m]`, where `drafted` and `found` `[B]` drafted and lookup tokens do."""
        of_drafts = self._of_position < drafted.unsqueeze(1)
        return torch.cat([of_drafts, self._lookup_steps < found.unsqueeze(1)], 1)

    def follow(self, tokens: Tensor, counts: Tensor, target: Chosen) -> tuple[Tensor, Verdicts]:
        """Accept the deepest path of nodes `[B, m]` that are the target's, as the rules `greedy` and `match`.

        Return the row `[B]` of its last node, 0 for the root's, and the verdicts.
        """
        shape = len(tokens), -1
        right, able = target.tokens.view(shape), target.possible.view(shape)
        holds = (tokens == right.index_select(1, self._parent_rows)) & counts
        reached = (holds.unsqueeze(1) | self._unrelated).all(-1)
        best, node = (reached * self._ranks).max(1)
        row = (node + 1) * (best > 0)
        at = row.unsqueeze(1)
        token, possible = (values.gather(1, at).squeeze(1) for values in (right, able))
        accepted = self.depths.index_select(0, row)
        return row, Verdicts(accepted, token, possible, torch.zeros_like(accepted))

    def draft(
        self,
        tokens: Sequence[int],
        drafted: int,
        found: int,
        *,
        confidence: Sequence[float],
        work: Work,
        sources: tuple[str, str],
    ) -> tuple[Draft, list[int]]:
        """Return the draft that a round verified, and the row of each of its nodes in the verification pass.

        `tokens`: those of all nodes, of which those count that `drafted` and `found` say. Equal tokens below one node
        are one node of the draft. `sources`: the names of drafted and of lookup tokens' source.
        """
        nodes: dict[tuple[int, int], int] = {}  # the draft's node for each (parent, token)
        rows, places, named = list[int](), dict[int, int](), list[str]()
        lookup = len(self._positions)
        for node, (token, parent) in enumerate(zip(tokens, self.parents, strict=True)):
            if node - lookup >= found or (node < lookup and self._positions[node] >= drafted):
                continue
            key = (places[parent] if parent >= 0 else -1, token)
            if key not in nodes:
                nodes[key] = len(nodes)
                rows.append(1 + node)
                named.append(sources[node >= lookup])
            places[node] = nodes[key]
        parents = tuple(parent for parent, _ in nodes)
        of_nodes = tuple(token for _, token in nodes)
        made = Draft(of_nodes, parents, None, (-1,) * len(nodes), tuple(confidence), work, tuple(named))
        return made, rows


def path_of(draft: Draft, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a draft that have these tokens, one below the other; equal nodes have different parents."""
    nodes: list[int] = []
    for token in tokens:
        children = draft.children[nodes[-1] + 1 if nodes else 0]
        nodes.append(next(node for node in children if draft.tokens[node] == token))
    return tuple(nodes)


class Texts:
    """The tokens of each cache row's sequence on the device, in which the next ones are looked up (Saxena 2023)."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        # Before a text stand `MATCHED` numbers that are no tokens; behind it is room for what is never read.
        self._values = torch.full((rows, MATCHED + slots + 2 * TREE_ROWS), -1, device=device)
        self._numbers = torch.arange(slots, device=device)
        self._steps = torch.arange(TREE_ROWS, device=device)

    def send(self, row: int, tokens: Sequence[int]) -> None:
        """Copy a text to the device."""
        sent = to_device(torch.tensor(tokens), self._values.device)
        self._values[row, MATCHED : MATCHED + len(tokens)].copy_(sent)

    def append(self, tokens: Tensor, root: Tensor, rows: slice) -> None:
        """Write tokens `[B, n]` behind the positions `root` `[B]`; can be captured."""
        at = (MATCHED + 1 + root).unsqueeze(1) + self._steps[: tokens.shape[1]]
        self._values[rows].scatter_(1, at, tokens)

    def look_up(self, root: Tensor, count: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return `count` tokens that may follow each root `[B, count]`, and whether any do `[B]`; can be captured.

        They followed the latest earlier occurrence of the text's longest end that occurs earlier, of which at most
        `MATCHED` tokens are compared. A continuation that reaches the end of the text repeats itself.
        """
        values, slots = self._values[rows], len(self._numbers)
        last = values.gather(1, (1 + root).unsqueeze(1) + self._steps[:MATCHED])
        windows = values[:, 1:].unfold(1, MATCHED, 1)[:, :slots]  # of each position, the tokens up to it
        matched = leading((windows == last.unsqueeze(1)).flip(-1))
        score = (matched * slots + self._numbers).masked_fill(self._numbers >= root.unsqueeze(1), -1)
        best, _ = score.max(1)
        at = (best % slots).unsqueeze(1)
        period = (root.unsqueeze(1) - at).clamp(min=1)
        tokens = values.gather(1, MATCHED + 1 + at + self._steps[:count] % period)
        return tokens.clamp(min=0), best >= slots
