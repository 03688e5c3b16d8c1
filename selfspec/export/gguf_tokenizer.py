"""A model's tokenizer as keys of a GGUF file: copied from the model's GGUF file, or made from a byte-level BPE.

llama.cpp identifies a pre-tokenizer (the rule that splits text) by name; a tokenizer whose rule has no name there is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from selfspec.basics.errors import SelfspecError

Key = tuple[str, Any, Any, Any]  # arguments of GGUFWriter.add_key_value

_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # values of gguf.TokenType


def tokenizer_keys_of_file(path: Path) -> list[Key]:
    """Return the keys of a GGUF file that describe its tokenizer, unchanged."""
    keys = []
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            keys.append((name, field.contents(), field.types[0], inner))
    return keys


def tokenizer_keys(tokenizer: Any, generation: Any, vocabulary: int) -> list[Key]:
    """Return the GGUF keys of a byte-level BPE tokenizer.

    `generation`: the generation config, for further end tokens. `vocabulary`: the number of token ids of the model.
    Raises `SelfspecError` for other tokenizers and for pre-tokenizers that llama.cpp has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data = {} if backend is None else json.loads(backend.to_str())
    pre = _pre(data)
    tokens, kinds = _tokens(data, vocabulary)
    texts, numbers = gguf.GGUFValueType.STRING, gguf.GGUFValueType.INT32
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    keys: list[Key] = [
        ("tokenizer.ggml.model", "gpt2", texts, None),
        ("tokenizer.ggml.pre", pre, texts, None),
        ("tokenizer.ggml.tokens", tokens, gguf.GGUFValueType.ARRAY, texts),
        ("tokenizer.ggml.token_type", kinds, gguf.GGUFValueType.ARRAY, numbers),
        ("tokenizer.ggml.merges", merges, gguf.GGUFValueType.ARRAY, texts),
        *_specials(tokenizer, generation),
    ]
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        keys.append(("tokenizer.chat_template", template, texts, None))
    return keys


def _pre(data: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer in `data`, the JSON of a `tokenizers` tokenizer.

    Raises `SelfspecError` if llama.cpp has no name for it, or the tokenizer is not a byte-level BPE.
    """
    model, pieces = data.get("model") or {}, _pieces(data.get("pre_tokenizer"))
    normal = (data.get("normalizer") or {}).get("type", "NFC") == "NFC"
    if model.get("type") == "BPE" and not model.get("byte_fallback") and normal:
        for name, (known, ignores_merges) in _SPLITS.items():
            if pieces == known and bool(model.get("ignore_merges")) == ignores_merges:
                return name
    raise SelfspecError(
        f"the model's tokenizer cannot be written as GGUF; expected byte-level BPE as of {', '.join(_SPLITS)}; "
        "name as --model a GGUF file of the model, whose tokenizer is copied"
    )


def _pieces(pre: dict[str, Any] | None) -> tuple[Any, ...]:
    """Return the steps of a pre-tokenizer in order, each as a tuple of its type and the settings that affect splits."""
    if pre is None:
        return ()
    if pre["type"] == "Sequence":
        return tuple(piece for part in pre["pretokenizers"] for piece in _pieces(part))
    if pre["type"] == "ByteLevel":
        return (("ByteLevel", pre.get("use_regex", True), pre.get("add_prefix_space", True)),)
    if pre["type"] == "Digits":
        return (("Digits", pre["individual_digits"]),)
    if pre["type"] == "Split":
        return (("Split", pre["pattern"].get("Regex"), pre["behavior"], pre["invert"]),)
    return ((pre["type"],),)


def _split(digits: str) -> tuple[Any, ...]:
    return (("Split", _LLAMA % digits, "Isolated", False), ("ByteLevel", False, False))


_SPLITS: dict[str, tuple[tuple[Any, ...], bool]] = {
    "gpt-2": ((("ByteLevel", True, False),), False),
    "smollm": ((("Digits", True), ("ByteLevel", True, False)), False),
    "llama-bpe": (_split("{1,3}"), True),
    "qwen2": (_split(""), False),
}
"""Pre-tokenizers by llama.cpp's name: (steps, whether a word in the vocabulary becomes a token without merges)."""


def _tokens(data: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Return the texts and the GGUF token types of all token ids below `vocabulary`; unused ids become `[PAD..]`."""
    tokens, kinds = [f"[PAD{i}]" for i in range(vocabulary)], [_UNUSED] * vocabulary
    for text, number in data["model"]["vocab"].items():
        if number < vocabulary:
            tokens[number], kinds[number] = text, _NORMAL
    for added in data.get("added_tokens") or ():
        if added["id"] < vocabulary:
            tokens[added["id"]], kinds[added["id"]] = added["content"], _CONTROL if added["special"] else _USER
    return tokens, kinds


def _specials(tokenizer: Any, generation: Any) -> list[Key]:
    """Return the GGUF keys of the special tokens, and the flags whether the tokenizer adds begin and end tokens."""
    number, flag = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    named = {"bos": begin, "eos": end, "padding": tokenizer.pad_token_id, "unknown": tokenizer.unk_token_id}
    ends = getattr(generation, "eos_token_id", None)
    others: Sequence[int] = [
        token for token in (ends if isinstance(ends, list) else [ends]) if token not in (None, end)
    ]
    named |= dict(zip(("eot", "eom"), others, strict=False))
    ids = list(tokenizer("x").input_ids)
    keys: list[Key] = [
        (f"tokenizer.ggml.{name}_token_id", int(token), number, None)
        for name, token in named.items()
        if token is not None
    ]
    keys.append(("tokenizer.ggml.add_bos_token", begin is not None and ids[0] == begin, flag, None))
    keys.append(("tokenizer.ggml.add_eos_token", end is not None and len(ids) > 1 and ids[-1] == end, flag, None))
    return keys
