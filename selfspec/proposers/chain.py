"""Guesses below a draft path: tokens that its next pass checks beside the one that it must read (staged speculation).

Spector and Re 2308.04623. What the path drafts does not change: a drawn token that equals the guess lets the draft go
on from logits that are there already. Pure Python.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul

from selfspec.proposers.base import NO_GUESS, Guess, LearningProposer, Proposer, ProposerReader

FREE = 15  # tokens of a guess that is verified as it is: a wider pass may cost far more than these


class ProposerChain:
    """Several proposers' guesses, as many as are expected to pay.

    `prices[i]`: what a pass of the path over i + 1 tokens takes; none is wider.
    """

    def __init__(self, proposers: Sequence[Proposer] = (), prices: Sequence[float] = (1.0,)) -> None:
        self.proposers = tuple(proposers)
        self.prices = tuple(prices)

    def reading(self, *, prompt: int = 0, seeded: bool = False) -> ProposerState:
        """Of a text that has no token yet, of which so many are to be the prompt's.

        With a seed, nothing that earlier texts taught counts, and nothing is learnt.
        """
        learners = [proposer for proposer in self.proposers if isinstance(proposer, LearningProposer)]
        able = [proposer for proposer in self.proposers if not (seeded and proposer in learners)]
        readers = [(proposer.name, proposer.reader()) for proposer in able]
        return ProposerState(self, readers, prompt, () if seeded else learners)


class ProposerState:
    """One text, as all proposers of an `ProposerChain` read it."""

    def __init__(
        self,
        ahead: ProposerChain,
        readers: Sequence[tuple[str, ProposerReader]],
        prompt: int,
        learners: Sequence[LearningProposer],
    ) -> None:
        self._ahead, self._readers = ahead, readers
        self._prompt, self._learners = prompt, learners
        self._told = 0

    def read(self, text: Sequence[int]) -> None:
        """The text has grown to this."""
        for _, reader in self._readers:
            for token in text[self._told :]:
                reader.append(token)
        self._told = len(text)

    def ended(self, text: Sequence[int]) -> None:
        """The text is whole."""
        for learner in self._learners:
            learner.learn(text[: self._prompt], text[self._prompt :])

    def free(self, most: int, ends: Collection[int]) -> Guess:
        """How the text may go on, up to one of `ends`: the guess that promises most right tokens.

        At most `most` tokens, and never more than `FREE`.
        """
        found, best = NO_GUESS, 0.0
        for source, reader in self._readers:
            guess = reader.guess((), min(most, FREE))
            end = next((i for i, token in enumerate(guess.tokens, start=1) if token in ends), len(guess.tokens))
            expected = sum(accumulate(guess.chances[:end], mul))
            if expected > best:
                best, found = expected, guess.cut(end, source)
        return found

    def guess(self, drafted: Sequence[int], most: int) -> Guess:
        """What the next pass is to check, `most` tokens at most, after the text and the tokens `drafted` after it.

        Of the proposer, and cut, so that most tokens are expected for the pass's time: one and those that are right.
        """
        prices = self._ahead.prices
        most = min(most, len(prices) - 1)
        found, best = NO_GUESS, 1.0 / prices[0]
        for source, reader in self._readers:
            guess = reader.guess(drafted, most)
            tokens = reach = 1.0
            for n, chance in enumerate(guess.chances, start=1):
                reach *= chance
                tokens += reach
                if tokens > best * prices[n]:
                    best, found = tokens / prices[n], guess.cut(n, source)
        return found

    def passes(self, drafted: Sequence[int], room: int) -> list[tuple[int, int]]:
        """The passes that draft these tokens after the text: the number of the token each begins with, and its width.

        `room`: the most tokens that the draft might have.
        """
        found, i = list[tuple[int, int]](), 0
        while i < len(drafted):
            guess = self.guess(drafted[:i], room - i - 1).tokens
            found.append((i, 1 + len(guess)))
            for guessed, token in zip([*guess, None], drafted[i:], strict=False):
                i += 1
                if guessed != token:
                    break
        return found
