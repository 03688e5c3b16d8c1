"""Every engine: what it writes for what a profile drafts with, and what it refuses, with what it could run instead."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from heads import random_part
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import selfspec
from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.heads import make_part_file
from selfspec.draft_modules.module_files import write_part
from selfspec.draft_modules.published_heads import read_published
from selfspec.export.exporting import ENGINES, export
from selfspec.export.head_export import head_files
from selfspec.profile import drafter_specs as specs
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec, PlainSpec, ProposerSpec, RecycleSpec, Skip
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import Profile

WHOLE = LayerSkipSpec(skip=Skip(attention=list(range(4, 14)), mlp=list(range(4, 14))))
HALF = LayerSkipSpec(skip=Skip(attention=[3, 5]))
FEW = LayerSkipSpec(int8=Skip(attention=list(range(16)), mlp=list(range(15))), int4=Skip(mlp=[15]), head="int8")
WORDS = list(range(64))


@pytest.fixture(scope="module")
def plain():
    return selfspec.load("builtin", profile="none", layout="rows")


@pytest.fixture
def run(plain, tmp_path):
    """Export a draft to an engine, by the profile's word."""

    def write(engine, draft, *, parts=None, **more):
        profile = Profile(model=plain.identity, draft=draft)
        if parts is not None:
            write_part(tmp_path / "part.safetensors", parts)
            held = {draft.part: ModuleFile(file="part.safetensors", sha256=sha256_of(tmp_path / "part.safetensors"))}
            write_profile(profile.model_copy(update={"parts": held}), tmp_path / "profile.yaml")
            profile = read_profile(tmp_path / "profile.yaml")
        return export(plain, profile, engine, tmp_path / engine, **{"tokens": 3, **more})

    return write


def config(done):
    return json.loads((done.out / "speculative_config.json").read_text())


def test_vllm_n_grams_and_suffixes(run):
    """The fields of vllm/config/speculative.py."""
    done = run("vllm", LookupSpec())
    assert config(done) == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 3,
    }
    assert done.written.commands[0][1] == (
        f'vllm serve {builtin.model_folder()} --speculative-config "$(cat {done.out / "speculative_config.json"})"'
    )
    answers = LookupSpec(proposers=[ProposerSpec(kind="answers", path="mine.answers")])
    assert config(run("vllm", answers, force=True)) == {"method": "suffix", "num_speculative_tokens": 3}


def test_vllm_draft_model_of_layers(run):
    done = run("vllm", WHOLE)
    assert config(done) == {"method": "draft_model", "model": str(done.out / "draft"), "num_speculative_tokens": 3}
    assert done.drafted == "6 of the model's 16 layers, as a separate model"
    assert AutoModelForCausalLM.from_pretrained(done.out / "draft").config.num_hidden_layers == 6
    few = run("vllm", FEW, force=True)
    assert config(few)["quantization"] == "fp8"
    assert any("become fp8 (e4m3) when it is loaded" in one for one in few.limitations)


def test_sglang_flags(run):
    """Those of sglang 0.5.23; chains have one token more to verify than steps."""
    command = run("sglang", WHOLE).written.commands[0][1]
    assert "--speculative-algorithm STANDALONE --speculative-draft-model-path" in command
    assert command.endswith("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")
    proposals = run("sglang", LookupSpec(), force=True)
    assert "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4" in (proposals.out / "launch.sh").read_text()


def test_tensorrt_llm_yaml(run):
    """The fields of tensorrt_llm/llmapi/llm_args.py."""
    done = run("tensorrt-llm", WHOLE)
    assert yaml.safe_load((done.out / "config.yaml").read_text()) == {
        "disable_overlap_scheduler": True,
        "speculative_config": {
            "decoding_type": "Draft_Target",
            "max_draft_len": 3,
            "speculative_model": str(done.out / "draft"),
        },
    }
    told = yaml.safe_load((run("tensorrt-llm", LookupSpec(), force=True).out / "config.yaml").read_text())
    assert told["speculative_config"]["decoding_type"] == "NGram"
    assert told["speculative_config"]["max_draft_len"] == 3


