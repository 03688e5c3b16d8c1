"""One process for each kind of decoder that is compared: it is asked one thing after the other on its input.

    python decoders.py KIND SETTINGS

A line of JSON asks for tokens, and one answers. Each kind imports what it needs and no more, as llama.cpp and
openvino-genai have environments of their own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Noted = Iterator[tuple[int, float]]
"""New tokens, each with the time that it came at."""
Decode = Callable[[list[int], int, float], Noted]
"""`decode(prompt, new, temperature)`, end-of-sequence tokens like any; a negative `new`: as many, or up to the end."""

LOOKUP_TOKENS = 10  # as in transformers' documentation


def selfspec_methods(given: dict[str, Any]) -> dict[str, Decode]:
    """The drafters of `given["drafts"]`, under the guard as in `generate`: `METHOD`, `METHOD@PROFILE` or `default`.

    `int8@PROFILE` and `int4@PROFILE` draft with every sub-layer in this mode, without lookup tokens.
    `quantized@PROFILE` is a profile that `quantize` wrote.
    """
    import torch

    torch.set_num_threads(given["threads"])
    import selfspec
    from selfspec.engine.engine import decode
    from selfspec.llm.default_profile import default_profile
    from selfspec.profile import read_profile
    from selfspec.profile.shipped import by_method
    from selfspec.speculation.sampling import Sampler
    from selfspec.speculation.sequence import SequenceState

    llm = selfspec.load(given["model"], dtype=given["dtype"], profile="none", drafting=True, quantized_drafts=True)
    identity = llm.runtime.skeleton.identity
    held = f", weights held in {llm.held}" if llm.held else ""
    print(f"selfspec: {given['dtype']}, {given['threads']} threads, weights by {llm.layout}{held}", file=sys.stderr)

    def method(named: str) -> Decode:
        name, _, file = named.partition("@")
        profile = read_profile(Path(file)) if file else None
        if name == "default":
            chosen = default_profile(llm.model, identity)
        elif name == "quantized":
            chosen = profile
        elif name in ("int8", "int4"):
            assert profile is not None
            chosen = all_in_one_mode(profile, name, identity.layers)
        else:
            chosen = by_method(name, profile, identity)
        assert chosen is not None, name
        drafter = llm.guarded_drafter(chosen)

        def run(prompt: list[int], new: int, temperature: float) -> Noted:
            ends = llm.runtime.skeleton.ends if new < 0 else frozenset()
            state = SequenceState(list(prompt), abs(new), Sampler(temperature=temperature), ends)
            for outcome in decode(llm.runtime, drafter, state):
                now = time.perf_counter()
                yield from ((token, now) for token in outcome.tokens)

        return run

    return {name: method(named) for name, named in given["drafts"].items()}


def all_in_one_mode(profile: Any, mode: Any, layers: int) -> Any:
    """A searched profile with every sub-layer in one mode: its costs, and its int4 weights where it has some."""
    from selfspec.profile.draft_spec import LayerSkipSpec
    from selfspec.types.controller import ControllerSpec
    from selfspec.types.draft_path import DraftPath

    path = DraftPath.from_modes([mode] * (2 * layers), head="int8")
    draft = LayerSkipSpec.from_path(path, ControllerSpec(name="rate"))
    weights = getattr(profile.draft, "int4_weights", None) if mode == "int4" else None
    draft = draft.model_copy(update={"int4_weights": weights})
    parts = profile.parts if weights else {}
    return profile.model_copy(update={"draft": draft, "acceptance": None, "also": [], "parts": parts})


class Clock:
    """Notes when `transformers`' generate gives out tokens; the prompt comes first."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, float]] | None = None

    def put(self, value: Any) -> None:
        """The prompt, then one emission after the other."""
        if self.tokens is None:
            self.tokens = []
        else:
            self.tokens += [(token, time.perf_counter()) for token in value.flatten().tolist()]

    def end(self) -> None:
        """Nothing to do."""


