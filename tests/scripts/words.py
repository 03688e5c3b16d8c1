"""Count private words left in the source, by room: identifiers and phrases for which the field has a standard term.

python tests/scripts/words.py            # a table of rooms
python tests/scripts/words.py --where    # each word with its most frequent files
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "given",
    "found",
    "of",
    "at",
    "one",
    "some",
    "whole",
    "such",
    "way",
    "held",
    "told",
    "said",
    "kept",
    "seen",
    "room",
    "turned",
    "turns",
    "turning",
    "beside",
    "alike",
    "dearest",
    "watched",
    "longer",
    "lent",
    "spot",
    "natively",
    "stepwise",
    "sight",
    "crossing",
    "rounded",
    "lowered",
    "outlook",
]
PHRASES = (
    "in few bits",
    "few bits",
    "guess",
    "price",
    "dear",
    "when left out",
    "so many",
    "such a",
    "of them",
    "held twice",
)
PHRASE = {phrase: re.compile(rf"\b{phrase}(?:es|s|ed)?\b", re.I) for phrase in PHRASES}


def words_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each private word of a source: its kind, identifier or phrase, and the word."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                if name.strip("_").lower() in NAMES:
                    yield "identifier", name.strip("_").lower()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for phrase, pattern in PHRASE.items():
                for _ in pattern.findall(token.string):
                    yield "phrase", phrase


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--where", action="store_true", help="Show each word with its most frequent files.")
    where = parser.parse_args().where
    rooms: Counter[tuple[str, str]] = Counter()
    files: dict[str, Counter[str]] = {}
    for top in ("selfspec", "search"):
        for path in sorted((ROOT / top).rglob("*.py")):
            place = path.relative_to(ROOT)
            room = place.parts[1] if top == "selfspec" and len(place.parts) > 2 else top
            for kind, word in words_of(path.read_text()):
                rooms[room, kind] += 1
                files.setdefault(f"{word} ({kind})", Counter())[str(place)] += 1
    if where:
        for word, found in sorted(files.items(), key=lambda item: -item[1].total()):
            print(f"{found.total():5}  {word:24} " + ", ".join(f"{file} {n}" for file, n in found.most_common(3)))
        return
    print("| room | identifiers | phrases |\n|---|---|---|")
    for room in sorted({room for room, _ in rooms}):
        print(f"| {room} | {rooms[room, 'identifier']} | {rooms[room, 'phrase']} |")
    total = {kind: sum(n for (_, one), n in rooms.items() if one == kind) for kind in ("identifier", "phrase")}
    print(f"| all | {total['identifier']} | {total['phrase']} |")


if __name__ == "__main__":
    main()
