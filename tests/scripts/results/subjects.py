"""The models, prompts, profiles and files that `run.py` measures with."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import pathlib
import subprocess
import sys
import tarfile
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from selfspec import builtin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = ROOT / "docs" / "results"
BUILD = ROOT / "build" / "results"
MODEL = "smollm2-135m"
NEW = 64  # tokens of an answer
ASKED = {
    "Summarise this module in a few sentences.": argparse,
    "Write the first function of this module again, with type annotations.": pathlib,
    "What is this module for? Answer with examples from its code.": tarfile,
    "List the classes of this module, each with a sentence on what it does.": typing,
}
DOCUMENTS = {256: 4, 1024: 4, 4096: 4, 8100: 2}  # number of texts by tokens of the prompt


def digest(tokens: Sequence[int]) -> str:
    """A short digest of token ids, which tells whether two texts are equal without holding them."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


class Question(NamedTuple):
    """A prompt: its number in its file, the task that it belongs to, its token ids."""

    number: int
    task: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """A digest of the token ids."""
        return digest(self.ids)


@dataclass
class Run:
    """The options of one call of `run.py`, and what its comparisons share: models, profiles and files.

    `ends`: the time at which measuring stops.
    """

    given: argparse.Namespace
    ends: float
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = BUILD / self.given.machine
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def tokenizer(self) -> Any:
        """SmolLM2's tokenizer."""
        from selfspec.models.loading import load_tokenizer

        return load_tokenizer(MODEL)

    @property
    def source(self) -> str:
        """The description of the questions in the tables."""
        if self.given.prompts is None:
            return "held-out chat prompts that come with selfspec"
        return self.given.source or f"{self.given.limit} questions of {self.given.prompts.name}"

    def chat(self, text: str) -> tuple[int, ...]:
        """A message as a chat's token ids."""
        message = [{"role": "user", "content": text}]
        return tuple(self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    def searched(self, dtype: str, temperature: float = 0.0) -> Path:
        """The profile of a search in this dtype, at the temperature that it is used at; else with default options."""
        profile = self.folder / (f"{dtype}-{temperature:g}.yaml" if temperature else f"{dtype}.yaml")
        if not profile.exists():
            command = ["-m", "selfspec", "search", "--model", self.model_of(MODEL, dtype), "--dtype", in_torch(dtype)]
            command += ["--temperature", str(temperature)]
            command += ["--threads", str(self.given.threads), "--keep-best", "--out", str(profile)]
            subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
        return profile

    def int4(self, dtype: str) -> Path:
        """A profile of all sub-layers in int4, by the quantiser for few texts."""
        profile = self.folder / f"{dtype}.int4.yaml"
        if not profile.exists():
            command = ["-m", "selfspec", "quantize", "--model", self.model_of(MODEL, dtype), "--dtype", in_torch(dtype)]
            command += ["--int4", "weighted", "--threads", str(self.given.threads)]
            command += ["--out", str(profile.with_suffix(".safetensors"))]
            subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
        return profile

    def model_of(self, model: str, dtype: str) -> str:
        """The model to load: SmolLM2 as a folder with its groups shifted; `held` has weights rounded to bfloat16."""
        if model != MODEL:
            return model
        folder = self.folder / ("held" if dtype == "held" else "shifted")
        if not (folder / "config.json").exists():
            import torch

            from selfspec.models.loading import load_model

            loaded, tokenizer = load_model(model, device="cpu", dtype="float32")
            shift_groups_(loaded)
            if dtype == "held":
                for weight in loaded.parameters():
                    weight.data = weight.data.to(torch.bfloat16).float()
            loaded.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    @cached_property
    def files(self) -> dict[str, Path]:
        """SmolLM2's 4-bit file; the same weights in float32, and these in 8 bits where llama.cpp is there."""
        from selfspec.models.hub_names import packaged_file

        found = {"4 bits": packaged_file(MODEL), "float32": self.folder / "float32.gguf"}
        if not found["float32"].exists():
            widen = [sys.executable, str(HERE.parent / "widen_gguf.py"), str(found["4 bits"]), str(found["float32"])]
            subprocess.run(widen, check=True)
        if self.given.llama_python:
            found["8 bits"] = self.folder / "8-bits.gguf"
            if not found["8 bits"].exists():
                files = [str(found["float32"]), str(found["8 bits"])]
                command = [self.given.llama_python, str(HERE / "decoders.py"), "quantise", *files]
                subprocess.run(command, check=True, capture_output=True)
        return found


def shift_groups_(model: Any, by: int = 16) -> None:
    """Roll the units of a LLaMA: the same function, but groups of weights are no longer those of its 4-bit file."""
    import torch

    body, size = model.model, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        body.embed_tokens.weight.copy_(body.embed_tokens.weight.roll(by, 1))
        body.norm.weight.copy_(body.norm.weight.roll(by))
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(norm.weight.roll(by))
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight.roll(by, 1))
            for linear in (attention.o_proj, mlp.down_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight.roll(by, 0))
            mlp.down_proj.weight.copy_(mlp.down_proj.weight.roll(by, 1))
            value, output = attention.v_proj.weight, attention.o_proj.weight  # within each head
            value.copy_(value.unflatten(0, (-1, size)).roll(by, 1).flatten(0, 1))
            output.copy_(output.unflatten(1, (-1, size)).roll(by, 2).flatten(1))