def test_llama_cpp_commands_and_types(run):
    from selfspec.models.gguf_header import read_header

    done = run("llama.cpp", FEW)
    files = f"-m {done.out / 'target.gguf'} -md {done.out / 'draft.gguf'}"
    command = done.written.commands[0][1]
    assert command.startswith(
        f"llama-speculative-simple {files} --spec-type draft-simple --spec-draft-n-max 3 --temp 0"
    )
    tensors = read_header(done.out / "draft.gguf").tensors
    kinds = {name: tensors[name].type for name in ("blk.0.attn_q.weight", "blk.15.ffn_up.weight", "output.weight")}
    assert kinds == {"blk.0.attn_q.weight": 8, "blk.15.ffn_up.weight": 2, "output.weight": 8}  # Q8_0, Q4_0
    assert tensors["token_embd.weight"].type == 0  # the model's own, in full
    target = read_header(done.out / "target.gguf").tensors
    assert {tensor.type for tensor in target.values()} == {0}
    assert "output.weight" not in target  # tied
    small = run("llama.cpp", LookupSpec(), force=True, type_name="q8_0")
    assert read_header(small.out / "target.gguf").tensors["blk.0.attn_q.weight"].type == 8
    assert "--spec-type ngram-simple --spec-ngram-simple-size-n 2" in small.written.commands[0][1]


def test_what_llama_cpp_skips_by_half_takes_no_room(run):
    from selfspec.models.gguf_header import read_header

    draft = LayerSkipSpec(skip=Skip(attention=[1, 2], mlp=[1]), int8=Skip(mlp=[0]))
    done = run("llama.cpp", draft)
    header = read_header(done.out / "draft.gguf")
    assert header.arch_value("block_count") == 15
    types = {name: header.tensors[name].type for name in ("blk.0.ffn_up.weight", "blk.1.attn_output.weight")}
    assert types == {"blk.0.ffn_up.weight": 8, "blk.1.attn_output.weight": 2}  # layer 2 is the second that is left
    assert header.tensors["blk.1.ffn_up.weight"].type == 0


def test_transformers_assisted_generation(plain, run):
    """The same text as without the draft model, which transformers' own generate loads."""
    done = run("hf", WHOLE)
    model, tokenizer = (of.from_pretrained(builtin.model_folder()) for of in (AutoModelForCausalLM, AutoTokenizer))
    draft = AutoModelForCausalLM.from_pretrained(done.out / "draft")
    assert draft.generation_config.num_assistant_tokens == 3
    inputs = tokenizer("def read(", return_tensors="pt")
    alone = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=draft), alone)
    own = model.generate(**inputs, max_new_tokens=12, custom_generate=str(done.out), trust_remote_code=True)
    assert torch.equal(own, alone)


def test_transformers_prompt_lookup(run):
    done = run("hf", LookupSpec())
    settings = GenerationConfig.from_pretrained(done.out)
    assert (settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size) == (3, 3)
    assert "custom_generate/generate.py" in done.files


def test_transformers_runs_by_selfspec_what_it_has_not(plain, run):
    done = run("hf", specs.LookaheadSpec(), tokens=None, prompts=[plain.encode("def read(self):\n")], new=8)
    assert (done.limitations, done.expected.tokens) == ((), None)
    assert "decoded here with the profile's drafter: 1 prompts, 8 greedy tokens" in done.expected.source
    assert "The profile's controller ends drafts." in (done.out / "README.md").read_text()
    assert done.files == ("README.md", "custom_generate/generate.py", "custom_generate/requirements.txt")
    few = run("hf", FEW, force=True)
    assert not any(name.startswith("draft") for name in few.files)
    assert "an unquantised draft model would save nothing" in (few.out / "README.md").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model(run, engine):
    """The built-in model in int8 drafts for itself, by its folder."""
    done = run(engine, specs.ModelSpec(model=str(builtin.model_folder()), bits="int8"))
    draft = done.out / ("draft.gguf" if engine == "llama.cpp" else "draft")
    assert draft.exists()
    if engine == "llama.cpp":
        from selfspec.models.gguf_header import read_header

        assert read_header(draft).tensors["token_embd.weight"].type == 8
    else:
        assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 16
        assert any("int8" in one or "8 bits" in one or "quantised" in one for one in done.limitations)


def eagle_3(llm, layers=(2, 8, 13)):
    """A head of EAGLE-3's form, of random weights."""
    torch.manual_seed(0)
    hidden, wide = 128, 96
    shape = {"hidden": hidden, "intermediate": wide, "heads": 4, "kv_heads": 2, "head_dim": 32, "eps": 1e-6}
    sizes = {"q": (128, 256), "k": (64, 256), "v": (64, 256), "o": (128, 128)}
    sizes |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    tensors = {f"layer.{name}_proj.weight": torch.randn(size) for name, size in sizes.items()}
    norms = ("post_attention_layernorm", "embed_norm", "stream_norm", "norm")
    tensors |= {f"layer.{name}.weight": torch.ones(hidden) for name in norms}
    tensors |= {"layer.fuse.weight": torch.randn(hidden, 3 * hidden), "head.weight": torch.randn(64, hidden)}
    return make_part_file(
        "eagle", {"shape": {**shape, "theta": 1e4}, "layers": list(layers)}, tensors, WORDS, llm.runtime
    )


