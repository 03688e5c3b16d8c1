"""Lookup tokens below a draft path: its next pass checks them beside the token it must read (staged speculation).

Spector and Re 2308.04623. The path's drafts do not change: if a drawn token equals the lookup token, the draft goes on
from logits that are computed already. Pure Python.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul

from selfspec.proposers.base import NO_PROPOSAL, LearningProposer, Proposal, Proposer, ProposerReader

FREE = 15  # most lookup tokens verified without a draft step: a wider pass may cost far more


class ProposerChain:
    """Several proposers, whose lookup tokens are checked as far as they are expected to pay.

    `prices[i]`: the cost of a pass of the draft path over i + 1 tokens; no pass is wider than `prices`.
    """

    def __init__(self, proposers: Sequence[Proposer] = (), prices: Sequence[float] = (1.0,)) -> None:
        self.proposers = tuple(proposers)
        self.prices = tuple(prices)

    def new_state(self, *, prompt: int = 0, seeded: bool = False) -> ProposerState:
        """Return the state of an empty text, whose first `prompt` tokens will be the prompt.

        If `seeded`, proposers that learn from earlier texts are not used, and learn nothing.
        """
        learners = [proposer for proposer in self.proposers if isinstance(proposer, LearningProposer)]
        able = [proposer for proposer in self.proposers if not (seeded and proposer in learners)]
        readers = [(proposer.name, proposer.reader()) for proposer in able]
        return ProposerState(self, readers, prompt, () if seeded else learners)


class ProposerState:
    """The state of one text for all proposers of a `ProposerChain`."""

    def __init__(
        self,
        ahead: ProposerChain,
        readers: Sequence[tuple[str, ProposerReader]],
        prompt: int,
        learners: Sequence[LearningProposer],
    ) -> None:
        self._ahead, self._readers = ahead, readers
        self._prompt, self._learners = prompt, learners
        self._num_read = 0

    def read(self, text: Sequence[int]) -> None:
        """Read the tokens by which the text has grown."""
        for _, reader in self._readers:
            for token in text[self._num_read :]:
                reader.append(token)
        self._num_read = len(text)

    def finish(self, text: Sequence[int]) -> None:
        """Teach the finished text to the proposers that learn."""
        for learner in self._learners:
            learner.learn(text[: self._prompt], text[self._prompt :])

    def lookup(self, most: int, ends: Collection[int]) -> Proposal:
        """Return the lookup tokens with the most expected right tokens, up to the first of `ends`.

        At most `most` tokens, and never more than `FREE`.
        """
        chosen, best = NO_PROPOSAL, 0.0
        for source, reader in self._readers:
            proposal = reader.look_up((), min(most, FREE))
            end = next((i for i, token in enumerate(proposal.tokens, start=1) if token in ends), len(proposal.tokens))
            expected = sum(accumulate(proposal.chances[:end], mul))
            if expected > best:
                best, chosen = expected, proposal.cut(end, source)
        return chosen

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return at most `most` lookup tokens after the text and then `drafted`, for the draft path's next pass.

        The proposer and the length maximise the expected tokens of the pass, one plus the right lookup tokens, over its
        cost.
        """
        prices = self._ahead.prices
        most = min(most, len(prices) - 1)
        chosen, best = NO_PROPOSAL, 1.0 / prices[0]
        for source, reader in self._readers:
            proposal = reader.look_up(drafted, most)
            tokens = reach = 1.0
            for n, chance in enumerate(proposal.chances, start=1):
                reach *= chance
                tokens += reach
                if tokens > best * prices[n]:
                    best, chosen = tokens / prices[n], proposal.cut(n, source)
        return chosen

    def passes(self, drafted: Sequence[int], max_length: int) -> list[tuple[int, int]]:
        """Return the draft-path passes that draft these tokens: the index of each one's first token, and its width.

        `max_length`: the largest draft length allowed.
        """
        passes, i = list[tuple[int, int]](), 0
        while i < len(drafted):
            proposal = self.look_up(drafted[:i], max_length - i - 1).tokens
            passes.append((i, 1 + len(proposal)))
            for predicted, token in zip([*proposal, None], drafted[i:], strict=False):
                i += 1
                if predicted != token:
                    break
        return passes
