"""Draw the rooms and who imports whom, from the imports themselves: the picture of docs/architecture.md.

    python tests/scripts/rooms_picture.py            # writes docs/rooms.svg and docs/rooms.json
    python tests/scripts/rooms_picture.py --check    # exits with 1 when they are not what the imports are

Rooms stand above all that they import. An arrow that others imply (a room imports one that imports the third) is left
out of the picture; `rooms.json` has them all.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def edges() -> dict[str, list[str]]:
    """Return, for each room, the rooms whose modules its modules import."""
    found: dict[str, set[str]] = {}
    for top in ("selfspec", "search"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if parts[0] == "selfspec" and len(parts) < 3:
                continue
            room = "search" if parts[0] == "search" else parts[1]
            others = found.setdefault(room, set())
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                others.update(name.split(".")[1] for name in names if name.startswith("selfspec.") and "." in name)
    rooms = set(found)
    return {room: sorted((others & rooms) - {room}) for room, others in sorted(found.items())}


def levels(imports: dict[str, list[str]]) -> dict[str, int]:
    """Return each room's level: 0 for one that imports none, else one above the highest that it imports."""

    @cache
    def level(room: str) -> int:
        return 1 + max(map(level, imports[room])) if imports[room] else 0

    return {room: level(room) for room in imports}


def needed(imports: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the imports without those that others imply."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*map(below, imports[room])) if imports[room] else frozenset()

    return {
        room: [other for other in others if not any(other in below(third) for third in others if third != other)]
        for room, others in imports.items()
    }


def draw(imports: dict[str, list[str]], target: Path) -> None:
    """Write the picture as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rooms", "font.family": "sans-serif", "font.size": 11})
    from matplotlib import pyplot

    level = levels(imports)
    rows: dict[int, list[str]] = {}
    for room, height in sorted(level.items()):
        rows.setdefault(height, []).append(room)
    place: dict[str, tuple[float, float]] = {}
    for height, row in sorted(rows.items()):  # each room above the middle of what it imports, rows shifted by turns

        def middle(room: str) -> float:
            return sum(place[other][0] for other in imports[room]) / max(len(imports[room]), 1)

        shift = 0.07 if height % 2 else -0.07
        for i, room in enumerate(sorted(row, key=middle)):
            place[room] = ((i + 0.5) / len(row) + shift / len(row) ** 0.5, height)
    figure, axes = pyplot.subplots(figsize=(9.5, 0.85 * len(rows)))
    patches = {}  # by room; arrows end at their edges
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#e8eef6", "edgecolor": "#4a6a90", "linewidth": 0.9}
    for room, (x, y) in place.items():
        patches[room] = axes.text(x, y, room, ha="center", va="center", bbox=box).get_bbox_patch()
    for room, others in needed(imports).items():
        for other in others:
            far = level[room] - level[other] > 1
            style = f"arc3,rad={(0.18 if place[other][0] >= place[room][0] else -0.18) if far else 0}"
            arrow = {"arrowstyle": "->", "color": "#8a97a6", "shrinkA": 0, "shrinkB": 1, "lw": 0.9}
            arrow |= {"patchA": patches[room], "patchB": patches[other]}
            axes.annotate("", place[other], place[room], arrowprops={**arrow, "connectionstyle": style})
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.axis("off")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Write both files, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    imports, kept = edges(), DOCS / "rooms.json"
    if given.check:
        if json.loads(kept.read_text()) == imports:
            return 0
        print("docs/rooms.json is not what the imports are; run python tests/scripts/rooms_picture.py")
        return 1
    kept.write_text(json.dumps(imports, indent=1) + "\n")
    draw(imports, DOCS / "rooms.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
