"""The command `selfspec index`: make a retrieval store of texts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

from selfspec.basics.files import check_writable, kind
from selfspec.cli.common import model_for, print_json, progress, stderr, stdout
from selfspec.cli.data import unescape_newlines
from selfspec.cli.options import IndexCommand
from selfspec.models.loading import load_tokenizer, read_identity
from selfspec.proposers.history import AnswerHistory, keeps_answers
from selfspec.proposers.store import Store, write_store
from selfspec.text.prompt_files import read_texts

BATCH = 64  # texts encoded per call of the tokenizer


def run(options: IndexCommand) -> None:
    """Validate the options, read the texts, and write the store. Raises `SelfspecError`."""
    begun = time.perf_counter()
    model = model_for(options.model, None)
    check_writable(options.out)
    existing: list[tuple[int, ...]] = []
    vocabulary = read_identity(model).vocabulary or 0
    if options.add and kind(options.out) != "missing":
        store = Store(options.out)
        store.check(vocabulary)
        existing = list(store)
    template = unescape_newlines(options.template)
    texts = list[str]()
    for path in options.texts:
        if keeps_answers(path):
            existing += AnswerHistory(path, vocabulary)
        else:
            more, note = read_texts(path, column=options.column, template=template)
            texts += more
            if note is not None:
                warnings.warn(note, stacklevel=2)
    encoded = list(_encoded(model, texts))
    tokens = write_store(options.out, [*existing, *encoded], vocabulary=vocabulary)
    stats = {
        "store": str(options.out),
        "model": model,
        "texts": sum(map(bool, [*existing, *encoded])),
        "tokens": tokens,
        "bytes": options.out.stat().st_size,
        "seconds": round(time.perf_counter() - begun, 2),
    }
    if options.json:
        print_json(stats)
        return
    stdout().print(
        f"{stats['texts']} texts, {tokens:,} tokens, {stats['bytes']:,} bytes, in {stats['seconds']} s: {options.out}. "
        f"Use it with: selfspec generate --model {model} --store {options.out}",
        soft_wrap=True,
        markup=False,
    )


def _encoded(model: str, texts: list[str]) -> Iterator[list[int]]:
    """Yield the texts' token ids, without special tokens."""
    tokenizer = load_tokenizer(model)
    with progress(stderr()) as shown:
        task = shown.add_task("encoding", total=len(texts))
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            yield from tokenizer(batch, add_special_tokens=False).input_ids
            shown.advance(task, len(batch))
