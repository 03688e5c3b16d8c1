"""The suffix automaton against a search by hand, on all kinds of texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.proposers.lookup import NO_MATCH, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
DRAFTS = st.lists(st.integers(0, 3), max_size=6)


def longest(text, whole):
    """The longest suffix of `whole` that stands in `text`, not counting itself where it ends the text."""
    return max(
        (
            n
            for n in range(len(whole) + 1)
            if any(text[j : j + n] == whole[len(whole) - n :] for j in range(len(text) - n + (whole != text)))
        ),
        default=0,
    )


@given(TEXTS)
def test_the_longest_repeated_suffix(text):
    grown = SuffixAutomaton()
    for i, token in enumerate(text):
        grown.append(token)
        assert grown.suffix().length == longest(text[: i + 1], text[: i + 1])
    assert len(grown) == len(text)
    assert grown.states <= 2 * len(text) + 1


@given(TEXTS, DRAFTS)
def test_matches_go_on(text, drafted):
    known = SuffixAutomaton(text)
    match = known.suffix()
    for i, token in enumerate(drafted):
        match = known.extend(match, token)
        assert match.length == longest(text, [*text, *drafted[: i + 1]])


@given(TEXTS, DRAFTS, st.integers(1, 12))
def test_what_follows_stood_there(text, drafted, most):
    """It is what followed some place where the last token stands; past the end it repeats itself."""
    known = SuffixAutomaton(text)
    match = known.suffix()
    for token in drafted:
        match = known.extend(match, token)
    found, whole = known.continue_match(match, drafted, most), [*text, *drafted]
    if not match.length:
        assert found == []
        return

    def from_place(end):
        grown = list(whole)
        for i in range(most):
            grown.append(grown[end + i])
        return grown[len(whole) :]

    places = [end for end in range(1, len(text)) if text[end - 1] == whole[-1]]
    assert found in ([from_place(end) for end in places] or [[]])


def test_the_latest_place_counts():
    text = [1, 2, 7, 9, 1, 2, 8, 9, 1, 2]
    known = SuffixAutomaton(text)
    match = known.suffix()
    assert match.length == 3  # 9 1 2
    assert known.continue_match(match, [], 2) == [8, 9]


def test_a_period_goes_on():
    known = SuffixAutomaton([5, 6, 7, 5, 6, 7, 5])
    assert known.continue_match(known.suffix(), [], 7) == [6, 7, 5, 6, 7, 5, 6]


def test_what_was_never_seen_matches_nothing():
    known = SuffixAutomaton([1, 2, 3])
    assert known.suffix() == NO_MATCH
    assert known.extend(known.suffix(), 9) == NO_MATCH
    assert known.continue_match(NO_MATCH, [], 4) == []
    assert SuffixAutomaton().suffix() == NO_MATCH
