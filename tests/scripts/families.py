"""Costs of steps by model family, at 0.3 to 0.5 billion parameters: plain, verification, and draft steps.

    python tests/scripts/families.py
    python tests/scripts/families.py gemma3_text opt --dtype bfloat16 --threads 1
    python tests/scripts/families.py smollm2 --dtype bfloat16

Random weights in the shapes of small published models, in float32 unless `--dtype` says otherwise; `smollm2` is
SmolLM2-135M with its own weights, made to run through its own forward and to answer chat prompts. Prints a table row a
family: the bytes that a plain step reads, their share of the time that reading them takes at the machine's bandwidth, a
verification of 4 and 8 tokens, and draft steps in int8, in int4, and in int4 with a head over a quarter of the
vocabulary (heads in int8), as multiples of a plain step; for families that run through their own forward, also decoded
tokens/s, plainly and with int8 drafts. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from models import run
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

import selfspec
from selfspec.basics.machine import read_bandwidth
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.measure.cost_fitting import forward_seconds
from selfspec.models.layout import apply_layout_
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.types.draft_path import FULL, DraftPath

CONTEXT, SECONDS = 128, 6.0  # tokens in the cache; of interleaved passes for each family
PROMPT, NEW, DRAFT = 32, 64, 4  # tokens of a prompt, of a text and of a draft
OWN_WEIGHTS, CHATS = "smollm2", 8  # the model that has them, and its prompts


def shape(hidden: int, inner: int, layers: int, heads: int, kv: int, words: int, **own: Any) -> dict[str, Any]:
    """A configuration's sizes under their usual names."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": words,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        **own,
    }


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LEAN = {
    "llama": shape(960, 2560, 32, 15, 5, 49152),
    "qwen2": shape(896, 4864, 16, 14, 2, 151936),
    "qwen3": shape(1024, 3072, 14, 16, 8, 151936, head_dim=128),
    "gemma2": shape(1152, 4608, 14, 4, 2, 128000, head_dim=256, sliding_window=512),
    "gemma3_text": shape(640, 2048, 18, 4, 1, 262144, head_dim=256, sliding_window=512),
    "olmo2": shape(1024, 4096, 18, 16, 16, 100352),
    "starcoder2": shape(1024, 4096, 24, 16, 2, 49152, sliding_window=None),
    "gpt_neox": shape(1024, 4096, 24, 16, 16, 50304, tie_word_embeddings=False, rope_parameters=PARTIAL),
    "mistral": shape(1024, 3584, 24, 16, 4, 32768, sliding_window=None, tie_word_embeddings=False),
    "smollm3": shape(1024, 3584, 20, 16, 4, 128256),
    "phi3": shape(1024, 3072, 24, 16, 16, 32064, sliding_window=None, tie_word_embeddings=False),
    "granite": shape(1024, 4096, 20, 16, 4, 49152),
    "glm4": shape(1024, 3584, 16, 8, 2, 151552, head_dim=128),
    "cohere2": shape(1024, 3584, 10, 8, 2, 255872, head_dim=128, sliding_window=512),
    "stablelm": shape(1024, 2816, 24, 16, 16, 100352, tie_word_embeddings=False, rope_parameters=PARTIAL),
}
GENERIC = {
    "opt": shape(1024, 4096, 30, 16, 16, 50272, ffn_dim=4096, word_embed_proj_dim=1024),
    "falcon": shape(1024, 4096, 30, 16, 16, 65024, new_decoder_architecture=False, multi_query=True),
    "qwen3_5_text": shape(
        1024, 3072, 24, 8, 2, 65536, head_dim=128, layer_types=["linear_attention"] * 3 + ["full_attention"]
    ),
}
GENERIC["qwen3_5_text"]["layer_types"] *= 6


def random_model(model_type: str, dtype: torch.dtype) -> Any:
    """A model of this type with normal weights, which are no bfloat16 numbers: they are held in their own bits."""
    config = AutoConfig.for_model(model_type, **{**LEAN, **GENERIC}[model_type])
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config).eval()
    drawn = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if weight.ndim < 2 and name.endswith(("weight", "bias")):
                weight.fill_(0.0 if name.endswith("bias") or "gemma" in model_type else 1.0)
            elif weight.ndim > 1 and weight.is_floating_point():
                flat = weight.view(-1)
                for i in range(0, flat.numel(), len(drawn)):
                    flat[i : i + len(drawn)] = drawn[: min(len(drawn), flat.numel() - i)]
    model.tie_weights()
    return model.to(dtype)


