"""Random numbers on the device before a round reads them: noise tied to positions, and numbers of samplers' streams."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.speculation.host_sync import to_device
from selfspec.speculation.sampling import Sampler

POSITIONS = 32  # positions of a cache row whose noise is kept: more than two rounds can read
MOST_BYTES = 2**30  # most memory for the noise of all cache rows
NUMBERS = 512  # random numbers kept for each cache row: far more than two rounds can use


@dataclass(slots=True)
class _Row:
    """A cache row's noise: whose it is, its positions on the device, and those being drawn for the next rounds."""

    sampler: Sampler
    sent: range
    drawn: dict[int, Future[None]] = field(default_factory=dict)


class TiedNoise:
    """The noise `[V]` of positions of each cache row, at the position modulo `POSITIONS`: `values` `[rows, .., V]`.

    The samplers' own noise, as the host draws it. It is drawn into pinned memory, from which it is copied without
    waiting. A place there is drawn anew only once the token of its position was read, and so after its copy.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        shape, pinned = (rows, POSITIONS, vocabulary), device.type == "cuda"
        self.values = torch.ones(shape, dtype=torch.float64, device=device)
        self._firsts = torch.arange(0, rows * POSITIONS, POSITIONS, device=device).unsqueeze(1)
        self._host = torch.ones(shape, dtype=torch.float64, pin_memory=pinned)
        self._rows: dict[int, _Row] = {}
        self._thread = ThreadPoolExecutor(1, "selfspec-noise")

    @staticmethod
    def fits(rows: int, vocabulary: int) -> bool:
        """Return whether the noise of this many rows fits the memory that it may take."""
        return 8 * rows * POSITIONS * vocabulary <= MOST_BYTES

    def send(self, row: int, sampler: Sampler, first: int, end: int) -> None:
        """Copy the noise of positions from `first` up to, not including, `end` to the device, unless it is there.

        All tokens before position `first` have been read. `end` is at most `first + POSITIONS`. Positions up to that
        are drawn meanwhile, for the next rounds.
        """
        known = self._rows.get(row)
        if known is None or known.sampler is not sampler or not known.sent.start <= first <= known.sent.stop:
            for left in () if known is None else known.drawn.values():
                if not left.cancel():
                    left.result()
            known = self._rows[row] = _Row(sampler, range(first, first))
        for position in range(known.sent.stop, first + POSITIONS):
            if position not in known.drawn:
                known.drawn[position] = self._thread.submit(self._draw, row, sampler, position)
        for position in range(known.sent.stop, end):
            known.drawn.pop(position).result()
            place = position % POSITIONS
            self.values[row, place].copy_(self._host[row, place], non_blocking=True)
        known.sent = range(first, max(known.sent.stop, end))

    @torch.inference_mode()
    def _draw(self, row: int, sampler: Sampler, position: int) -> None:
        into = self._host[row, position % POSITIONS]
        into.copy_(sampler.noise_of(position, into))

    def at(self, positions: Tensor, rows: slice) -> Tensor:
        """Return the noise `[B, n, V]` of positions `[B, n]` in the B cache `rows`; can be captured."""
        places = self._firsts[rows] + positions % POSITIONS
        return self.values.flatten(0, 1).index_select(0, places.flatten()).view(*positions.shape, -1)


class StreamNumbers:
    """The next random numbers of untied samplers, for each cache row; number i is at i modulo `NUMBERS`.

    How many numbers a round uses depends on its outcome, so until the round is read, only the device knows which number
    of the stream comes next.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, NUMBERS, dtype=torch.float64, device=device)
        self._sent: dict[int, tuple[Sampler, range]] = {}

    def send(self, row: int, sampler: Sampler, count: int) -> None:
        """Copy a sampler's next numbers to the device, unless the next `count` are there. None of them is used."""
        first = sampler.numbers_used
        known, sent = self._sent.get(row, (None, range(0)))
        if known is sampler and sent.start <= first and first + count <= sent.stop:
            return
        numbers = torch.tensor(sampler.upcoming(NUMBERS), dtype=torch.float64).roll(first % NUMBERS)
        self.values[row].copy_(to_device(numbers, self.values.device))
        self._sent[row] = sampler, range(first, first + NUMBERS)

    def at(self, first: Tensor, count: int, rows: slice) -> Tensor:
        """Return `count` numbers of each of the B cache `rows`, from number `first` `[B]` on, `[B, count]`."""
        steps = torch.arange(count, device=first.device)
        return self.values[rows].gather(1, (first.unsqueeze(1) + steps) % NUMBERS)
