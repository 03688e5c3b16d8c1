"""Tiny random models of every supported family, and small ways to run them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from selfspec import builtin
from selfspec.drafters import PlainDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.rules import Rule, Verdict, find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-mha": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-mqa-tied": LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=16),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
}


def tiny(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random model; its weights are large enough for logits that differ, its biases and norms are not trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0 if name.endswith("bias") else 1))
            else:
                parameter.mul_(8)
    return model


def small(vocabulary: int = 11, layers: int = 3, *, seed: int = 0) -> Any:
    """A small float64 LLaMA for the tests of the loop."""
    sizes = {**SIZES, "vocab_size": vocabulary, "num_hidden_layers": layers, "hidden_size": 16}
    return tiny(LlamaConfig(**{**sizes, "intermediate_size": 16, "num_attention_heads": 2}), seed=seed)


def small_and_large(vocabulary: int) -> Iterator[tuple[str, Any]]:
    """A tiny LLaMA, then one of 40 million weights, by name: what memory is compared on while they are loaded."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}
    for name, changes in (("small", {}), ("large", wide)):
        sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "vocab_size": vocabulary, **changes}
        torch.manual_seed(0)
        yield name, AutoModelForCausalLM.from_config(LlamaConfig(**sizes))


def exact_norms(model: Any) -> Any:
    """The same model with norms that do not cast float64 down to float32, as a reference to 1e-10."""

    def exact(norm: Any) -> nn.RMSNorm:
        new = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=norm.weight.dtype)
        new.weight = norm.weight
        return new

    model.model.norm = exact(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = exact(layer.input_layernorm)
        layer.post_attention_layernorm = exact(layer.post_attention_layernorm)
    return model


def tokens_for(model: Any, rows: int = 1, n: int = 40, seed: int = 1) -> Tensor:
    """Tokens `[rows, n]` that a model knows."""
    return torch.randint(model.config.vocab_size, (rows, n), generator=torch.Generator().manual_seed(seed))


def chunked(runtime: Runtime, tokens: Tensor, widths: Sequence[int]) -> Tensor:
    """Logits of all tokens, fed in passes of these widths."""
    parts, start = [], 0
    with runtime.session(tokens.shape[1]):
        for width in widths:
            parts.append(runtime.forward(tokens[:, start : start + width], start).logits)
            start += width
    assert start == tokens.shape[1]
    return torch.cat([part for part in parts if part is not None], dim=1)


def run(
    runtime: Runtime,
    drafter: Drafter,
    prompt: list[int],
    room: int,
    *,
    sampler: Sampler | None = None,
    ends: frozenset[int] = frozenset(),
    rule: str | Rule | None = None,
    **options: Any,
) -> tuple[list[int], list[Outcome]]:
    """Decode to the end: new tokens and outcomes."""
    sampler = sampler or Sampler()
    seq = SequenceState(list(prompt), room, sampler, ends)
    rule = find_rule(rule, sampler) if isinstance(rule, str) else rule
    outcomes = list(decode(runtime, drafter, seq, rule=rule, **options))
    return seq.tokens[len(prompt) :], outcomes


def drafting_rounds(
    runtime: Runtime,
    drafter: Drafter,
    prompt: list[int],
    room: int,
    *,
    sampler: Sampler | None = None,
    rule: str | Rule | None = None,
) -> tuple[SequenceState, Iterator[Outcome]]:
    """A sequence whose first round, which drafts nothing, emits the prompt's last token, and its later rounds.

    The drafter sees the sampler and the rule from the beginning; no coin or draw goes into the first round.
    """
    sampler = sampler or Sampler()
    rule = find_rule(rule, sampler) if isinstance(rule, str) else rule
    seq = SequenceState(list(prompt[:-1]), room + 1, sampler, rule=rule)

    def last_of_prompt(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> Verdict:
        assert not len(draft)
        return Verdict((), prompt[-1], None if sampler.greedy else sampler.probs(scores))

    def rounds() -> Iterator[Outcome]:
        with Engine(runtime, drafter) as engine:
            engine.join(seq)
            seq.rule = last_of_prompt
            engine.step()
            seq.rule = rule
            while seq.remaining:
                ((_, outcome),) = engine.step()
                yield outcome

    return seq, rounds()


def run_drafting(
    runtime: Runtime, drafter: Drafter, prompt: list[int], room: int, **options: Any
) -> tuple[list[int], list[Outcome]]:
    """The new tokens and outcomes of the rounds that may draft, as `run` gives those of all; see `drafting_rounds`."""
    seq, rounds = drafting_rounds(runtime, drafter, prompt, room, **options)
    outcomes = list(rounds)
    return seq.tokens[len(prompt) :], outcomes


def plain(runtime: Runtime, prompt: list[int], room: int) -> list[int]:
    """Greedy plain decoding."""
    return run(runtime, PlainDrafter(), prompt, room)[0]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """With so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def adapted(seed: int) -> Any:
    """The built-in model with low-rank changes to its attention and its down projections, which change what it says."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(str(builtin.model_folder()), dtype=torch.float32)
    changed = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, changed).eval()