def matrix_bytes(model: Any) -> int:
    """The bytes of all weights that a step multiplies with: linears, and the head once."""
    seen: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            seen[module.weight.data_ptr()] = module.weight
    return sum(weight.numel() * weight.element_size() for weight in seen.values())


def random_prompts() -> list[list[int]]:
    """Prompts of random tokens."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40000, (PROMPT,), generator=draw).tolist() for _ in range(3)]


def chat_prompts(llm: LLM) -> list[list[int]]:
    """Held-out chat prompts, in the model's template."""
    lines = (files("selfspec.builtin") / "chat-heldout.jsonl").read_text().splitlines()
    return [llm.encode([{"role": "user", "content": json.loads(line)["prompt"]}]) for line in lines[:CHATS]]


def tokens_a_second(runtime: Runtime, path: DraftPath, prompts: Sequence[list[int]]) -> str:
    """Tokens/s plainly and with drafts of a fixed length along `path`, interleaved; drafts accepted; equal texts."""
    drafters = {"plain": PlainDrafter(), "drafted": LayerSkipDrafter(runtime, path, FixedK(DRAFT))}
    seconds: dict[str, list[float]] = {name: [] for name in drafters}
    drafted = accepted = equal = 0
    for prompt in prompts:
        texts = []
        for name, drafter in drafters.items():
            begun = time.perf_counter()
            text, outcomes = run(runtime, drafter, prompt, NEW)
            seconds[name].append(time.perf_counter() - begun)
            texts.append(text)
            drafted += sum(len(outcome.draft) for outcome in outcomes)
            accepted += sum(len(outcome.path) for outcome in outcomes)
        equal += texts[0] == texts[1]  # not all in bfloat16, where passes of several widths round near-ties otherwise
    plain, ours = (NEW / statistics.median(seconds[name]) for name in drafters)
    counted = f"{accepted / max(drafted, 1):.0%} accepted, {equal} of {len(prompts)} texts equal"
    return f"{plain:.1f} and {ours:.1f} ({ours / plain:.2f}), {counted}"


def row(model_type: str, dtype: torch.dtype) -> str:
    """The table's row of a family."""
    if model_type == OWN_WEIGHTS:
        llm = selfspec.load("smollm2-135m", profile="none", dtype=str(dtype).removeprefix("torch."), layout="rows")
        model, prompts = llm.model, chat_prompts(llm)
        read, runtime = matrix_bytes(model), GenericRuntime(model)
    else:
        model, prompts = random_model(model_type, dtype), random_prompts()
        read = matrix_bytes(model)
        apply_layout_(model, "native" if model_type in LEAN else "auto")
        runtime = open_runtime(model)
    modes = 2 * runtime.layers
    paths = {low: DraftPath.from_modes([low] * modes, head="int8") for low in ("int8", "int4")}
    some = tuple(range(model.config.vocab_size // 4))
    paths["some"] = DraftPath.from_modes(["int4"] * modes, head="int8", vocabulary=some)
    kept = [runtime.compile(path) for path in paths.values()]
    best: dict[Any, float] = {}
    bandwidth, ends = 0.0, time.monotonic() + SECONDS
    while time.monotonic() < ends:
        bandwidth = max(bandwidth, read_bandwidth(read, runtime.device))
        for key, rows, path in [(n, n, FULL) for n in (1, 4, 8)] + [(name, 1, path) for name, path in paths.items()]:
            seconds = forward_seconds(runtime, CONTEXT, rows=rows, repeats=5, path=path)
            best[key] = min(best.get(key, seconds), seconds)
    plain = best[1]
    generic = isinstance(runtime, GenericRuntime)
    cells = [
        f"`{model_type}`",
        "own forward" if generic else "native" if getattr(runtime, "native", False) else "eager",
        f"{read / 1e6:.0f}",
        f"{plain * 1e3:.1f}",
        f"{read / plain / bandwidth:.0%}",
        *(f"{best[key] / plain:.2f}" for key in (4, 8, *paths)),
        tokens_a_second(runtime, paths["int8"], prompts) if generic else "",
    ]
    assert kept
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*LEAN, *GENERIC, OWN_WEIGHTS])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    columns = ["family", "runtime", "MB read", "plain, ms", "of bandwidth", "v(4)", "v(8)", "int8", "int4"]
    columns.append("int4, 1/4 of vocabulary")
    print(f"| {' | '.join([*columns, 'tokens/s, plain and drafted'])} |")
    print("|---" * (len(columns) + 1) + "|")
    for model_type in given.families:
        print(row(model_type, getattr(torch, given.dtype)), flush=True)


if __name__ == "__main__":
    main()
