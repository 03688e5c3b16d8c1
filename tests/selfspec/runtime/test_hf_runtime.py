"""Models that the lean runtime does not know, run by their own forward behind the same interface."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from families import FAMILY_CONFIGS, WINDOW
from lowering import as_rounded, random_path
from model_types import tiny_model
from models import SIZES, plain, run, tiny
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from torch import nn
from toys import RandomTree
from transformers import (
    BloomConfig,
    CohereConfig,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    MptConfig,
    Olmo3Config,
    PhiConfig,
    Qwen2MoeConfig,
)
from type_table import MODES, tried

import selfspec
from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, LookaheadDrafter, LookupDrafter, SwiftDrafter
from selfspec.engine.engine import Engine
from selfspec.models.layout import apply_layout_
from selfspec.models.low_precision import bytes_of, fake
from selfspec.models.module_quantizer import recording_inputs
from selfspec.proposers.lookup import Lookup
from selfspec.runtime import open_runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.runtime.module_hooks import replacing
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

ALTERNATING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
CONFIGS = {
    "gpt2": GPT2Config(**SMALL, n_inner=48),
    "gptj": GPTJConfig(**SMALL, rotary_dim=4),
    "falcon": FalconConfig(**SMALL),
    "phi": PhiConfig(**SIZES),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "cohere": CohereConfig(**SIZES),
    "olmo3": Olmo3Config(**SIZES, sliding_window=WINDOW, layer_types=ALTERNATING),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, experts_implementation="eager"),
    "bloom": BloomConfig(**SMALL),
    "mpt": MptConfig(**SMALL, d_model=32, n_heads=4, n_layers=4),
}
LONG = pytest.mark.long("seconds for each type, and `test_every_type.py` has them all")
CHAINS = ("bloom", "mpt")  # which take no masks that say what each token sees
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SKIPS = [SkipSet((0,), (0,)), SkipSet((1, 3), (2,)), SkipSet((0, 1, 2, 3), (0, 1, 2, 3))]
every = pytest.mark.parametrize("name", CONFIGS)
with_trees = pytest.mark.parametrize("name", [name for name in CONFIGS if name not in CHAINS])


@functools.cache
def runtime_of(name):
    return open_runtime(tiny(CONFIGS[name], dtype=torch.float32))


def close(ours, theirs):
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=2e-5, rtol=0)


def tokens_for(n=24):
    return torch.randint(61, (1, n), generator=torch.Generator().manual_seed(1))


@every
@torch.no_grad()
def test_it_is_the_models_own_forward(name):
    runtime = runtime_of(name)
    assert isinstance(runtime, GenericRuntime)
    assert runtime.trees == (name not in CHAINS)
    theirs = runtime.model(tokens_for(), use_cache=False).logits
    with runtime.session(24):
        ours = [runtime.forward(tokens_for()[:, a:b], a).logits for a, b in ((0, 10), (10, 11), (11, 24))]
    close(torch.cat(ours, 1), theirs)
    text = runtime.model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, len(PROMPT) :]
    assert plain(runtime, PROMPT, 16) == text.tolist()


@every
def test_drafts_are_checked(name):
    runtime = runtime_of(name)
    text = plain(runtime, PROMPT, 16)
    for skip in SKIPS:
        drafter = LayerSkipDrafter(runtime, DraftPath(skip, tuple(range(40))), StaticThreshold(0.1, 4), candidates=2)
        assert run(runtime, drafter, PROMPT, 16)[0] == text
    for drafter in (LookupDrafter([Lookup()], StaticThreshold(0.0, 5)), LookaheadDrafter(window=3, ngram=3, guesses=2)):
        assert run(runtime, drafter, PROMPT, 16)[0] == text
    assert run(runtime, RandomTree(61, (2, 1, 1)), PROMPT, 16)[0] == text  # the backbone alone where there are no trees


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "gpt_neox", "gpt_oss", "qwen3_moe"])
@torch.no_grad()
def test_it_skips_as_the_lean_runtime_does(name):
    """And gives the same streams, trees and branches."""
    model = tiny(FAMILY_CONFIGS[name], dtype=torch.float32)
    own, lean = GenericRuntime(model), LeanRuntime(model)
    path, tokens = DraftPath(SkipSet((0, 2), (1,))), tokens_for(20)
    given = []
    for runtime in (own, lean):
        with runtime.session(30):
            runtime.forward(tokens, 0, logits=None)
            mask = torch.ones(1, 3, 23, dtype=torch.bool).tril(20)
            mask[0, 2, 21] = False
            at = torch.tensor([[20, 21, 21]])
            step = runtime.forward(
                torch.tensor([[5, 6, 7]]), at, slots=20, mask=mask, path=runtime.compile(path), hidden=(0, 1, 3)
            )
            x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
            branches = [runtime.branch(1, part, x, at, slots=20, mask=mask) for part in ("attention", "mlp")]
        given.append([step.logits, *step.hidden.values(), *branches])
    for ours, theirs in zip(*given, strict=True):
        close(ours, theirs)


@with_trees
def test_sequences_together_give_what_they_give_alone(name):
    runtime = runtime_of(name)
    prompts = [PROMPT, [7, 2, 60]]
    seqs = [SequenceState(list(prompt), 10, Sampler()) for prompt in prompts]
    together = runtime.with_new_cache(rows=2)
    with Engine(together, LayerSkipDrafter(together, SKIPS[1], FixedK(3))) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            engine.step()
    assert [seq.tokens[len(p) :] for seq, p in zip(seqs, prompts, strict=True)] == [
        plain(runtime, p, 10) for p in prompts
    ]


@pytest.mark.parametrize("name", CHAINS)
def test_sequences_run_one_after_the_other_where_masks_are_not_taken(name):
    test_sequences_together_give_what_they_give_alone(name)


def test_a_tree_is_cut_to_a_chain_and_that_is_said():
    with pytest.warns(UserWarning, match="cut to their first branch: this model verifies chains of tokens only"):
        run(runtime_of("bloom"), RandomTree(61, (2, 1)), PROMPT, 4)


def test_a_mask_is_refused_where_none_is_taken():
    runtime = runtime_of("bloom")
    with runtime.session(8), pytest.raises(UnsupportedModelError, match="Bloom.* takes no attention mask per token"):
        runtime.forward(tokens_for(2), 0, mask=torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM takes no attention mask per token"):
        SwiftDrafter(runtime, FixedK(2))
    with pytest.raises(
        UnsupportedModelError, match="BloomForCausalLM takes no attention mask per token, with which the"
    ):
        Replay(runtime.model, [TargetText((1, 2, 3), 1, 2)], depth=2, base_runtime=runtime)


@every
def test_nothing_stays_on_the_model(name):
    """Not even where a pass breaks."""
    runtime = runtime_of(name)
    path = runtime.compile(DraftPath(SKIPS[2]))
    broken = torch.tensor([[10**6]])
    with runtime.session(8):
        runtime.forward(tokens_for(4), 0, path=path, hidden=(0, runtime.layers), between=(1,) if name == "gpt2" else ())
        with pytest.raises((IndexError, RuntimeError)):
            runtime.forward(broken, 4, path=path, hidden=(0,))
    for module in runtime.model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert plain(runtime, PROMPT, 4) == plain(open_runtime(runtime.model), PROMPT, 4)


def greedy(model, n=16):
    """The tokens of `transformers`' own generation."""
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=n, do_sample=False)[0, len(PROMPT) :].tolist()