def test_eagle_3_for_vllm_is_speculators(plain, run):
    done = run("vllm", specs.HeadSpec(part="eagle"), parts=eagle_3(plain))
    assert config(done) == {"method": "eagle3", "model": str(done.out / "head"), "num_speculative_tokens": 3}
    told = json.loads((done.out / "head/config.json").read_text())
    assert told["speculators_config"]["verifier"] == {
        "name_or_path": str(builtin.model_folder()),
        "architectures": ["LlamaForCausalLM"],
    }
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (told["transformer_layer_config"]["model_type"], told["norm_before_residual"]) == ("llama", False)
    assert told["transformer_layer_config"]["hidden_size"] == 128
    assert read_published(done.out / "head", plain.runtime).settings["layers"] == [2, 8, 13]


def test_speculators_itself_reads_it(plain, run):
    speculators = pytest.importorskip("speculators")
    done = run("vllm", specs.HeadSpec(part="eagle"), parts=eagle_3(plain))
    read = speculators.SpeculatorModelConfig.from_pretrained(str(done.out / "head"))
    assert type(read).__name__ == "Eagle3SpeculatorConfig"
    assert (read.draft_vocab_size, read.eagle_aux_hidden_state_layer_ids) == (64, [2, 8, 13])
    model = speculators.Eagle3DraftModel(read)
    held, wanted = load_file(done.out / "head/model.safetensors"), dict(model.state_dict())
    ignored = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert {name: tuple(t.shape) for name, t in held.items()} == {
        name: tuple(t.shape) for name, t in wanted.items() if name not in ignored
    }


