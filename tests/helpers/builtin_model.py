"""Arguments of commands for the built-in model, which no command takes unless it is named."""

from __future__ import annotations

from collections.abc import Sequence

MODELLED = (
    *("generate", "chat", "serve", "search", "compare", "audit", "bench"),
    *("train", "convert", "quantize", "index"),
)


def on_builtin(args: Sequence[object]) -> list[str]:
    """A command's arguments, with `--model builtin` where they name neither a model nor a profile."""
    texts = [*map(str, args)]
    profile = texts[texts.index("--profile") + 1] if "--profile" in texts[:-1] else "none"
    named = profile not in ("auto", "none") or not {"--model", "-m", "--help"}.isdisjoint(texts)
    return [*texts, "--model", "builtin"] if texts and texts[0] in MODELLED and not named else texts
