"""Small stores of texts, in a folder that goes with the tests."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from selfspec.proposers.store import Store, StoreProposer, write_store

FOLDER = Path(tempfile.mkdtemp(prefix="selfspec-stores-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def stored(texts: Iterable[Sequence[int]], vocabulary: int) -> StoreProposer:
    """A proposer that looks up in a store of these texts."""
    path = FOLDER / f"{len([*FOLDER.iterdir()])}.store"
    write_store(path, texts, vocabulary=vocabulary)
    return StoreProposer(Store(path))


def babble(vocabulary: int, *, seed: int = 0, texts: int = 4, tokens: int = 60) -> list[list[int]]:
    """Random texts in which much comes back."""
    chance = random.Random(seed)
    pieces = [[chance.randrange(vocabulary) for _ in range(chance.randint(1, 5))] for _ in range(6)]
    return [[token for _ in range(tokens // 3) for token in chance.choice(pieces)] for _ in range(texts)]
