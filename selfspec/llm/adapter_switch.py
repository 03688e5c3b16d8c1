"""Streams that each have an adapter of their own, on one model. Knows nothing of how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Generator

from selfspec.models.adapters import Adapters
from selfspec.speculation.drafts import Outcome


class AdapterSwitcher:
    """Sees to it that a model's rounds run with the adapter that their stream asked for.

    Keys in the cache are of one adapter: what another has left there is never reused.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._kept = adapters.own  # by which the keys in the cache were made

    def rounds(
        self, name: str | None, decoding: Callable[[bool], Generator[Outcome]], *, reuse: bool
    ) -> Generator[Outcome]:
        """`decoding(reuse)`, with an adapter. Raises `SelfspecError` for one that is not there."""
        return self._rounds(self.adapters.named(name), decoding, reuse)

    def _rounds(self, name: str, decoding: Callable[[bool], Generator[Outcome]], reuse: bool) -> Generator[Outcome]:
        rounds = decoding(reuse and self._kept == name)
        try:
            while True:
                self.adapters.use(name)  # others may have taken rounds meanwhile
                try:
                    outcome = next(rounds)
                except StopIteration:
                    return
                self._kept = name
                yield outcome
        finally:
            rounds.close()