QUANTISED = ["llama", "gemma2", "cohere2", "olmo2", "gpt_oss", "qwen3_moe", "phi3"]
ALL = SkipSet((0, 1, 2), (0, 1, 2))
LOW = {
    "int8": DraftPath(int8=ALL, head="int8"),
    "int4": DraftPath(int4=ALL, head="int8"),
    "mixed": DraftPath(SkipSet((1,), ()), tuple(range(0, 61, 2)), int8=SkipSet((0,), (2,)), int4=SkipSet((2,), (1,))),
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("path", LOW.values(), ids=LOW)
def test_quantised_drafts_give_the_models_own_text(name, path):
    model = tiny(FAMILY_CONFIGS[name])
    runtime, text = GenericRuntime(model), greedy(model)
    drafter = LayerSkipDrafter(runtime, path, FixedK(4))
    tokens, outcomes = run(runtime, drafter, PROMPT, 16)
    assert tokens == text
    assert sum(len(outcome.draft) for outcome in outcomes) > 0
    assert path != LOW["int8"] or sum(len(outcome.path) for outcome in outcomes) > 0
    assert greedy(model) == text


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(3))
def test_a_quantised_path_is_the_model_with_rounded_weights(name, seed):
    model, tokens = tiny(FAMILY_CONFIGS[name]), tokens_for(12)
    path = random_path(seed, 3, words=61)
    runtime, rounded = GenericRuntime(model, kernel=fake), GenericRuntime(as_rounded(model, path))
    compiled = runtime.compile(path)
    assert compiled.unquantized == ()
    assert compiled.bytes == runtime.extra_bytes(path)
    assert runtime.compile(path) is compiled
    logits = []
    for ran, draft in ((runtime, path), (rounded, DraftPath(path.skip, path.vocabulary))):
        with ran.session(12):
            logits.append(ran.forward(tokens, 0, path=ran.compile(draft)).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)  # `transformers`' norms compute in float32
    assert path.low_precision