def in_torch(dtype: str) -> str:
    """The dtype that a model is loaded in."""
    return "float32" if dtype == "held" else dtype


def questions(run: Run, *, others: bool = False) -> list[Question]:
    """The prompts of the file: as many as asked for, spread evenly over it; `others`: as many of those between them."""
    if run.given.prompts is None:
        rows = [{"prompt": text, "task": "chat"} for text, _ in builtin.chat_prompts("heldout")]
    else:
        rows = [json.loads(line) for line in run.given.prompts.read_text("utf-8").splitlines() if line.strip()]
    numbers = spread(range(len(rows)), run.given.limit)
    if others:
        numbers = spread(sorted({*range(len(rows))} - {*numbers}), run.given.limit)
    return [Question(number, rows[number]["task"], run.chat(rows[number]["prompt"])) for number in numbers]


def held_out(run: Run) -> list[Question]:
    """Prompts of the file that `questions` leaves out: nothing was tuned on them."""
    return questions(run, others=True)


def spread(numbers: Sequence[int], limit: int) -> list[int]:
    """`limit` of some numbers at most, spread evenly over them."""
    limit = min(limit, len(numbers))
    return [numbers[at * len(numbers) // limit] for at in range(limit)]


def editing(run: Run) -> list[Question]:
    """Functions of Python's library, each to be written again with one name replaced."""
    sys.path.insert(0, str(HERE.parent))
    from editing import prompts

    return [Question(number, "editing", run.chat(text)) for number, text in enumerate(prompts()[:12])]


def documents(run: Run) -> list[Question]:
    """Modules of Python's library, cut to some lengths, each with something to write about it."""
    found: list[Question] = []
    for length, count in DOCUMENTS.items():
        for text, module in list(ASKED.items())[:count]:
            source = run.tokenizer(inspect.getsource(module)).input_ids
            room = length - len(run.chat(f"{text}\n\n"))
            ids = run.chat(f"{text}\n\n{run.tokenizer.decode(source[:room])}")[-length:]
            found.append(Question(len(found), str(length), ids))
    return found


def code(run: Run) -> list[Question]:
    """The built-in model's held-out prompts."""
    import selfspec

    llm = selfspec.load("builtin", profile="none")
    prompts = builtin.prompts("heldout")[:12]
    return [Question(number, "code", tuple(llm.encode(text))) for number, text in enumerate(prompts)]
