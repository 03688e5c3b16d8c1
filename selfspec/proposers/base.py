"""The interface of proposers, their acceptance statistics, and chains of several proposers for one drafter.

A draft pass checks lookup tokens together with the token that it must read. The drafted tokens do not change: if a
drafted token equals the lookup token, the logits after it are computed already. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol, runtime_checkable

MEMORY = 0.98  # decay of an observation's weight with each later observation
STRENGTH = 8.0  # weight of the prior rates, in observations


class Proposal(NamedTuple):
    """Lookup tokens: a likely continuation of a text.

    `chances[i]`: the chance that token i is right if all tokens before it are. `source`: the name of the proposer,
    which a `ProposerState` fills in.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    source: str = ""

    def cut(self, most: int, source: str | None = None) -> Proposal:
        """Return a proposal of the first `most` tokens; `source`: a new source, None: unchanged."""
        return Proposal(self.tokens[:most], self.chances[:most], self.source if source is None else source)


NO_PROPOSAL = Proposal()


class ProposerReader(Protocol):
    """A proposer's state for one text, which is read token by token."""

    def append(self, token: int) -> None:
        """Append a token to the text."""

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return at most `most` lookup tokens that may follow the text and then the tokens `drafted`."""


class Proposer(Protocol):
    """A source of lookup tokens, at almost no cost."""

    @property
    def name(self) -> str:
        """The proposer's name, which statistics give as the source of its lookup tokens."""

    def reader(self) -> ProposerReader:
        """Return a reader for an empty text."""


@runtime_checkable
class LearningProposer(Proposer, Protocol):
    """A proposer that learns from decoded texts. Sequences with a seed neither use nor teach such a proposer."""

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Learn from a finished text."""


@dataclass(slots=True)
class AcceptanceStats:
    """Running acceptance rates of lookup tokens by match strength.

    The strength of a match is a number that its proposer chooses, such as the length of the n-gram that was found.
    `first[s]`: the prior rate for strength s, which counts as 8 observations; greater strengths count as the last. The
    rate is the weighted share of right tokens, where each observation multiplies the weight of earlier ones by 0.98.
    """

    first: Sequence[float]
    _counts: list[float] = field(init=False)
    _right: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [STRENGTH] * len(self.first)
        self._right = [STRENGTH * chance for chance in self.first]

    def record(self, strength: int, right: bool) -> None:
        """Record whether a lookup token of this strength was right."""
        index = min(strength, len(self.first) - 1)
        self._counts[index] = MEMORY * self._counts[index] + 1
        self._right[index] = MEMORY * self._right[index] + right

    def __call__(self, strength: int) -> float:
        """Return the chance that a lookup token of this strength is right."""
        index = min(strength, len(self.first) - 1)
        return self._right[index] / self._counts[index]


FREE = 15  # most lookup tokens verified in place of a draft: a wider verification pass may cost far more


class ProposerChain:
    """Several proposers; a draft pass checks as many of their lookup tokens as are expected to save time.

    `prices[i]`: the cost of a draft pass over i + 1 tokens, in any unit; no pass is over more than `len(prices)`
    tokens.
    """

    def __init__(self, proposers: Sequence[Proposer] = (), prices: Sequence[float] = (1.0,)) -> None:
        self.proposers = tuple(proposers)
        self.prices = tuple(prices)

    def new_state(self, *, prompt: int = 0, seeded: bool = False, before: Sequence[int] = ()) -> ProposerState:
        """Return the state of an empty text; its first `prompt` tokens will be the prompt.

        `before`: tokens that can be looked up as if they stood before the text.

        `seeded`: whether the sequence has a seed; if so, proposers that learn from earlier texts are left out.
        """
        learners = [proposer for proposer in self.proposers if isinstance(proposer, LearningProposer)]
        able = [proposer for proposer in self.proposers if not (seeded and proposer in learners)]
        readers = [(proposer.name, proposer.reader()) for proposer in able]
        for _, reader in readers:
            for token in before:
                reader.append(token)
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
        """Read the new tokens of `text`, the whole text so far."""
        for _, reader in self._readers:
            for token in text[self._num_read :]:
                reader.append(token)
        self._num_read = len(text)

    def finish(self, text: Sequence[int]) -> None:
        """Teach the finished text to the proposers that learn."""
        for learner in self._learners:
            learner.learn(text[: self._prompt], text[self._prompt :])

    def lookup(self, most: int, ends: Collection[int]) -> Proposal:
        """Return the proposal with the most expected right tokens, to be verified in place of a draft.

        It has at most `most` tokens, never more than `FREE`, and none after the first of the end-of-sequence tokens
        `ends`.
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
        """Return at most `most` lookup tokens after the text and then `drafted`, for the next draft pass.

        The proposer and the length maximise the expected tokens of the pass (one plus the expected right lookup tokens)
        divided by the cost of the pass.
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
        """Return the draft passes that draft these tokens: the index of each pass's first token, and the pass's width.

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
