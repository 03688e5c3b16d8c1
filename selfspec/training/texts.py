"""The training texts: the model's own, with the output streams of some of its layers at every token.

Texts are decoded together and cached on disk, several in a file; only the parts that the current batch reads are in
memory. An interrupted call keeps the files that it wrote, and the next call continues after them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from selfspec.basics.files import files_in, kind, write_bytes
from selfspec.drafters import PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.training.training_prompts import USERS_TURN, Beginning, UserTurns

ROWS = 128  # texts decoded together: enough for full throughput
EACH = 32  # texts per file
HELD_OUT = 16  # one in this many texts is held out
TEMPERATURES = (0.0, 0.8)  # alternating


class TrainingText(NamedTuple):
    """Tokens `[n]`, and the layers' output streams at them, `[n - 1 or n, layers, D]`, bfloat16.

    `answer`: the index of the answer's first token.
    """

    tokens: Tensor
    streams: Tensor
    answer: int

    def pairs(self, depth: int) -> int:
        """Return the number of pairs that are followed by the targets of `depth` steps."""
        return min(len(self.streams), len(self.tokens) - 1) - depth


class _Place(NamedTuple):
    """The file of a text, and its sizes."""

    path: Path
    tokens: int
    streams: int
    answer: int


def layers_of(layers: int) -> tuple[int, ...]:
    """Return the layers whose streams are stored, of `layers`: a low one, a middle one, and the last (as EAGLE-3)."""
    return tuple(sorted({min(2, layers), (layers + 1) // 2, layers}))


@dataclass(slots=True)
class TextStore:
    """Texts in the files of a folder, by number; only the first `most` of them, if set."""

    folder: Path
    most: int | None = None
    index: dict[int, _Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in files_in(self.folder) if kind(self.folder) == "folder" else []:
            if path.suffix == ".safetensors":
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                sizes_by_number = json.loads(file.metadata()["texts"])
        except Exception:  # a damaged or foreign file: its texts are made again
            return
        places = {int(number): _Place(path, *sizes) for number, sizes in sizes_by_number.items()}
        self.index.update({n: place for n, place in places.items() if self.most is None or n < self.most})

    def __len__(self) -> int:
        return len(self.index)

    def add(self, texts: dict[int, TrainingText]) -> None:
        """Write texts to a new file."""
        tensors, sizes_by_number = {}, {}
        for number, text in texts.items():
            tensors[f"{number}.tokens"], tensors[f"{number}.streams"] = text.tokens.int(), text.streams
            sizes_by_number[number] = len(text.tokens), len(text.streams), text.answer
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{min(texts):08d}-{max(texts):08d}.safetensors"
        write_bytes(path, save(tensors, {"texts": json.dumps(sizes_by_number)}))
        self.index.update({number: _Place(path, *sizes) for number, sizes in sizes_by_number.items()})

    def read(self, number: int, first: int = 0, last: int | None = None) -> TrainingText:
        """Read a text from its file, or only its tokens and streams from `first` to before `last`."""
        place, span = self.index[number], slice(first, last)
        with safe_open(place.path, "pt") as file:
            streams: Tensor = file.get_slice(f"{number}.streams")[span]
            return TrainingText(file.get_tensor(f"{number}.tokens").long()[span], streams, max(place.answer - first, 0))

    @property
    def total(self) -> int:
        """The number of tokens of all texts."""
        return sum(place.tokens for place in self.index.values())

    def tokens(self, number: int) -> Tensor:
        """Read the tokens of a text."""
        with safe_open(self.index[number].path, "pt") as file:
            tokens: Tensor = file.get_tensor(f"{number}.tokens").long()
            return tokens

    def pairs(self, number: int, depth: int) -> int:
        """Return `TrainingText.pairs` of a text without reading it."""
        place = self.index[number]
        return min(place.streams, place.tokens - 1) - depth

    def numbers(self, *, held_out: bool) -> list[int]:
        """Return the numbers of the held-out texts, or of the others."""
        return sorted(n for n in self.index if (n % HELD_OUT == 0) == held_out)


class _Collector(PlainDrafter):
    """A plain drafter that collects the layers' output streams."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.hidden = layers
        self.streams: dict[SequenceState, list[Tensor]] = {}

    def _keep(self, seq: SequenceState, step: ForwardOutput) -> None:
        if self.hidden[0] in step.hidden:
            streams = torch.stack([step.hidden[layer][0] for layer in self.hidden], 1)
            self.streams[seq].append(streams.to("cpu", torch.bfloat16))

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        self.streams[seq] = []
        self._keep(seq, prefill)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        self._keep(seq, outcome.step)