def test_eagle_3_for_the_others(plain, run):
    """SGLang and TensorRT-LLM count streams by the layers that they leave, llama.cpp by those that they enter."""
    part = eagle_3(plain)
    done = run("sglang", specs.HeadSpec(part="eagle"), parts=part)
    told = json.loads((done.out / "head/config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLMEagle3"]
    assert told["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 7, 12]
    assert read_published(done.out / "head", plain.runtime).settings["layers"] == [2, 8, 13]
    del told["eagle_aux_hidden_state_layer_ids"]
    (done.out / "head/config.json").write_text(json.dumps(told))
    assert read_published(done.out / "head", plain.runtime).settings["layers"] == [2, 8, 13]
    assert "--speculative-algorithm EAGLE3" in done.written.commands[0][1]
    yaml_of = run("tensorrt-llm", specs.HeadSpec(part="eagle"), parts=part)
    assert yaml.safe_load((yaml_of.out / "config.yaml").read_text())["speculative_config"] == {
        "decoding_type": "Eagle",
        "max_draft_len": 3,
        "speculative_model": str(yaml_of.out / "head"),
        "eagle3_layers_to_capture": [1, 7, 12],
    }


def test_eagle_3_for_llama_cpp(plain, run):
    """The tensors and keys of llama.cpp's architecture eagle3."""
    import gguf

    done = run("llama.cpp", specs.HeadSpec(part="eagle"), parts=eagle_3(plain))
    reader = gguf.GGUFReader(done.out / "draft.gguf")
    assert reader.get_field("general.architecture").contents() == "eagle3"
    assert list(reader.get_field("eagle3.target_layers").contents()) == [2, 8, 13]
    tensors = {of.name: of for of in reader.tensors}
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "attn_norm_2")
    layer = (*layer, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    assert set(tensors) == {
        "fc.weight",
        "output_norm.weight",
        "output.weight",
        "d2t",
        *(f"blk.0.{name}.weight" for name in layer),
    }
    assert list(tensors["d2t"].data) == WORDS
    assert list(tensors["blk.0.attn_q.weight"].shape) == [256, 128]
    assert "--spec-type draft-eagle3" in done.written.commands[0][1]


def test_medusa_and_mlp_for_vllm(plain, run):
    done = run("vllm", specs.HeadSpec(part="medusa"), parts=random_part(plain.runtime, WORDS, "medusa"))
    assert config(done)["method"] == "medusa"
    assert load_file(done.out / "head/model.safetensors")["token_map"].tolist() == WORDS
    done = run("vllm", specs.HeadSpec(part="mlp"), parts=random_part(plain.runtime, WORDS, "mlp"), force=True)
    assert config(done)["method"] == "mlp_speculator"
    assert any("the head's vocabulary of 64 tokens" in one for one in done.limitations)


LOOKUP, SET = "lookup tokens alone", "a fixed set of whole layers, found by selfspec search --kv own"
REFUSED = [
    ("vllm", RecycleSpec(), LOOKUP),
    ("sglang", specs.InputSpec(), LOOKUP),
    ("llama.cpp", specs.JacobiSpec(), LOOKUP),
    ("tensorrt-llm", specs.LookaheadSpec(), LOOKUP),
    ("vllm", specs.SwiftSpec(), SET),
    ("llama.cpp", specs.ClaspSpec(), SET),
    ("sglang", specs.MergedSpec(drafters=[LookupSpec(), RecycleSpec()]), "one of the merged drafters"),
    ("vllm", HALF, "no layer is skipped whole"),
    ("sglang", HALF, "a set of whole layers, by selfspec search --kv own"),
    ("tensorrt-llm", FEW, "all sub-layers run, and TensorRT-LLM runs drafts in the model's own precision"),
    ("llama.cpp", HALF, "--modes full,int8,skip"),
    *((engine, PlainSpec(), "drafts nothing") for engine in ENGINES),
    *((engine, WHOLE.model_copy(update={"trained": "bridge"}), "has a trained part") for engine in ENGINES),
]


@pytest.mark.parametrize(("engine", "draft", "said"), REFUSED, ids=lambda of: getattr(of, "kind", None))
def test_what_an_engine_has_not_is_refused(run, tmp_path, engine, draft, said):
    with pytest.raises(SelfspecError, match=said) as refused:
        run(engine, draft)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / engine).exists()


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        ("hf", "medusa", r"transformers' generate cannot run a trained head \(medusa\)"),
        ("sglang", "medusa", "EAGLE or EAGLE-3, by selfspec convert"),
        ("llama.cpp", "medusa", "an EAGLE-3 head, by selfspec convert"),
        ("tensorrt-llm", "mlp", "cannot run a head of the form mlp_speculator"),
        ("vllm", "hydra", "heads of kind 'hydra' are run by no engine"),
        ("vllm", "eagle", "an EAGLE head as selfspec train fits it"),
    ],
)
def test_heads_that_an_engine_has_not_are_refused(plain, run, engine, kind, said):
    with pytest.raises(SelfspecError, match=said):
        run(engine, specs.HeadSpec(part=kind), parts=random_part(plain.runtime, WORDS, kind))


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_these_have_no_stream_of_the_last_layer(plain, run, engine):
    with pytest.raises(SelfspecError, match="a head that reads the output of the last layer"):
        run(engine, specs.HeadSpec(part="eagle"), parts=eagle_3(plain, (2, 8, 16)))
    assert head_files(eagle_3(plain, (2, 8, 16)), plain.runtime).layers == (2, 8, 16)


def test_several_ways_to_draft_are_refused(plain, tmp_path):
    one = Profile(model=plain.identity, draft=WHOLE)
    with pytest.raises(SelfspecError, match="several ways to draft; engines have one"):
        export(plain, one.with_alternatives([one]), "vllm", tmp_path / "out")


def test_a_head_among_several_cannot_travel(plain, tmp_path):
    """generate.py holds a profile, not the parts beside it."""
    write_part(tmp_path / "part.safetensors", random_part(plain.runtime, WORDS, "medusa"))
    held = {"medusa": ModuleFile(file="part.safetensors", sha256=sha256_of(tmp_path / "part.safetensors"))}
    draft = specs.MergedSpec(drafters=[LookupSpec(), specs.HeadSpec(part="medusa")])
    write_profile(Profile(model=plain.identity, draft=draft, parts=held), tmp_path / "profile.yaml")
    with pytest.raises(SelfspecError, match=r"generate\.py cannot hold"):
        export(plain, read_profile(tmp_path / "profile.yaml"), "hf", tmp_path / "out")


def test_a_generation_config_with_values_for_sampling_can_be_written(plain, run, monkeypatch):
    """As that of Vicuna, which does not sample: a copy that is changed is refused where such values are left."""
    config = GenerationConfig()
    config.temperature, config.top_p = 0.9, 0.6
    monkeypatch.setattr(plain.model, "generation_config", config)
    done = run("hf", LookupSpec())
    written = GenerationConfig.from_pretrained(done.out)
    assert written.prompt_lookup_num_tokens > 0
    assert written.temperature in (None, 1.0)
