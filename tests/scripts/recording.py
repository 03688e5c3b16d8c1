"""The recording of `selfspec chat` in docs/command-line.md: what stands in a terminal of 80 columns.

    python tests/scripts/recording.py LINES.txt --model smollm2-135m --profile none --threads 2

Each line of the file is typed when the prompt has come; where one begins with `^C70 `, the answer to the rest of it is
ended with Ctrl-C after 70 characters. Ctrl-D ends the chat.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from terminal import Terminal


def main(lines: Path, options: list[str]) -> int:
    """Type, and print what stands there; the chat's exit code."""
    terminal = Terminal([sys.executable, "-m", "selfspec", "chat", *options])
    try:
        for line in lines.read_text().splitlines():
            terminal.until(lambda shown: shown.endswith("> "))
            end, _, text = line.partition(" ") if line.startswith("^C") else ("", "", line)
            terminal.type(f"{text}\n")
            if end:
                after = len(text) + 1 + int(end.removeprefix("^C"))
                terminal.until(lambda shown, after=after: len(shown) > after)
                terminal.type("\x03")
        terminal.until(lambda shown: shown.endswith("> "))
        terminal.type("\x04")
        code = terminal.end()
    finally:
        terminal.kill()
    print(f"$ selfspec chat {' '.join(options)}\n{terminal.shown()}", end="")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
