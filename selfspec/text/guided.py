"""Guided generation: new text constrained by a regular expression or a JSON schema, through `llguidance`.

A grammar forces bytes, and a byte string has several tokenisations. The tokenizer's own is proposed: the model may
choose another, so proposed tokens are verified as all others are.

A guide makes a logits processor whose mask depends only on the tokens before a position, as it must for every
processor. Its matcher consumes a draft token by token, and rolls back to the longest common prefix when it is asked for
another prefix. The draft's and the target's distributions are therefore masked alike.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.basics.errors import SelfspecError, reason, short
from selfspec.text.grammar import PARSER_LIMITS, check_grammar, subschemas


class GrammarState:
    """An `llguidance` matcher that consumes tokens, and rolls back to the common prefix for another prefix."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._path: list[int] = []  # tokens that the matcher has consumed

    def follow(self, new: Sequence[int]) -> bool:
        """Move the matcher to the state after the tokens `new`; return False if the grammar rejects them."""
        new = list(new)
        same = min(len(new), len(self._path))
        while new[:same] != self._path[:same]:
            same -= 1
        if same < len(self._path):
            self.matcher.rollback(len(self._path) - same)
        taken = self.matcher.try_consume_tokens(new[same:])
        self._path = new[: same + taken]
        return len(self._path) == len(new)


_PART = re.compile(rb'"(?:[^"\\]|\\.)*("?)|([{}\[\],:])([ \t\r\n]*)', re.DOTALL)
_SPACES = b" \t\r\n"


def next_whitespace(text: bytes, following: bytes) -> bytes | None:
    """Return the whitespace that is likely to complete the JSON text `text` before its next byte `following`.

    The text so far shows its layout: what followed the latest `{`, `[`, `:` and `,`, with an indentation that grows
    with the depth. Return None within a string, and where the text has shown nothing yet.
    """
    containers: list[bytes] = []
    shown: dict[bytes, tuple[bytes, int]] = {}  # latest whitespace after each key of `_key`, and its depth
    after = b""  # the last structural character but a closing one, if nothing but whitespace follows it
    for part in _PART.finditer(text):
        mark, spaces = part[2], part[3]
        if mark is None:
            if not part[1]:
                return None
            after = b""
            continue
        if mark in b"{[":
            containers.append(mark)
        elif mark in b"}]" and containers:
            containers.pop()
        ended = part.end() == len(text)
        after = mark if ended and mark not in b"}]" else b""
        if not ended and text[part.end() : part.end() + 1] not in (b"}", b"]"):  # an empty container shows nothing
            shown[_key(mark, containers)] = spaces, len(containers)
    present = text[len(text.rstrip(_SPACES)) :]
    likely = _likely(after, following, containers, shown)
    if likely is None:
        return None
    return likely[len(present) :] if likely.startswith(present) else b""


def _key(mark: bytes, containers: list[bytes]) -> bytes:
    """Return the character with its container for a comma, and the character alone for all others."""
    return mark + containers[-1] if mark == b"," and containers else mark


def _likely(
    after: bytes, following: bytes, containers: list[bytes], shown: dict[bytes, tuple[bytes, int]]
) -> bytes | None:
    """Return the likely whitespace between the character `after` (b"": the end of a value) and `following`."""
    opener = containers[-1] if containers else b""
    depth = len(containers)
    if following in b"}]":
        spaces, before = shown.get(opener, (b"", 0))
        return _indented(spaces, before, depth - 1) if spaces.startswith(b"\n") and not after else b""
    if following in b",:" or not after:
        return b""
    if after == b":":
        return shown.get(after, (b" ", 0))[0]
    found = shown.get(_key(after, containers))
    if found is None and after == b",":
        found = shown.get(opener)
        found = found if found is not None and found[0].startswith(b"\n") else (b" ", 0)
    return None if found is None else _indented(*found, depth)


def _indented(spaces: bytes, before: int, depth: int) -> bytes:
    """Return whitespace that was seen at depth `before`, with the indentation of a line at `depth`."""
    if not spaces.startswith(b"\n") or before < 1:
        return spaces
    unit, rest = divmod(len(spaces) - 1, before)
    return spaces if rest else b"\n" + spaces[1 : 1 + unit] * depth


