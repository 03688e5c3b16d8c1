"""Guided generation: new text constrained by a regular expression or a JSON schema, through `llguidance`.

A guide makes a logits processor whose mask depends only on the tokens before a position, as it must for every
processor. Its matcher consumes a draft token by token, and rolls back to the longest common prefix when it is asked for
another prefix. The draft's and the target's distributions are therefore masked alike.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.basics.errors import SelfspecError, reason, short
from selfspec.text.grammar import PARSER_LIMITS, check_grammar
from selfspec.text.grammar_state import GrammarState
from selfspec.text.guide_continuation import Continuation

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
        self._tokenizer, self._json = known, regex is None
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
        return Continuation(self._matcher.deep_copy(), self._tokenizer, prompt=prompt, end=end, json=self._json)


def check_guide(*, regex: str | None = None, json_schema: str | Mapping[str, Any] | None = None) -> str:
    """Return the grammar of a regular expression or a JSON schema, in `llguidance`'s format.

    A child process with limits of time and memory checks the grammar. Raises `SelfspecError` for an invalid or too
    complex grammar, unless exactly one of both is given, and if `llguidance` is not installed.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise SelfspecError(
            "guided generation needs llguidance; install it with: pip install 'selfspec[guided]'"
        ) from None
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