def test_bytes_are_those_of_the_lean_runtime():
    model = tiny(FAMILY_CONFIGS["llama"], dtype=torch.float32)
    own, lean = GenericRuntime(model), LeanRuntime(model)
    for path in LOW.values():
        assert own.extra_bytes(path) == lean.extra_bytes(path)
        assert own.compile(path).bytes == lean.compile(path).bytes


def test_another_thread_runs_the_model_in_full_during_a_quantised_draft():
    model = tiny(FAMILY_CONFIGS["llama"])
    runtime, x = GenericRuntime(model), tokens_for(6)
    text, own, seen = greedy(model), model(x).logits, []
    layer = model.model.layers[1]

    def call_elsewhere(*_):
        hook.remove()  # this thread's calls alone go through here
        thread = threading.Thread(target=lambda: seen.append((model(x).logits, greedy(model))))
        thread.start()
        thread.join()

    path = runtime.compile(LOW["mixed"])
    with runtime.session(8):
        hook = layer.register_forward_hook(call_elsewhere)
        drafted = runtime.forward(x, 0, path=path, hidden=(1,)).logits
    ((logits, tokens),) = seen
    assert torch.equal(logits, own)
    assert tokens == text
    assert not torch.allclose(drafted, own)


def test_what_can_be_quantised_does_not_depend_on_passes_of_other_threads():
    """While they replace forwards, and record which linears read the same input."""
    model = tiny(FAMILY_CONFIGS["llama"])
    quantizer = GenericRuntime(model).skeleton.quantizer
    before = [[group.sizes for group in quantizer.linear_groups(index)] for index in range(3)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with replacing({linear: linear.forward for linear in linears}), recording_inputs(model):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    meanwhile = [[group.sizes for group in quantizer.linear_groups(index)] for index in range(3)]
    leave.set()
    thread.join()
    assert all(before)
    assert meanwhile == before


def test_two_threads_draft_with_one_model():
    model = tiny(FAMILY_CONFIGS["llama"])
    text, outputs = greedy(model, 24), {}

    def draft(path):
        runtime = GenericRuntime(model)
        outputs[path] = run(runtime, LayerSkipDrafter(runtime, path, FixedK(3)), PROMPT, 24)[0]

    threads = [threading.Thread(target=draft, args=(path,)) for path in LOW.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == dict.fromkeys(LOW.values(), text)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_error_in_a_quantised_draft_leaves_the_models_own_forward():
    model = tiny(FAMILY_CONFIGS["qwen3_moe"])
    runtime, x = GenericRuntime(model), tokens_for(6)
    own = model(x).logits
    path = runtime.compile(LOW["int8"])

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_hook(fail)
    with runtime.session(8), pytest.raises(KeyboardInterrupt):
        runtime.forward(x, 0, path=path)
    hook.remove()
    assert torch.equal(model(x).logits, own)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_other_modules_than_linears_run_in_full_and_trained_parts_are_refused():
    runtime = runtime_of("gpt2")
    for layer in runtime.model.transformer.h:
        for module in (*layer.attn.children(), *layer.mlp.children()):
            module.register_forward_hook(lambda *_: None)
    path = DraftPath(SkipSet((1,), ()), int8=SkipSet((0,), (2,)), head="int8")
    assert runtime.compile(path).unquantized == ("attention 0", "mlp 2")
    assert runtime.part_bytes("mlp", 0, "int8") is None
    assert runtime.part_bytes("head", 0, "int8") == runtime.extra_bytes(path) == bytes_of(8, 61, 32)
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gpt2'.* without access to its modules; .* llama"):
        runtime.register_trained("bridge", SimpleNamespace())
    assert apply_layout_(runtime.model, "auto") == "rows"
    with pytest.raises(SelfspecError, match="layout 'columns' is not for GPT2LMHeadModel; expected auto or rows"):
        apply_layout_(runtime.model, "columns")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("recurrent_gemma", "its logits with a KV cache are wrong"),
        ("hrm_text", "no layers with an attention or MLP module"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(model_type, why):
    """One keeps its state in its modules, one has no list of layers, one goes on with single tokens alone."""
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}'.* is not supported: .*{why}"):
        open_runtime(tiny_model(model_type))


def test_a_model_in_training_mode_is_told_apart_from_one_that_is_not_understood():
    model = tiny_model("gpt2").train()
    with pytest.raises(UnsupportedModelError, match=r"it is in training mode; call its eval\(\) first"):
        open_runtime(model)
    open_runtime(model.eval())


@pytest.mark.parametrize("when", ["in every pass", "with cached tokens"])
def test_an_index_error_in_a_model_is_a_refusal_by_name(when):
    model = tiny(CONFIGS["gemma"])

    def fail(_module, _args, kwargs):
        if when == "in every pass" or int(kwargs["position_ids"].min()) > 0:
            raise IndexError("list index out of range")

    model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"'gemma'\) is not supported: .*list index out of range"):
        open_runtime(model)


@pytest.mark.parametrize(
    ("model_type", "trees", "stateful"),
    [
        ("opt", True, False),  # its MLP is no module of its own
        ("mimo_v2_flash", True, False),  # keys and values of different sizes, which differ from layer to layer
        pytest.param("deepseek_v3", True, False, marks=LONG),  # latent attention
        ("gemma4_text", True, False),  # layers that share the keys and values of others
        ("deepseek_v32", False, False),  # an indexer with keys of its own
        ("qwen3_5_text", False, True),  # linear attention
        pytest.param(
            "jamba", False, True, marks=LONG
        ),  # a recurrent module that does not go on from a state with several tokens
        pytest.param("nemotron_h", False, True, marks=LONG),  # layers of one sub-layer
        pytest.param("falcon_h1", False, True, marks=LONG),  # keys and values beside a state in one layer
        pytest.param("deepseek_v4", False, True, marks=LONG),  # compressed keys and values
    ],
)
def test_every_kind_of_cache_gives_the_text_of_generate(model_type, trees, stateful):
    row = tried(model_type, raising=True)
    assert (row.outcome, row.modes) == ("equal", MODES)
    assert (row.drafts, "states" in row.runtime) == ("trees" if trees else "chains", stateful)


@pytest.mark.parametrize("seed", range(2))
@torch.no_grad()
def test_recurrent_modules_run_by_steps_where_their_logits_are_wrong_by_little(seed):
    """Zamba's ignore their state when they get several tokens, which tells on random logits by a thousandth."""
    runtime = open_runtime(tiny_model("zamba", seed=seed))
    theirs = runtime.model(tokens_for(12), use_cache=False).logits
    with runtime.session(12):
        runtime.forward(tokens_for(12)[:, :7], 0, logits=None)
        runtime.cache.commit(0, range(6))
        ours = runtime.forward(tokens_for(12)[:, 7:], 7).logits
    assert float((ours - theirs[:, 7:]).abs().max()) < 1e-5 * float(theirs.abs().max())


def test_special_tokens_have_no_say_in_what_is_supported():
    """Their activations can be so large that logits in bfloat16 are noise; here they are no numbers at all."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[:5] = torch.nan
    assert GenericRuntime(model).trees


def test_a_layer_whose_keys_others_read_is_not_skipped():
    runtime = open_runtime(tiny_model("gemma4_text"))
    every_layer = tuple(range(runtime.layers))
    drafter = LayerSkipDrafter(runtime, DraftPath(SkipSet(every_layer, every_layer)), FixedK(3))
    assert run(runtime, drafter, PROMPT, 12)[0] == plain(runtime, PROMPT, 12)


@with_trees
@pytest.mark.parametrize("path", [DraftPath(SKIPS[1]), DraftPath(int8=SKIPS[2], head="int8")], ids=["skip", "int8"])
def test_texts_are_replayed(name, path):
    """As the search does: what a replay says that a draft would be is what is drafted."""
    runtime = GenericRuntime(runtime_of(name).model, kernel=fake)  # other kernels round many rows in another way
    tokens = [*PROMPT, *plain(runtime, PROMPT, 10)]
    drafter = LayerSkipDrafter(runtime, path, FixedK(3))
    _, outcomes = run(runtime, drafter, PROMPT, 10)
    with Replay(runtime.model, [TargetText(tuple(tokens), len(PROMPT), 10)], depth=4, base_runtime=runtime) as replay:
        streams = replay.streams(4)
        added = streams.branch(1, "mlp", streams.between[1])
        if name in ("gemma", "olmo", "gpt2"):  # norms before sub-layers, one after the other
            close(streams.between[1] + added, streams.entering[2])
        (trace,) = replay.trace(path, [FixedK(3)])
        at = 0
        for outcome in outcomes:
            assert min(trace.runs[at], len(outcome.draft)) == len(outcome.path)
            at += len(outcome.tokens)


def test_it_is_served_from_python(llm):
    wrapped = selfspec.wrap(runtime_of("gpt2").model, llm.tokenizer, profile="none")
    assert isinstance(wrapped.runtime, GenericRuntime)
    text = plain(runtime_of("gpt2"), PROMPT, 8)
    assert wrapped.generate(PROMPT, max_new_tokens=8).tokens == text
    drafter = wrapped.layer_skip(SKIPS[1], "fixed:k=3")
    out = wrapped.generate(PROMPT, max_new_tokens=8, drafter=drafter)
    assert out.tokens == text
    assert out.stats.drafted > 0


def test_a_model_whose_configuration_counts_attentions_has_as_many_layers_as_it_runs():
    runtime = open_runtime(tiny_model("longcat_flash"))
    assert runtime.skeleton.identity.layers == runtime.layers == 2
