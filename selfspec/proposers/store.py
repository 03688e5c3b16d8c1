"""A retrieval store: continuations of the text's longest suffix in stored texts (REST, He et al. 2311.08252).

A suffix array (Manber and Myers 1993) over all texts, in one memory-mapped file: it opens at once at any size, and only
the searched parts are read. All longest matches vote on the next tokens, as in infini-gram (Liu et al. 2401.17377).
Does not need torch, and needs numpy only for building.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_file, parse_json, write_bytes
from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal

REACH = 16  # longest match, in tokens
VOTES = 16  # most matches that vote on a continuation
_SEPARATOR = 2**32 - 1  # separator token between two texts
_FORMAT = "selfspec store 1"
_SIZE = struct.Struct("<Q")  # length of a safetensors file's header
_PLACE = struct.Struct("<I")


class StoreMatch(NamedTuple):
    """The longest match of a text's suffix: its length in tokens, and its entries `first:last` in the suffix array."""

    length: int
    first: int
    last: int


class Store:
    """A searchable store of texts in a file.

    `vocabulary`: the vocabulary size of the model whose tokens it holds; `tokens`: the number of stored tokens;
    `texts`: the number of stored texts. The file is a safetensors file. It holds all tokens in reverse order as 4-byte
    big-endian integers, and the tokens' offsets sorted by the up to `REACH` tokens that end there. A suffix of a text
    is therefore a prefix of an entry. Raises `SelfspecError` for any other file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_file(self.path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            (size,) = _SIZE.unpack_from(self._map, 0)
            header = parse_json(self._map[_SIZE.size : _SIZE.size + size])
            metadata = header["__metadata__"]
            start = _SIZE.size + size
            first, end, order, over = (
                int(offset) for part in ("tokens", "order") for offset in header[part]["data_offsets"]
            )
            self.vocabulary, self.texts = int(metadata["vocabulary"]), int(metadata["texts"])
            inside = 0 <= first <= end <= len(self._map) - start and 0 <= order <= over <= len(self._map) - start
            if metadata["format"] != _FORMAT or not inside or (end - first) % _PLACE.size or self.vocabulary < 1:
                raise ValueError
        except OSError as error:
            raise SelfspecError(f"{self.path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, OverflowError, struct.error):
            raise SelfspecError(f"{self.path}: is no store of texts; make one with: selfspec index") from None
        self._tokens, self._end = start + first, start + end
        self._order, self.tokens = start + order, (over - order) // _PLACE.size

    def check(self, vocabulary: int | None) -> None:
        """Raise `SelfspecError` if a model's vocabulary size differs from the store's; None: the size is unknown."""
        if vocabulary and vocabulary != self.vocabulary:
            raise SelfspecError(
                f"{self.path}: its tokens are of a vocabulary of {self.vocabulary}, the model's has {vocabulary}; "
                "expected a store that was made with this model: selfspec index"
            )

    def find(self, text: Sequence[int]) -> StoreMatch:
        """Return the longest suffix of `text` in the store, of at most `REACH` tokens; length 0: no match."""
        key = _key(text[-REACH:])
        index = self._bisect(key, 0, self.tokens)
        length = max(
            (_common_prefix(key, self._entry(i, len(key))) for i in (index - 1, index) if 0 <= i < self.tokens),
            default=0,
        )
        if not length:
            return StoreMatch(0, 0, 0)
        head = key[: 4 * length]
        return StoreMatch(length, self._bisect(head, 0, index), self._bisect(head, index, self.tokens, after=True))

    def continuations(self, match: StoreMatch, most: int) -> list[tuple[int, ...]]:
        """Return the tokens that followed up to `VOTES` evenly spaced matches: at most `most`, to the text's end.

        A damaged store's tokens end before one that is not of its vocabulary.
        """
        count = match.last - match.first
        taken = range(count) if count <= VOTES else (i * count // VOTES for i in range(VOTES))
        return [self._following(match.first + i, most) for i in taken]

    def _following(self, place: int, most: int) -> tuple[int, ...]:
        (offset,) = _PLACE.unpack_from(self._map, self._order + 4 * place)
        read = self._tokens + 4 * offset
        n = min(most, offset) if read <= self._end else 0
        tokens = struct.unpack(f">{n}I", self._map[read - 4 * n : read])[::-1]
        vocabulary = self.vocabulary
        return tuple(itertools.takewhile(lambda token: token < vocabulary, tokens))  # the separator is beyond it

    def _entry(self, place: int, size: int) -> bytes:
        (offset,) = _PLACE.unpack_from(self._map, self._order + 4 * place)
        read = self._tokens + 4 * offset
        return self._map[read : min(read + size, self._end)]

    def _bisect(self, key: bytes, low: int, high: int, *, after: bool = False) -> int:
        """Return the index of the first entry that is not below `key`.

        With `after`, skip the entries that begin with `key` as well.
        """
        data, order, tokens, size, end = self._map, self._order, self._tokens, len(key), self._end
        unpack = _PLACE.unpack_from
        while low < high:
            middle = (low + high) // 2
            read = tokens + 4 * unpack(data, order + 4 * middle)[0]
            text = data[read : min(read + size, end)]
            if text < key or (after and text == key):
                low = middle + 1
            else:
                high = middle
        return low

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each text."""
        numbers = struct.unpack(f">{(self._end - self._tokens) // 4}I", self._map[self._tokens : self._end])[::-1]
        for between, text in groupby(numbers, _SEPARATOR.__eq__):
            if not between:
                yield tuple(text)


