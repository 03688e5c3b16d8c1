"""Blocks of a pool: nobody's keys are overwritten, what is shared is what it is taken for, nothing leaks."""

from __future__ import annotations

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.engine.blocks import BlockPool

SIZE, TOTAL = 2, 7


def test_a_common_beginning_is_shared_by_whole_blocks():
    blocks = BlockPool(TOTAL, SIZE)
    table = blocks.take(3)
    blocks.begin("a", 0)
    blocks.index_full("a", [5, 6, 7, 8, 9], table, 5)
    assert blocks.cached_blocks([5, 6, 7, 8, 1]) == table[:2]
    assert blocks.cached_blocks([5, 6, 7]) == table[:1]
    assert blocks.cached_blocks([6, 6, 7, 8]) == []
    assert blocks.cached_blocks([5]) == []


def test_what_was_left_is_known_until_its_room_is_needed():
    blocks = BlockPool(3, SIZE)
    table = blocks.take(2)
    blocks.begin("a", 0)
    blocks.index_full("a", [1, 2, 3, 4], table, 4)
    blocks.release(table)
    blocks.end("a")
    assert blocks.free == 3
    assert blocks.cached_blocks([1, 2, 3, 4]) == table
    blocks.take(2)  # the blank one, and of those that are known the end of the text, which fewer share
    assert blocks.cached_blocks([1, 2, 3, 4]) == table[:1]
    blocks.take(1)
    assert blocks.cached_blocks([1, 2, 3, 4]) == []


def test_more_than_there_is_is_refused():
    blocks = BlockPool(2, SIZE)
    with pytest.raises(SelfspecError, match="3 blocks of the pool are needed, 2 are free"):
        blocks.take(3)
    assert blocks.free == 2


class Pretended:
    """Sequences with tables, and what each block was last written with."""

    def __init__(self):
        self.blocks, self.written = BlockPool(TOTAL, SIZE), [()] * TOTAL
        self.texts, self.tables = {}, {}

    def come(self, name, tokens):
        known = self.blocks.cached_blocks(tokens)
        needed = -(-len(tokens) // SIZE) - len(known)
        for i, block in enumerate(known):
            assert self.written[block] == tuple(tokens[: (i + 1) * SIZE])
        if needed > self.blocks.num_free_except(known):
            return
        self.tables[name] = [*self.blocks.share(known), *self.blocks.take(needed)]
        self.texts[name] = list(tokens)
        self.blocks.begin(name, len(known))
        self.write(name, len(known) * SIZE)

    def write(self, name, start):
        text, table = self.texts[name], self.tables[name]
        for at in range(start, len(text)):
            self.written[table[at // SIZE]] = tuple(text[: at + 1])
        self.blocks.index_full(name, text, table, len(text))

    def lengthen(self, name, token):
        if len(self.texts[name]) == len(self.tables[name]) * SIZE:
            if not self.blocks.free:
                return
            self.tables[name] += self.blocks.take(1)
        self.texts[name].append(token)
        self.write(name, len(self.texts[name]) - 1)

    def go(self, name):
        self.blocks.release(self.tables.pop(name))
        self.blocks.end(name)
        del self.texts[name]

    def check(self):
        held = [block for table in self.tables.values() for block in table]
        assert self.blocks.free == TOTAL - len(set(held))
        for name, text in self.texts.items():
            for i, block in enumerate(self.tables[name]):
                assert self.written[block] == tuple(text[: min((i + 1) * SIZE, len(text))])


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=40))
def test_whoever_comes_and_goes_reads_what_it_wrote(events):
    pool = Pretended()
    for number, (name, tokens) in enumerate(events):
        if name not in pool.texts:
            pool.come(name, tokens)
        elif number % 3:
            pool.lengthen(name, tokens[0])
        else:
            pool.go(name)
        pool.check()
    for name in list(pool.texts):
        pool.go(name)
    assert pool.blocks.free == TOTAL
