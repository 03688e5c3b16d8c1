"""An EAGLE head (Li et al. 2401.15077, 2503.01840): one decoder layer that goes on from the model's last stream.

Pair i of a text is its token i + 1 and the stream that left the model's last layer at token i. The head reads pairs,
and gives the next pair's stream and logits of the token after it; where the model has not been, it reads its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.basics.errors import SelfspecError
from selfspec.facts.draft_path import FULL, DraftPath
from selfspec.facts.skip import SkipSet
from selfspec.parts.files import PartFile
from selfspec.runtime.forward import Runtime

KIND = "eagle"
LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of a head, as `transformers` names a LLaMA's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0


class EagleHead:
    """A head at work for a model: a LLaMA of one layer with a cache of its own; `low`: in 8 bits where they can be had.

    `head_dim` and widths are the part's own; the head over the vocabulary is the model's, over the part's tokens.
    `layers`: the number of the stream that it reads, in `Step.hidden`. Raises `SelfspecError` for a part of another
    kind or model, and where the model's head is not at hand (quantised, adapted).
    """

    kind = KIND

    def __init__(self, target: Runtime, part: PartFile, *, low: bool = True) -> None:
        part.check(KIND, target.skeleton.identity)
        self.target = target
        self.layers = target.layers
        shape = EagleShape(**part.settings["shape"])
        dtype, device = target.dtype, target.device
        take = {name: tensor.to(device, dtype) for name, tensor in part.tensors.items() if name != "vocabulary"}
        self._embed_norm, self._stream_norm, self._fc = (
            take[f"{name}.weight"] for name in ("embed_norm", "stream_norm", "fc")
        )
        self._eps = shape.eps
        self.words = part.tensors["vocabulary"].long().to(device)
        self._vocabulary = target.skeleton.identity.vocabulary or 0
        self._runtime = Runtime(
            _layer(shape, take, _rows_of_head(target, self.words), target),
            rows=target.rows,
            kernel=target.skeleton.lowered.kernel,
        )
        path = DraftPath(int8=SkipSet((0,), (0,)), head="int8") if low else FULL
        self._way = self._runtime.compile(path)
        self.bytes = self._way.bytes + sum(t.numel() * t.element_size() for t in take.values())

    def reserve(self, slots: int) -> None:
        """Hold so many pairs of each row."""
        if slots > self._runtime.cache.slots:
            self._runtime.cache.length = [self._runtime.cache.slots] * self._runtime.rows  # all of it is kept
            self._runtime.reserve(slots)

    def read(self, row: int, start: int, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the `words` after the last of the pairs `start` on, and its stream `[1, D]`.

        `tokens` `[n]` and `streams` `[n, D]`.
        """
        embedded = self.target.skeleton.embed(tokens.unsqueeze(0))[0]
        width = (embedded.shape[-1],)
        both = torch.cat(
            (
                F.rms_norm(embedded, width, self._embed_norm, self._eps),
                F.rms_norm(streams.to(embedded.dtype), width, self._stream_norm, self._eps),
            ),
            dim=-1,
        )
        step = self._runtime.forward(
            tokens.unsqueeze(0),
            start,
            path=self._way,
            rows=slice(row, row + 1),
            logits="last",
            hidden=(1,),
            stream=F.linear(both, self._fc).unsqueeze(0),
        )
        assert step.logits is not None
        return step.logits[0, -1], step.hidden[1][0, -1:]

    def over_all(self, logits: Tensor) -> Tensor:
        """Logits of the words as `[V]` over all tokens: minus infinity for those that the part does not know."""
        every = logits.new_full((self._vocabulary,), -torch.inf)
        every[self.words] = logits
        return every


def _rows_of_head(target: Runtime, words: Tensor) -> Tensor:
    head = target.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or getattr(head, "bias", None) is not None:
        raise SelfspecError("the model's head is not at hand as plain weights; an EAGLE head needs it")
    rows: Tensor = weight.detach()[words.to(weight.device)]
    return rows


def _layer(shape: EagleShape, tensors: Mapping[str, Tensor], head: Tensor, target: Runtime) -> Any:
    """A LLaMA of one layer with these weights."""
    config = LlamaConfig(
        vocab_size=len(head),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        max_position_embeddings=target.skeleton.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.device(target.device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # and not rope's frequencies, which stay exact
        parameter.data = parameter.data.to(target.dtype)
    state = {f"model.layers.0.{name}.weight": tensors[f"layer.{name}.weight"] for name in LAYER}
    state |= {"model.norm.weight": tensors["norm.weight"], "model.embed_tokens.weight": head, "lm_head.weight": head}
    model.load_state_dict(state, strict=False)
    return model


def part_of(shape: EagleShape, tensors: Mapping[str, Tensor], words: Tensor, target: Runtime) -> PartFile:
    """A trained head as a file holds it; `tensors` by the names that `EagleHead` reads."""
    held = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    held["vocabulary"] = words.int().cpu()
    return PartFile(KIND, {"shape": asdict(shape)}, held, target.skeleton.identity)
