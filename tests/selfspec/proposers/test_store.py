"""A store of texts: what it finds is what a search through all of them finds."""

from __future__ import annotations

import json
import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import FOLDER, babble, stored

from selfspec.basics.errors import SelfspecError
from selfspec.proposers.base import NO_PROPOSAL
from selfspec.proposers.store import LEARNT, REACH, VOTES, Store, StoreProposer, write_store

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
texts = st.lists(tokens, min_size=1, max_size=5)


def followed(held, end):
    """The longest end of `end` that stands in a text, and what followed at each place, by looking everywhere."""
    for length in range(min(len(end), REACH), 0, -1):
        tail = tuple(end[-length:])
        places = [
            tuple(text[i + length :])
            for text in held
            for i in range(len(text) - length + 1)
            if tuple(text[i : i + length]) == tail
        ]
        if places:
            return length, places
    return 0, []


@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(1, 5))
def test_it_finds_what_looking_everywhere_finds(held, end, most):
    store = stored(held, 5).store
    length, places = followed(held, end)
    found = store.find(end)
    assert found.length == length
    assert found.last - found.first == len(places)
    given = store.continuations(found, most)
    assert len(given) == min(len(places), VOTES)
    if len(places) <= VOTES:
        assert Counter(given) == Counter(place[:most] for place in places)
    else:
        assert not Counter(given) - Counter(place[:most] for place in places)


@given(texts)
def test_all_texts_come_back(held):
    store = stored(held, 4).store
    assert [list(text) for text in store] == held
    assert store.tokens == sum(map(len, held))
    assert (store.texts, store.vocabulary) == (len(held), 4)


def test_matches_longer_than_the_reach():
    long = [*range(3 * REACH)]
    store = stored([long, [99, *long[REACH : 2 * REACH], 98]], 100).store
    found = store.find(long[: 2 * REACH])
    assert found.length == REACH
    assert Counter(store.continuations(found, 1)) == Counter([(2 * REACH,), (98,)]), (
        "what is before the reach does not count"
    )


def test_large_tokens_are_sorted_as_numbers():
    held = [[256, 1], [1, 256], [65536, 7], [7, 65536, 300]]
    store = stored(held, 70000).store
    for end in ([256], [1], [65536], [7], [7, 65536], [300], [255]):
        assert store.find(end).length == followed(held, end)[0]


def test_most_places_decide_token_for_token():
    proposer = stored([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 6], [1, 2, 9]], 10)
    reader = proposer.reader()
    for token in (1, 2):
        reader.append(token)
    assert list(reader.look_up((), 4).tokens) == [3, 4, 6]
    assert list(reader.look_up((3,), 1).tokens) == [4]
    assert list(reader.look_up((9,), 4).tokens) == [], "nothing follows that text"
    assert reader.look_up((8,), 4) == NO_PROPOSAL
    assert reader.look_up((), 0) == NO_PROPOSAL


def test_chances_follow_what_was_right():
    """Of the same length and agreement, guesses that come true are believed more, and others less."""
    proposer = stored([[1, 2] * 40], 10)
    right, wrong = proposer.reader(), proposer.reader()
    for _ in range(10 * LEARNT):
        for reader, third in ((right, 2), (wrong, 3)):
            for token in (5, 1, third):
                reader.append(token)
    for token in (5, 1):
        right.append(token)
        wrong.append(token)
    mine, theirs = right.look_up((), 1), wrong.look_up((), 1)
    assert mine.tokens == theirs.tokens == [2]
    assert 0 <= theirs.chances[0] < mine.chances[0] <= 1


@given(st.integers(0, 99), st.integers(0, 60), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 6))
def test_guesses_follow_from_the_text_alone(seed, n, drafted, most):
    """However often they were asked for, and in whichever order texts were read."""
    proposer = stored(babble(6, seed=seed), 6)
    (text,) = babble(6, seed=seed + 100, texts=1)
    asked, silent, other = proposer.reader(), proposer.reader(), proposer.reader()
    for token in text[:n]:
        asked.append(token)
        asked.look_up((), 3)
        other.append(token ^ 1)
    for token in text[:n]:
        silent.append(token)
    assert asked.look_up(drafted, most) == silent.look_up(drafted, most)
    assert len(asked.look_up(drafted, most).tokens) <= most