def make(
    runtime: Runtime,
    texts: TextStore,
    begin: Iterator[Beginning],
    *,
    max_new_tokens: int,
    most: int,
    keep_going: Callable[[], bool] = lambda: True,
    on_tokens: Callable[[int], None] = lambda new: None,
    rows: int = ROWS,
) -> None:
    """Decode texts with an answer of at most `max_new_tokens` tokens each, until there are `most` of them.

    They alternate between greedy and temperature .8. Text `n` has the n-th beginning and the seed n. `on_tokens`
    receives the number of new tokens. If `keep_going` returns False, decoding stops, and unfinished texts that have
    reached the answer are kept.
    """
    ends = runtime.skeleton.ends
    collector = _Collector(layers_of(runtime.layers))
    waiting = _numbered(begin, texts, most)
    under_way: dict[SequenceState, tuple[int, UserTurns]] = {}
    done: dict[int, TrainingText] = {}

    def finished(seq: SequenceState) -> None:
        number, processor = under_way.pop(seq)
        streams = torch.cat(collector.streams.pop(seq))
        generated = seq.tokens[len(processor.beginning.tokens) :]
        if processor.answering(generated):
            first = (
                generated.index(processor.beginning.turn[0]) + len(processor.beginning.turn)
                if processor.beginning.turn
                else 0
            )
            tokens = torch.tensor(seq.tokens)
            done[number] = TrainingText(tokens, streams, len(processor.beginning.tokens) + first)
        if len(done) == EACH:
            texts.add(done)
            done.clear()

    with Engine(runtime.with_new_cache(rows=rows), collector) as engine:
        left = True
        while keep_going():
            while left and len(engine.running) < rows and keep_going():
                if (next_text := next(waiting, None)) is None:
                    left = False
                else:
                    seq = _sequence(*next_text, max_new_tokens, ends)
                    under_way[seq] = next_text[0], seq.sampler.processors[0]
                    engine.join(seq)
            if not engine.running:
                break
            for seq, outcome in engine.step():
                on_tokens(len(outcome.tokens))
                if not seq.remaining:
                    finished(seq)
        for seq in engine.running:
            finished(seq)
    if done:
        texts.add(done)


def _numbered(begin: Iterator[Beginning], texts: TextStore, most: int) -> Iterator[tuple[int, Beginning]]:
    for number in range(most):
        beginning = next(begin)
        if number not in texts.index:
            yield number, beginning


def _sequence(number: int, beginning: Beginning, max_new_tokens: int, ends: frozenset[int]) -> SequenceState:
    processor = UserTurns(beginning, TEMPERATURES[number % len(TEMPERATURES)])
    generated: list[int] = []

    def ended(token: int) -> bool:
        """Return whether a token ends the text: an end token does, unless it ends the user's turn."""
        generated.append(token)
        return token in ends and processor.answering(generated[:-1])

    sampler = Sampler(temperature=1.0, seed=number, tied=False, processors=[processor])
    total_new_tokens = max_new_tokens + (USERS_TURN + len(beginning.turn) if beginning.turn else 0)
    return SequenceState(list(beginning.tokens), total_new_tokens, sampler, stop=ended)