def schema_literals(schema: Any) -> Iterator[str]:
    """Yield the texts that a JSON schema spells out: keys with their colon, enum values and constants."""
    for part in subschemas(schema):
        properties, values = part.get("properties"), part.get("enum")
        if isinstance(properties, Mapping):
            yield from (f"{json.dumps(key, ensure_ascii=False)}:" for key in properties)
        if isinstance(values, list):
            yield from (json.dumps(value, ensure_ascii=False) for value in values)
        if "const" in part:
            yield json.dumps(part["const"], ensure_ascii=False)


_BYTES = 8  # bytes of text that are looked for, for each token
_STARTS = b'"{}[],:-0123456789tfn'  # all bytes that JSON has outside strings, but whitespace


class Continuation:
    """The proposer of one generation with a guide.

    `tokenizer`: the matcher's `LLTokenizer`. `prompt`: the number of prompt tokens. `end`: the token that ends the
    text; None if several can. `json`: whether the grammar is a JSON schema, which allows whitespace nearly anywhere:
    whitespace is proposed as the text so far has it. `literals`: the tokens of what the JSON schema spells out.
    """

    def __init__(
        self,
        matcher: Any,
        tokenizer: Any,
        *,
        prompt: int,
        end: int | None,
        json: bool,
        literals: Sequence[int] = (),
    ) -> None:
        self.literals = literals
        self._state, self._tokenizer = GrammarState(matcher), tokenizer
        self._prompt, self._end = prompt, end
        starts = [tokenizer.tokenize_bytes(bytes([byte])) for byte in _STARTS] if json else []
        self._starts = starts if all(len(ids) == 1 for ids in starts) else []
        self._latest: tuple[list[int], int, list[int]] = ([], 0, [])  # new tokens, `most`, and what was proposed

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` likely tokens after prompt and new tokens `tokens`; none where the grammar is free."""
        new = list(tokens[self._prompt :])
        if self._latest[0] != new or self._latest[1] < most:
            self._latest = new, most, self._forced(new, most)
        return self._latest[2][: max(most, 0)]

    def _forced(self, new: Sequence[int], most: int) -> list[int]:
        """Return at most `most` likely tokens after the new tokens `new`."""
        matcher = self._state.matcher
        if most < 1 or matcher.is_error() or not self._state.follow(new):
            return []
        forced, consumed = b"", 0
        while len(forced) < _BYTES * most and not matcher.is_error():
            more = bytes(matcher.compute_ff_bytes()) or self._structure(new, forced)
            ids = self._tokenizer.tokenize_bytes(more)
            taken = matcher.try_consume_tokens(ids)
            consumed += taken
            if not more or taken < len(ids):
                break
            forced += more
        ended = matcher.is_stopped() and not matcher.is_error()
        if consumed:
            matcher.rollback(consumed)
        ids = self._tokenizer.tokenize_bytes(forced)
        return [*ids, self._end][:most] if ended and self._end is not None else ids[:most]

    def _structure(self, new: Sequence[int], forced: bytes) -> bytes:
        """Return the only structural character that may follow, behind likely whitespace; b"" if there is none."""
        matcher = self._state.matcher
        allowed = [ids for ids in self._starts if matcher.validate_tokens(ids)]
        if len(allowed) != 1:
            return b""
        start = self._tokenizer.decode_bytes(allowed[0])
        whitespace = next_whitespace(self._tokenizer.decode_bytes(new) + forced, start)
        return b"" if whitespace is None else whitespace + start


LITERALS = 4096  # most tokens of a schema's literals that are looked up
_MAX_MASKS = 256  # cached masks, as each position of a draft is masked for drafting and again for verification


class Guide:
    """A grammar for the new text: `regex` (matches all of it) or `json_schema` (a mapping, or JSON text).

    One guide, made for a tokenizer, serves any number of generations. `ends`: the model's end-of-sequence tokens; the
    text ends when the grammar is complete. Raises `SelfspecError` if `llguidance` is not installed, and for a grammar
    (`check_guide`) or a tokenizer that it cannot use.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        ends: frozenset[int],
        regex: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
    ) -> None:
        grammar = check_guide(regex=regex, json_schema=json_schema)
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.hf import from_tokenizer

        self.ends = ends
        if not ends:
            raise SelfspecError("guided generation needs a model with an end-of-sequence token")
        try:
            known = from_tokenizer(tokenizer, eos_token=sorted(ends))
        except ValueError as error:
            raise SelfspecError(f"guide: the tokenizer cannot be used: {error}") from error
        self._tokenizer, self._json = known, json_schema is not None
        schema = json.loads(json_schema) if isinstance(json_schema, str) else dict(json_schema or {})
        texts = "".join(f" {literal}" for literal in dict.fromkeys(schema_literals(schema)))
        self._literals = known.tokenize_bytes(texts.encode(errors="replace"))[:LITERALS]
        self._matcher = LLMatcher(known, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        _raise(self._matcher)

    def processor(self, prompt: int, ends: frozenset[int]) -> LogitsProcessor:
        """Return the logits processor of one generation, after `prompt` prompt tokens and with end tokens `ends`.

        Raises `SelfspecError` if none of `ends` is an end token of the guide.
        """
        if not ends & self.ends:
            raise SelfspecError(
                f"the guide ends with token {sorted(self.ends)}, generation with {sorted(ends)}; expected one in common"
            )
        return _Guided(self._matcher.deep_copy(), ends, self.ends - ends, prompt)

    def continuation(self, prompt: int, ends: frozenset[int]) -> Continuation:
        """Return the proposer of one generation, with the arguments of `processor`."""
        shared = sorted(ends & self.ends)
        end = shared[0] if len(shared) == 1 else None
        return Continuation(
            self._matcher.deep_copy(),
            self._tokenizer,
            prompt=prompt,
            end=end,
            json=self._json,
            literals=self._literals,
        )


def check_guide(*, regex: str | None = None, json_schema: str | Mapping[str, Any] | None = None) -> str:
    """Return the grammar of a regular expression or a JSON schema, in `llguidance`'s format.

    A child process with limits of time and memory checks the grammar. Raises `SelfspecError` for an invalid or too
    complex grammar, unless exactly one of both is given, and if `llguidance` is not installed.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise SelfspecError("guided generation needs llguidance; install it with: pip install llguidance") from None
    if (regex is None) == (json_schema is None):
        raise SelfspecError("a guide is a regular expression or a JSON schema; expected one of them")
    what = "JSON schema" if regex is None else f"regular expression {short(regex)}"
    try:
        schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
        if regex is None and not isinstance(schema, Mapping):
            raise TypeError(f"{short(schema)}; expected an object, such as a pydantic class's model_json_schema()")
        checked = check_grammar(regex=regex, json_schema=dict(schema) if isinstance(schema, Mapping) else None)
    except RecursionError:
        raise SelfspecError(f"{what}: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise SelfspecError(f"{what}: {reason(error)}") from None
    if checked.problem is not None:
        raise SelfspecError(f"{what}: {checked.problem}")
    if checked.any_of:
        warnings.warn("JSON schema: oneOf is followed as anyOf, as its alternatives may overlap", stacklevel=4)
    return checked.text


def _raise(matcher: Any) -> None:
    """Raise `SelfspecError` for a matcher that has failed."""
    if matcher.is_error():
        raise SelfspecError(f"guide: {matcher.get_error().split('<state>')[0].strip()}")


class _Guided(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that masks the scores of tokens that the grammar forbids; prefixes may come in any order.

    `ends`: the generation's end tokens. `no_ends`: end tokens of the guide that do not end the generation, and are
    therefore forbidden. `prompt`: the number of prompt tokens.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], no_ends: frozenset[int], prompt: int) -> None:
        self._state, self._ends, self._no_ends, self._prompt = GrammarState(matcher), ends, sorted(no_ends), prompt
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = tuple(input_ids[0, self._prompt :].tolist())
        if new not in self._masks:
            self._masks[new] = self._forbidden(new, scores)
            if len(self._masks) > _MAX_MASKS:
                del self._masks[next(iter(self._masks))]
        forbidden = self._masks[new]
        return scores if forbidden is None else scores.masked_fill(forbidden, -torch.inf)

    def _forbidden(self, new: Sequence[int], scores: Tensor) -> Tensor | None:
        """Return the mask `[V]` of forbidden tokens after the new tokens `new`; None if the grammar rejects `new`."""
        if not self._ends.isdisjoint(new) or not self._state.follow(new):
            return None
        matcher = self._state.matcher
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        _raise(matcher)
        allowed = np.zeros(scores.shape[-1], dtype=bool)
        both = min(len(bits), len(allowed))
        allowed[:both] = bits[:both]
        allowed[self._no_ends] = False  # the matcher's end tokens that do not end this generation
        return torch.from_numpy(~allowed).to(scores.device)
