"""Make the built-in model's prompts from a Python 3.11 standard library.

    python tests/scripts/make_prompts.py /usr/lib/python3.11

Excerpts start at a line after a blank one and end at a line's end. Files are weighted by the square root of their
size, so that the long ones do not crowd out the rest.
"""

import json
import random
import re
import sys
from pathlib import Path

from transformers import AutoTokenizer

from selfspec.builtin import model_folder

SHORTEST, LONGEST = 48, 128  # tokens
COUNTS = {"calibration": 96, "heldout": 240}


def held_out(card: str) -> list[str]:
    """The held-out files that the model's card lists."""
    line = next(line for line in card.splitlines() if line.startswith("Held-out files:"))
    return re.findall(r"[\w/]+\.py", line)


def excerpt(text: str, tokenizer, generator: random.Random) -> str | None:  # type: ignore[no-untyped-def]
    """A random excerpt of `text`, or None when its place has too few tokens."""
    lines = text.splitlines(keepends=True)
    starts = [0, *(i for i in range(1, len(lines)) if not lines[i - 1].strip() and lines[i].strip())]
    start, wanted = generator.choice(starts), generator.randint(SHORTEST, LONGEST)
    kept = ""
    for line in lines[start:]:
        if len(tokenizer(kept + line).input_ids) > wanted:
            break
        kept += line
    return kept if len(tokenizer(kept).input_ids) >= SHORTEST else None


def main(library: Path) -> None:
    """Write both prompt files beside the model."""
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held = held_out((folder / "README.md").read_text())
    found = sorted(p.relative_to(library).as_posix() for p in library.rglob("*.py"))
    skipped = re.compile(r"(^|/)(tests?|idlelib|lib2to3|site-packages|__pycache__)/")
    trained = [name for name in found if name not in held and not skipped.search(name)]
    for part, names in (("calibration", trained), ("heldout", held)):
        generator = random.Random(0)
        texts = {name: (library / name).read_text(encoding="utf-8", errors="replace") for name in names}
        weights = [len(texts[name]) ** 0.5 for name in names]
        rows: dict[str, str] = {}
        while len(rows) < COUNTS[part]:
            name = generator.choices(names, weights)[0]
            prompt = excerpt(texts[name], tokenizer, generator)
            if prompt is not None:
                rows.setdefault(prompt, name)
        lines = [json.dumps({"prompt": prompt, "source": name}) for prompt, name in rows.items()]
        generator.shuffle(lines)
        (folder.parent / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
