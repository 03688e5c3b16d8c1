"""Switching of adapters between streams that share one model."""

from __future__ import annotations

from collections.abc import Callable, Generator

from selfspec.models.adapters import Adapters
from selfspec.speculation.drafts import Outcome


class AdapterSwitcher:
    """Switch that activates a stream's adapter before each of its rounds.

    The keys in the KV cache belong to one adapter; a stream with another adapter does not reuse them.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._cached_adapter = adapters.own  # the adapter that made the cached keys

    def rounds(
        self, name: str | None, decoding: Callable[[bool], Generator[Outcome]], *, reuse: bool
    ) -> Generator[Outcome]:
        """Yield the rounds of `decoding(reuse)`, run with the adapter `name` (None: the default adapter).

        `decoding` gets `reuse` as False if the cached keys belong to another adapter. Raises `SelfspecError` for an
        unknown adapter.
        """
        return self._rounds(self.adapters.named(name), decoding, reuse)

    def _rounds(self, name: str, decoding: Callable[[bool], Generator[Outcome]], reuse: bool) -> Generator[Outcome]:
        rounds = decoding(reuse and self._cached_adapter == name)
        try:
            while True:
                self.adapters.use(name)  # other streams may have run rounds meanwhile
                try:
                    outcome = next(rounds)
                except StopIteration:
                    return
                self._cached_adapter = name
                yield outcome
        finally:
            rounds.close()
