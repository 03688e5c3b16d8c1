"""Switching of adapters between streams that share one model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack

from selfspec.models.adapters import Adapters
from selfspec.speculation.drafts import Outcome


class AdapterSwitcher:
    """Switch that activates a stream's adapter during each of its rounds, for which other threads' rounds wait.

    The keys in the KV cache belong to one adapter; a stream with another adapter does not reuse them.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._cached_adapter = adapters.own  # the adapter that made the cached keys

    def rounds(
        self, name: str | None, decoding: Callable[[Callable[[], bool]], Generator[Outcome]], *, reuse: bool
    ) -> Generator[Outcome]:
        """Yield the rounds of `decoding`, run with the adapter `name` (None: the default adapter).

        `decoding` gets a function to call when its turn has come: it activates the adapter, and returns whether the
        cached keys may be reused, which is `reuse`, but False if they belong to another adapter. Raises `SelfspecError`
        for an unknown adapter.
        """
        return self._rounds(self.adapters.named(name), decoding, reuse)

    def _rounds(
        self, name: str, decoding: Callable[[Callable[[], bool]], Generator[Outcome]], reuse: bool
    ) -> Generator[Outcome]:
        first = ExitStack()

        def begin() -> bool:
            kept = reuse and self._cached_adapter == name
            first.enter_context(self.adapters.active(name))  # not before: who holds the turn may wait for the adapter
            self._cached_adapter = name
            return kept

        rounds = decoding(begin)
        try:
            with first:
                outcome = next(rounds, None)
            while outcome is not None:
                yield outcome
                with self.adapters.active(name):
                    outcome = next(rounds, None)
        finally:
            rounds.close()