def write_store(path: str | Path, texts: Iterable[Sequence[int]], *, vocabulary: int) -> int:
    """Write a store of texts, given as token ids; return the number of their tokens.

    Raises `SelfspecError` if there are no tokens, for a token outside the vocabulary, and for 2^32 tokens or more.
    """
    import numpy as np
    from safetensors.numpy import save

    arrays = [np.asarray(text, dtype=np.int64) for text in texts if len(text)]
    count = sum(map(len, arrays))
    if not count:
        raise SelfspecError("nothing to store: the texts have no tokens")
    if count + len(arrays) >= _SEPARATOR:
        raise SelfspecError(f"{count:,} tokens: a store holds fewer than {_SEPARATOR:,}; make several")
    if min(int(text.min()) for text in arrays) < 0 or max(int(text.max()) for text in arrays) >= vocabulary:
        raise SelfspecError(f"a token is not among the {vocabulary} tokens of the vocabulary")
    apart = np.array([_SEPARATOR], dtype=np.int64)
    backwards = np.concatenate([part for text in arrays for part in (apart, text)][1:])[::-1].astype(np.uint32)
    order = _sorted(backwards)
    order = order[backwards[order] != _SEPARATOR]
    data = save(
        {"tokens": np.frombuffer(backwards.astype(">u4").tobytes(), dtype=np.uint8), "order": order},
        {"format": _FORMAT, "vocabulary": str(vocabulary), "texts": str(len(arrays))},
    )
    write_bytes(Path(path), data)
    return count


def _sorted(tokens: Any) -> Any:
    """Return the suffix array `[n]` of tokens `[n]`, by `REACH` tokens from each offset on, by prefix doubling."""
    import numpy as np

    rank = np.unique(tokens, return_inverse=True)[1].astype(np.uint64) + np.uint64(1)
    reach = 1
    while reach < REACH:
        then = np.zeros_like(rank)
        then[:-reach] = rank[reach:]
        key = rank << np.uint64(32) | then
        order = np.argsort(key)
        steps = np.diff(key[order], prepend=np.uint64(0)) != 0
        rank[order] = np.cumsum(steps).astype(np.uint64)
        reach *= 2
    return np.argsort(rank, kind="stable").astype(np.uint32)


def _key(text: Sequence[int]) -> bytes:
    return struct.pack(f">{len(text)}I", *text[::-1])


def _common_prefix(text: bytes, other: bytes) -> int:
    """Return the number of tokens in the common prefix of two packed texts, of 4 bytes a token."""
    for i in range(0, min(len(text), len(other)), 4):
        if text[i : i + 4] != other[i : i + 4]:
            return i // 4
    return min(len(text), len(other)) // 4


# Prior chances by match length, up to 8: if at most half of the matches agree; if more agree, or there is one match;
# if all of several agree. Measured on SmolLM2's answers to questions, with a store of its answers to other questions.
_BY_LENGTH = (
    (0.0, 0.0, 0.0),
    (0.08, 0.1, 0.13),
    (0.1, 0.18, 0.31),
    (0.15, 0.22, 0.4),
    (0.15, 0.3, 0.4),
    (0.2, 0.35, 0.6),
    (0.2, 0.45, 0.65),
    (0.2, 0.45, 0.7),
    (0.2, 0.5, 0.9),
)
FIRST = tuple(chance for agreed in _BY_LENGTH for chance in agreed)
LEARNT = 4  # tokens between two observations of whether lookup tokens are right


class StoreReader:
    """The last tokens of one text, and how often the store's continuations were right."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._end: list[int] = []
        self._read = 0
        self._chances = AcceptanceStats(FIRST)

    def append(self, token: int) -> None:
        """Append a token; for every `LEARNT`-th token, first record whether the lookup token for it was right."""
        self._read += 1
        if self._read % LEARNT == 0:
            for predicted, strength in self._score_tokens((), 1):
                self._chances.record(strength, predicted == token)
        self._end = [*self._end[1 - REACH :], token]

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return the majority continuation, token by token; only matches that agree so far vote."""
        scored_tokens = self._score_tokens(drafted, most)
        return (
            Proposal([token for token, _ in scored_tokens], [self._chances(how) for _, how in scored_tokens])
            if scored_tokens
            else NO_PROPOSAL
        )

    def _score_tokens(self, drafted: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return the lookup tokens, each with its match strength: the index in `FIRST`, by length and agreement."""
        end = [*self._end, *drafted]
        if not end or most < 1:
            return []
        match = self._store.find(end)
        if not match.length:
            return []
        places, scored_tokens = self._store.continuations(match, most), list[tuple[int, int]]()
        for i in range(most):
            votes = Counter(place[i] for place in places if len(place) > i)
            if not votes:
                break
            ((token, count),) = votes.most_common(1)
            agreed = 2 if count == len(places) > 1 else int(2 * count > len(places))
            scored_tokens.append((token, 3 * min(match.length + i, len(FIRST) // 3 - 1) + agreed))
            places = [place for place in places if place[i : i + 1] == (token,)]
        return scored_tokens


class StoreProposer:
    """Lookup in a retrieval store."""

    name = "store"

    def __init__(self, store: Store) -> None:
        self.store = store

    def reader(self) -> StoreReader:
        """Return a reader for an empty text."""
        return StoreReader(self.store)
