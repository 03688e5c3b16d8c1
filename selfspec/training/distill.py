"""Distillation of the model into a smaller draft model: a subset of the model's layers, or another model."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import disk_errors, set_mode
from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import forward_seconds
from selfspec.models.families import parts_of
from selfspec.models.loading import load_model
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.options import Loss
from selfspec.training.path_learner import LOSSES, PLACES
from selfspec.training.texts import TrainingText
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import FULL, DraftPath

KEEP_EVERY = 5  # by default one layer in this many is kept
OF_LAYERS, NUMBERED = ("layer_types", "no_rope_layers"), "mlp_only_layers"  # per-layer fields of configurations
CONTEXT, REPEATS = 128, 20  # keys in the KV cache while steps are timed, and repeats


def keep_layers(model: Any, count: int) -> Any:
    """Return a copy of a `transformers` model with `count` of its layers, evenly spaced from the first to the last.

    Raises `SelfspecError` for a `count` below 1 or above the number of layers, and if the copy lacks weights.
    """
    layers = model.config.num_hidden_layers
    if not 1 <= count <= layers:
        raise SelfspecError(f"layers {count}: the model has {layers}, so 1 to {layers} can be kept")
    kept_layers = [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    for name in OF_LAYERS:
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[layer] for layer in kept_layers])
    if getattr(config, NUMBERED, None):
        setattr(config, NUMBERED, [i for i, layer in enumerate(kept_layers) if layer in getattr(config, NUMBERED)])
    made = type(model)(config)
    for parameter in made.parameters():  # no buffers: rotary frequencies are of float32 in every dtype
        parameter.data = parameter.data.to(model.dtype)
    made.generation_config = copy.deepcopy(model.generation_config)
    state = {}
    for name, value in model.state_dict().items():
        before, separator, after = name.partition("layers.")
        layer, dot, rest = after.partition(".")
        if not separator:
            state[name] = value
        elif int(layer) in kept_layers:
            state |= {
                f"{before}layers.{i}{dot}{rest}": value
                for i, kept_layer in enumerate(kept_layers)
                if kept_layer == int(layer)
            }
    missing = set(made.load_state_dict(state, strict=False).missing_keys)
    if missing - set(getattr(made, "_tied_weights_keys", None) or ()):
        raise SelfspecError(f"{type(model).__name__}: a copy with fewer layers lacks the weight {min(missing)}")
    return made.to(model.device).eval()


def drafted_layers(runtime: Runtime, layers: int | None) -> int:
    """Return the number of layers for drafting: `layers`, or a fifth of the model's layers by default.

    Raises `SelfspecError` for more layers than the model has.
    """
    if layers is not None and layers > runtime.layers:
        raise SelfspecError(f"layers {layers}: the model has {runtime.layers}, so 1 to {runtime.layers} can be kept")
    return layers or max(runtime.layers // KEEP_EVERY, 1)


class DistillLearner:
    """Trainer of a smaller draft model (the student) on the model's distributions.

    The student's embeddings and head are frozen. It is trained in float32 and written in `dtype`. `student`: the name
    of a model (None: a copy of `layers` of the model's own layers). `seed`: the random seed. Raises `SelfspecError` if
    the student cannot be loaded, or has another vocabulary size.
    """

    depth, places, rate = 1, PLACES, 1.5e-3

    def __init__(self, runtime: Runtime, *, student: str | None, layers: int | None, loss: Loss, seed: int) -> None:
        torch.manual_seed(seed)
        self.runtime, self._loss = runtime, LOSSES[loss]
        if student is None:
            self.student = keep_layers(runtime.model, drafted_layers(runtime, layers))
            self.dtype = self.student.dtype
            if self.dtype.itemsize < 4:  # steps are smaller than what 16 bits tell apart
                self.student.float()
        else:
            self.student = load_model(student, device=str(runtime.device), dtype="float32")[0]
            self.dtype = self.student.dtype
        theirs, ours = self.student.config.vocab_size, runtime.skeleton.identity.vocabulary
        if theirs != ours:
            raise SelfspecError(
                f"the student has {theirs} tokens, the model {ours}; expected one of the same tokenizer"
            )
        self.student.requires_grad_(False)
        parts = parts_of(self.student)
        trained = [*(layer.module for layer in parts.layers), parts.norm]
        self.net = nn.ModuleList(trained).requires_grad_(True)

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Return the divergence between the student's and the model's distributions, over windows of one length."""
        ids, log_p = self._targets(windows)
        log_q = self.student(ids, use_cache=False).logits.float().log_softmax(-1)
        return self._loss(log_p, log_q).sum(-1).mean()

    @torch.no_grad()
    def _targets(self, windows: Sequence[TrainingText]) -> tuple[Tensor, Tensor]:
        """Return the tokens `[B, n]` of windows of one length, and the model's log-probabilities `[B, n, V]` there."""
        ids = torch.stack([window.tokens for window in windows]).to(self.runtime.device)
        return ids, self.runtime.model(ids, use_cache=False).logits.float().log_softmax(-1)

    @torch.no_grad()
    def acceptance(self, texts: Sequence[TrainingText]) -> list[float]:
        """Return, for each draft position, the fraction of drafts that match the text up to and including it.

        A draft matches if its greedy tokens are the text's tokens. Only drafts that start in answers count.
        """
        right, all_of = torch.zeros(self.places), 0
        for text in texts:
            agrees = self._agrees(text)
            starts = len(agrees) - self.places + 1
            if starts < 1:
                continue
            runs = agrees.unfold(0, self.places, 1).cumprod(-1)
            right += runs.sum(0)
            all_of += starts
        return (right / max(all_of, 1)).tolist()

    def _agrees(self, text: TrainingText) -> Tensor:
        """Return for each token of the answer whether the student's most likely token is this token."""
        ids = text.tokens[None].to(self.runtime.device)
        logits: Tensor = self.student(ids, use_cache=False).logits
        return logits[0, text.answer - 1 : -1].argmax(-1).cpu() == text.tokens[text.answer :]


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer to a folder atomically, replacing its contents.

    Raises `SelfspecError` if they cannot be written.
    """
    made = None
    try:
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        with _quietly(), disk_errors():
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        set_mode(made, 0o777)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    except OSError as error:  # such as a full disk
        raise SelfspecError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def write_student(llm: LLM, learner: DistillLearner, out: Path) -> tuple[Path, Path]:
    """Write the student to the folder `out` / distill, and a profile that drafts with it; return both paths.

    The student drafts in full precision, or in int8 if that is faster on this machine.
    """
    folder = out / "distill"
    write_model(learner.student.to(learner.dtype), llm.tokenizer, folder)
    student, plain = LeanRuntime(learner.student), forward_seconds(llm.runtime, CONTEXT, repeats=REPEATS)
    ways: dict[Literal["int8"] | None, DraftPath] = {
        None: FULL,
        "int8": DraftPath.from_modes(["int8"] * (2 * student.layers), head="int8"),
    }
    took = {bits: forward_seconds(student, CONTEXT, repeats=REPEATS, path=path) for bits, path in ways.items()}
    bits = min(took, key=lambda candidate: took[candidate])
    spec = ModelSpec(
        model=folder.name,
        bits=bits,
        step=round(took[bits] / plain, 4),
        controller=ControllerSpec(name="rate"),
        proposers=[ProposerSpec()],
    )
    write_profile(Profile(model=llm.identity, draft=spec), out / "distill.yaml")
    return folder, out / "distill.yaml"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress stderr, and so progress bars, unless it is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