def transformers_methods(given: dict[str, Any]) -> dict[str, Decode]:
    """`generate` as it is, and with its own assistants."""
    import torch

    torch.set_num_threads(given["threads"])
    from transformers import GenerationConfig
    from transformers.utils import logging

    from selfspec.models.loading import load_model

    logging.set_verbosity_error()
    model, _ = load_model(given["model"], device="cpu", dtype=given["dtype"])
    model.generation_config = GenerationConfig()  # or it would fill in what is left open

    def method(**settings: Any) -> Decode:
        def run(prompt: list[int], new: int, temperature: float) -> Noted:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
            config = GenerationConfig(max_new_tokens=new, pad_token_id=0, **sampling, **settings)
            ids, clock = torch.tensor([prompt]), Clock()
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
            yield from clock.tokens or ()

        return run

    return {
        "transformers": method(),
        "transformers, prompt lookup": method(prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }


def llama_cpp_methods(given: dict[str, Any]) -> dict[str, Decode]:
    """llama.cpp's own calls, without its binding's loop."""
    import ctypes

    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    how = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(given["file"].encode(), how)
    if model is None:
        raise SystemExit(f"{given['file']} cannot be loaded by llama.cpp")
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = given["context"], given["threads"], given["threads"]
    context = lib.llama_init_from_model(model, settings)
    memory = lib.llama_get_memory(context)

    def run(prompt: list[int], new: int, temperature: float) -> Noted:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        steps = [lib.llama_sampler_init_greedy()]
        if temperature:
            steps = [lib.llama_sampler_init_temp(temperature), lib.llama_sampler_init_dist(1)]
        for step in steps:
            lib.llama_sampler_chain_add(chain, step)
        lib.llama_memory_clear(memory, True)
        tokens = list(prompt)
        for _ in range(new):
            for at in range(0, len(tokens), settings.n_batch):
                part = tokens[at : at + settings.n_batch]
                ids = (lib.llama_token * len(part))(*part)
                if lib.llama_decode(context, lib.llama_batch_get_one(ids, len(part))):
                    raise SystemExit("llama.cpp could not decode; expected a larger --context")
            tokens = [lib.llama_sampler_sample(chain, context, -1)]
            yield tokens[0], time.perf_counter()
        lib.llama_sampler_free(chain)

    return {given["name"]: run, "": lambda *_: iter([(id(quiet), 0.0)])}  # which keeps the callback


def openvino_methods(given: dict[str, Any]) -> dict[str, Decode]:
    """openvino-genai's pipeline on a GGUF file, from token ids."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    settings = {"INFERENCE_NUM_THREADS": given["threads"], "INFERENCE_PRECISION_HINT": "f32"}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # every prompt comes more than once
    pipeline = genai.LLMPipeline(given["file"], "CPU", scheduler_config=scheduler, **settings)

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.noted: list[tuple[int, float]] = []

        def write(self, token: int | list[int]) -> Any:
            now = time.perf_counter()
            self.noted += [(one, now) for one in (token if isinstance(token, list) else [token])]
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def run(prompt: list[int], new: int, temperature: float) -> Noted:
        how = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
        if temperature:
            how.do_sample, how.temperature, how.top_p, how.top_k = True, temperature, 1.0, 2**31
        streamer, ids = Streamer(), np.array([prompt], dtype=np.int64)
        tokens = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipeline.generate(tokens, how, streamer)
        yield from streamer.noted

    return {given["name"]: run}


FILE_TYPES = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0")  # names of LLAMA_FTYPE_MOSTLY_...


def quantise(source: str, target: str, kind: str = "Q8_0") -> None:
    """Write a GGUF file of weights of this kind, one of `FILE_TYPES`, by llama.cpp."""
    import llama_cpp as lib

    how = lib.llama_model_quantize_default_params()
    how.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if lib.llama_model_quantize(source.encode(), target.encode(), how):
        raise SystemExit(f"llama.cpp cannot quantise {source}")


WORKERS = {
    "selfspec": selfspec_methods,
    "transformers": transformers_methods,
    "llama.cpp": llama_cpp_methods,
    "openvino": openvino_methods,
}


def main() -> None:
    """Answer what is asked, a line each."""
    if sys.argv[1] == "quantise":
        quantise(*sys.argv[2:])
        return
    methods = WORKERS[sys.argv[1]](json.loads(sys.argv[2]))
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        start = time.perf_counter()
        found = list(methods[ask["method"]](ask["ids"], ask["new"], ask["temperature"]))
        seconds = time.perf_counter() - start
        answer = {"tokens": [token for token, _ in found], "seconds": seconds, "first": found[0][1] - start}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