def damaged():
    good = (FOLDER / "good.store", write_store(FOLDER / "good.store", [[1, 2, 3]], vocabulary=4))[0].read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])

    def with_header(**changed):
        text = json.dumps({**header, **changed}).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + size :]

    yield "empty", b""
    yield "short", good[:5]
    yield "cut off", good[:-4]
    yield "no header", (10**9).to_bytes(8, "little") + good[8:]
    yield "text", b"some text that is no store at all\n" * 9
    yield "another format", with_header(__metadata__={**header["__metadata__"], "format": "selfspec store 9"})
    yield "no vocabulary", with_header(__metadata__={"format": "selfspec store 1"})
    yield "no places", with_header(order={"dtype": "U32"})
    yield "a list", with_header(__metadata__=[])


@pytest.mark.parametrize(("what", "data"), [*damaged()], ids=[name for name, _ in damaged()])
def test_what_is_no_store_is_refused(tmp_path, what, data):
    path = tmp_path / "x.store"
    path.write_bytes(data)
    with pytest.raises(SelfspecError, match="x.store: is no store of texts; make one with: selfspec index"):
        Store(path)


def test_what_cannot_be_stored(tmp_path):
    path = tmp_path / "x.store"
    for held, said in (
        ([], "nothing to store"),
        ([[]], "nothing to store"),
        ([[1, 9]], "not among the 4"),
        ([[-1]], "not"),
    ):
        with pytest.raises(SelfspecError, match=said):
            write_store(path, held, vocabulary=4)
    assert not path.exists()
    with pytest.raises(SelfspecError, match="no such file"):
        Store(path)
    with pytest.raises(SelfspecError, match="folder"):
        Store(tmp_path)


def damaged(file, first, data):
    """The file with other bytes from `first` on."""
    whole = bytearray(file.read_bytes())
    whole[first : first + len(data)] = data
    (other := file.with_name("other.store")).write_bytes(whole)
    return other


def test_tokens_beyond_the_vocabulary_are_not_proposed():
    store = stored([[1, 2, 3, 4], [0, 2, 3, 5]], 9).store
    other = damaged(store.path, store._tokens, struct.pack(">2I", 9, 2**31))  # 3 5 and 2 3 4, backwards
    reader = StoreProposer(Store(other)).reader()
    for token in (0, 2):
        reader.append(token)
    assert [token for token in reader.look_up((), 4).tokens if token >= 9] == []


@given(first=st.integers(0, 10**6), data=st.binary(min_size=1, max_size=8))
def test_a_damaged_store_is_refused_or_proposes_tokens_of_its_vocabulary(first, data):
    store = stored([[1, 2, 3, 4, 1, 2], [0, 2, 3, 5]], 9).store
    try:
        proposer = StoreProposer(Store(damaged(store.path, first % store.path.stat().st_size, data)))
    except SelfspecError as error:
        assert "is no store of texts" in str(error)
        return
    reader = proposer.reader()
    for token in (1, 2, 3, 1, 2):
        reader.append(token)
        assert all(0 <= proposed < proposer.store.vocabulary for proposed in reader.look_up((), 8).tokens)
    assert sum(map(len, proposer.store)) <= proposer.store.path.stat().st_size


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"[]",
        b'{"__metadata__": {"format": "selfspec store 1", "vocabulary": "9", "texts": "1"}, '
        b'"tokens": {"data_offsets": [0, Infinity]}, "order": {"data_offsets": [0, 0]}}',
        b'{"__metadata__": {"format": "selfspec store 1", "vocabulary": "9", "texts": "1"}, '
        b'"tokens": {"data_offsets": [-8, 0]}, "order": {"data_offsets": [0, 0]}}',
        b'{"__metadata__": {"format": "selfspec store 1", "vocabulary": "9", "texts": "1"}, '
        b'"tokens": {"data_offsets": [0, 0]}, "order": {"data_offsets": [0, 1152921504606846976]}}',
    ],
)
@pytest.mark.parametrize("size", [None, 2**60])
def test_a_hostile_header_is_refused(header, size, tmp_path):
    path = tmp_path / "a.store"
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header)
    with pytest.raises(SelfspecError, match=r"a.store: is no store of texts; make one with: selfspec index"):
        Store(path)
