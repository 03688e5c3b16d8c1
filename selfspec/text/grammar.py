"""Check of a guide's grammar in a child process, as a small grammar can take any amount of time and memory to check.

This module is also the program of that process. It imports nothing of selfspec, so that it starts fast: it reads a
request as JSON from standard input, and writes a `CheckedGrammar` as JSON to standard output. `llguidance`'s own limits
(`PARSER_LIMITS`) bound its lexer and its masks, but not the check whether an intersection of patterns is empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

PARSER_LIMITS = {"initial_lexer_fuel": 200_000, "max_lexer_states": 50_000, "max_grammar_size": 100_000}
MOST_PROPERTIES = 2_000  # maximum property names of a schema, required ones included: checking takes quadratic time
MOST_PATTERNS = 500  # maximum patterns and formats of a schema
CPU_SECONDS, SECONDS = 2, 20  # processor time, and time on the clock, of a check
MEMORY = 2**30  # address space of a check, in bytes
_TOO_COMPLEX = (
    f"too complex: checking it takes more than {CPU_SECONDS} seconds or {MEMORY >> 20} MiB; expected a simpler one"
)


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """The result of a check.

    `text`: the grammar in `llguidance`'s format. `problem`: why it cannot be used; None if it can. `any_of`: whether
    `oneOf` is followed as `anyOf`.
    """

    text: str = ""
    problem: str | None = None
    any_of: bool = False


def check_grammar(*, regex: str | None, json_schema: Any) -> CheckedGrammar:
    """Check a regular expression, or a JSON schema, in a child process with limits.

    Raises `ValueError`, `TypeError` or `RecursionError` for a schema that is not JSON.
    """
    try:
        return _checked_apart(json.dumps({"regex": regex, "json_schema": json_schema}))
    except ChildProcessError as error:  # not kept: the next check may succeed
        return CheckedGrammar(problem=f"the process that checks it failed: {error}")


@lru_cache(maxsize=64)
def _checked_apart(request: str) -> CheckedGrammar:
    """Check the grammar of a request in a child process; the results of the last ones are kept.

    Raises `ChildProcessError` if the process cannot do it, whatever the grammar is.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            env=environment,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        ended = isinstance(error, subprocess.TimeoutExpired) or getattr(error, "returncode", 0) < 0  # by a signal
        if not ended:
            raise ChildProcessError(str(error)) from None
        return CheckedGrammar(problem=_TOO_COMPLEX)
    return CheckedGrammar(**json.loads(done.stdout))


def _checked(regex: str | None, json_schema: Any) -> CheckedGrammar:
    """Check a grammar in this process."""
    from llguidance import LLMatcher

    if regex is None:
        return _checked_schema(json_schema)
    grammar = LLMatcher.grammar_from_regex(regex)
    return CheckedGrammar(grammar, _reason(_problem(grammar)))


def _problem(grammar: str) -> str:
    """Return why a grammar cannot be used, in `llguidance`'s words; "" if it can.

    Only a matcher shows what the lexer costs; one over bytes costs the least.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return str(matcher.get_error()).split("<state>")[0].strip()


def _checked_schema(schema: Any) -> CheckedGrammar:
    """Check a JSON schema.

    Formats that `llguidance` does not know are annotations, which constrain nothing (JSON Schema 7.2.1). `oneOf` is
    followed as `anyOf` where `llguidance` cannot show that the alternatives exclude each other.
    """
    from llguidance import LLMatcher

    if (problem := _unusable(schema)) is not None:
        return CheckedGrammar(problem=problem)
    options: dict[str, bool] = {}
    while True:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        problem = _problem(grammar)
        unknown = re.search(r"Unknown format: (.*)", problem)
        if unknown is not None:
            named = [part for part in subschemas(schema) if part.get("format") == unknown[1].strip()]
            for part in named:
                del part["format"]
            if named:
                continue
        if "coerce_one_of" in problem and not options:
            options = {"coerce_one_of": True}
            continue
        return CheckedGrammar(grammar, _reason(problem), bool(options))


def _unusable(schema: Any) -> str | None:
    """Return why a JSON schema is refused before it is compiled; None if it is not."""
    properties = patterns = 0
    for part in subschemas(schema):
        if part.get("patternProperties"):
            return "patternProperties cannot be followed; expected properties, by their names"
        properties += sum(
            len(part[name]) for name in ("properties", "required") if isinstance(part.get(name), (dict, list))
        )
        patterns += sum(name in part for name in ("pattern", "format"))
    for what, count, most in (("property names", properties, MOST_PROPERTIES), ("patterns", patterns, MOST_PATTERNS)):
        if count > most:
            return f"{count} {what} are too many; expected at most {most}"
    return None


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a JSON schema and all schemas in it; keys that name properties or definitions are not keywords."""
    if isinstance(schema, list):
        for entry in schema:
            yield from subschemas(entry)
    elif isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            if keyword in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                if isinstance(value, dict):
                    yield from subschemas(list(value.values()))
            elif keyword not in ("const", "enum", "default", "examples"):
                yield from subschemas(value)


def _reason(problem: str) -> str | None:
    """Return the reason in an error text of `llguidance`, without the position, which is in its internal format."""
    if not problem:
        return None
    if problem.startswith("NoExtension"):
        return "no text matches it; expected one that some text does"
    _, separator, reason = problem.rpartition("error:")  # the reason follows a sketch of the position
    if separator:
        return reason.splitlines()[0].strip()
    _, separator, reason = problem.partition("(in regex): ")
    text = reason.partition(" in regex /")[0].strip() if separator else " ".join(problem.split())
    return text if len(text) <= 300 else f"{text[:297]}..."  # it can quote all of a pattern


def _main() -> None:
    """Limit this process, check the grammar of the request on standard input, and write the result."""
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        for limit, most in (
            (resource.RLIMIT_CPU, CPU_SECONDS),
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_CORE, 0),
        ):
            with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
                resource.setrlimit(limit, (most, most))
    try:
        result = _checked(**json.load(sys.stdin))
    except (ValueError, TypeError) as error:
        result = CheckedGrammar(problem=_reason(str(error)) or "cannot be read")
    except MemoryError:
        result = CheckedGrammar(problem=_TOO_COMPLEX)
    except RecursionError:
        result = CheckedGrammar(problem="nested too deeply")
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    _main()
