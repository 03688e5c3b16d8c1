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
    parts = [part for text in texts for part in (text.split("=", 1) if text.startswith("--") else [text])]
    profile = parts[parts.index("--profile") + 1] if "--profile" in parts[:-1] else "none"
    named = profile not in ("auto", "none") or not {"--model", "-m", "--help"}.isdisjoint(parts)
    return [*texts, "--model", "builtin"] if texts and texts[0] in MODELLED and not named else texts
