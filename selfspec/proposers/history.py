"""Lookup in earlier answers (SuffixDecoding, Oliaro et al. 2411.04975).

The answers are kept in a file for later processes. One suffix automaton holds all answers. Does not import torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, kind, parse_json, read_text
from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal
from selfspec.proposers.lookup import FIRST, NO_MATCH, SuffixAutomaton

_log = logging.getLogger("selfspec")
BEFORE = 16  # last tokens of the prompt kept with the answer, so that the answer's beginning can be looked up
_SEPARATOR = -1  # separator token between two answers
_FORMAT = "selfspec answers 1"


class AnswerHistory:
    """Proposer that looks up earlier answers, kept in a file with a JSON list of token ids on each line.

    `vocabulary`: the model's vocabulary size (None: unknown). Lines that are not valid are skipped. A learnt answer is
    appended to the file at once. Raises `SelfspecError` for any other file, for answers of another vocabulary size, and
    if no file can be created at `path`.
    """

    name = "answers"

    def __init__(self, path: str | Path, vocabulary: int | None) -> None:
        self.path = Path(path)
        self._vocabulary = vocabulary or 0
        self.texts = SuffixAutomaton()
        check_answers(self.path)
        if missing_or_empty(self.path):
            return
        first, *lines = read_text(self.path).split("\n")
        if (file_vocabulary := _vocabulary(first)) != self._vocabulary:
            raise SelfspecError(
                f"{self.path}: its answers are of a vocabulary of {file_vocabulary}, the model's has "
                f"{self._vocabulary}; expected those that this model gave"
            )
        for line in lines:
            if text := self._read(line):
                self._append(text)

    def _read(self, line: str) -> list[int]:
        """Return the tokens of a line; an empty list if the line is incomplete or invalid."""
        try:
            text = parse_json(line)
        except ValueError:
            return []
        valid = isinstance(text, list) and all(type(token) is int and 0 <= token < self._vocabulary for token in text)
        return text if valid else []

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each answer."""
        text: list[int] = []
        for token in self.texts.tokens:
            if token != _SEPARATOR:
                text.append(token)
            else:
                yield tuple(text)
                text = []

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer with the last tokens of its prompt; log a warning if the file cannot be written."""
        if not answer:
            return
        text = [*prompt[-BEFORE:], *answer]
        header = {"format": _FORMAT, "vocabulary": self._vocabulary}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(json.dumps(header))
                file.write(f"\n{json.dumps(text, separators=(',', ':'))}")  # the leading newline isolates a torn line
        except OSError as error:
            _log.warning("%s: answers are not kept (%s)", self.path, error.strerror)
        self._append(text)

    def _append(self, text: Sequence[int]) -> None:
        for token in (*text, _SEPARATOR):
            self.texts.append(token)

    def reader(self) -> AnswersReader:
        """Return a reader for an empty text."""
        return AnswersReader(self.texts)


def check_answers(path: str | Path) -> None:
    """Raise `SelfspecError` if `path` is not a file of earlier answers, and no such file can be created at `path`."""
    path = Path(path)
    if missing_or_empty(path):
        check_writable(path)
    elif not keeps_answers(path):
        raise SelfspecError(f"{path}: holds no answers that selfspec kept; name another file")


def missing_or_empty(path: Path) -> bool:
    """Return whether there is no file, or one that nothing was written to yet."""
    return kind(path) == "missing" or (path.is_file() and not path.stat().st_size)


def keeps_answers(path: str | Path) -> bool:
    """Return whether a file holds earlier answers. Raises `SelfspecError` if it cannot be read."""
    path = Path(path)
    if not path.is_file():
        return False
    try:
        with path.open(errors="replace") as file:
            return _vocabulary(file.readline(200)) is not None
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({error.strerror or error})") from None


def _vocabulary(line: str) -> int | None:
    """Return the vocabulary size in the first line of an answers file; None for any other file."""
    try:
        header = parse_json(line)
        return int(header["vocabulary"]) if header["format"] == _FORMAT else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


class AnswersReader:
    """The longest match of one text's suffix in earlier answers, and how often the continuations were right."""

    def __init__(self, texts: SuffixAutomaton) -> None:
        self._texts = texts
        self._match = NO_MATCH
        self._chances = AcceptanceStats(FIRST)

    def append(self, token: int) -> None:
        """Record whether the lookup token was right, then append the token."""
        if self._match.length and (followed := self._texts.continue_match(self._match, (), 1)):
            self._chances.record(self._match.length, followed == [token])
        self._match = self._texts.extend(self._match, token)

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return the tokens that followed the longest matching suffix in the latest answer that contains it.

        The tokens end with that answer.
        """
        match = self._match
        for token in drafted:
            match = self._texts.extend(match, token)
        if not match.length or most < 1:
            return NO_PROPOSAL
        tokens = self._texts.continue_match(match, (), most)
        if _SEPARATOR in tokens:
            tokens = tokens[: tokens.index(_SEPARATOR)]
        return Proposal(tokens, [self._chances(match.length + i) for i in range(len(tokens))])
