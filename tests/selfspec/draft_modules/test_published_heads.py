"""Heads as they are published: files with their names and shapes, against their own arithmetic over whole texts."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from heads import LLAMA3, bfloats
from hostile import Code
from models import small
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import read_part, write_part
from selfspec.draft_modules.published_heads import read_published
from selfspec.draft_modules.registry import make_head
from selfspec.runtime.forward import LeanRuntime

V, D, WIDE, HEADS, KV, HEAD, LAYERS = 24, 16, 40, 4, 2, 4, 8
EPS = 1e-5
CONFIG = {
    "hidden_size": D,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": EPS,
    "vocab_size": V,
}


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(V, LAYERS, seed=2))


def random(*shape):
    return bfloats(*shape).float()


def layer(prefix, inputs):
    """A decoder layer's matrices and the norm before its MLP."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, inputs),
        "self_attn.k_proj": (KV * HEAD, inputs),
        "self_attn.v_proj": (KV * HEAD, inputs),
        "self_attn.o_proj": (D, HEADS * HEAD),
        "mlp.gate_proj": (WIDE, D),
        "mlp.up_proj": (WIDE, D),
        "mlp.down_proj": (D, WIDE),
    }
    held = {f"{prefix}{name}.weight": random(*size) for name, size in sizes.items()}
    return held | {f"{prefix}post_attention_layernorm.weight": 1 + random(D)}


def rms(x, weight=None, eps=EPS):
    return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x), eps)


def through(tensors, prefix, residual, read, config):
    """A llama layer over a whole sequence, by transformers' own modules."""
    own = LlamaConfig(
        **{**config, "head_dim": HEAD, "attn_implementation": "eager"}, max_position_embeddings=512, num_hidden_layers=1
    )
    attention, mlp = LlamaAttention(own, 0), LlamaMLP(own)
    for name in "qkvo":
        weight = tensors[f"{prefix}self_attn.{name}_proj.weight"]
        projection = nn.Linear(weight.shape[1], len(weight), bias=f"{prefix}self_attn.{name}_proj.bias" in tensors)
        projection.weight.data = weight
        if projection.bias is not None:
            projection.bias.data = tensors[f"{prefix}self_attn.{name}_proj.bias"]
        setattr(attention, f"{name}_proj", projection)
    mlp.load_state_dict({f"{n}_proj.weight": tensors[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")})
    n = len(read)
    at = LlamaRotaryEmbedding(own)(residual[None], torch.arange(n)[None])
    at = tuple(t.double() for t in at)
    mask = torch.full((1, 1, n, n), -math.inf, dtype=torch.float64).triu(1)
    mixed = attention.double()(read[None], position_embeddings=at, attention_mask=mask)[0][0]
    x = residual + mixed
    return x + mlp.double()(rms(x, tensors[f"{prefix}post_attention_layernorm.weight"]))


def saved(folder, config, tensors, name="pytorch_model.bin"):
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith("safetensors"):
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)


def texts(runtime, n):
    torch.manual_seed(5)
    return torch.randint(0, V, (n,)), torch.randn(n, LAYERS + 1, D, dtype=torch.float64)


def head_of(runtime, folder):
    """As `convert` has it: written, and read again."""
    write_part(folder / "part.safetensors", read_published(folder, runtime))
    head = make_head(runtime, read_part(folder / "part.safetensors"), low=False)
    head.reserve(64)
    return head


def check(head, reference, tokens, streams, pairs=6):
    """Logits after pairs, and after what it goes on with, against those of `reference` from so many pairs on."""
    read = torch.cat([streams[:, i] for i in head.layers], -1)
    for n in (1, 2, pairs):
        drafted = tokens[n : n + 3].tolist()
        logits, state = head.read(0, 0, tokens[:n], read[:n])
        found = [logits]
        for place, token in enumerate(drafted, start=1):
            logits, state = head.draft_step(0, n, place, token, state)
            found.append(logits)
        for ours, theirs in zip(found, reference(n, drafted), strict=True):
            torch.testing.assert_close(ours, theirs.double(), atol=1e-5, rtol=1e-5)


def embed(runtime, tokens):
    return runtime.skeleton.embed(torch.as_tensor(tokens)[None])[0]


def own_head(runtime):
    return runtime.model.get_output_embeddings().weight


def normed_last(runtime, streams):
    return rms(streams[:, -1], runtime.model.model.norm.weight, runtime.skeleton.sizes.eps)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500000.0}, {"rope_scaling": LLAMA3}, {"biases": True}], ids=str)
def test_eagle(runtime, tmp_path, more):
    torch.manual_seed(0)
    tensors = {"embed_tokens.weight": random(V, D), "fc.weight": random(D, 2 * D), **layer("layers.0.", D)}
    if more.get("biases"):
        tensors["fc.bias"] = random(D)
        for name, width in (("q", HEADS), ("k", KV), ("v", KV)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = random(width * HEAD)
    config = {**CONFIG, **{name: value for name, value in more.items() if name != "biases"}}
    saved(tmp_path, config, tensors)
    head = head_of(runtime, tmp_path)
    tokens, streams = texts(runtime, 12)
    rope = config.get("rope_scaling") or {"rope_type": "default"}
    own = {**CONFIG, "rope_parameters": {**rope, "rope_theta": config.get("rope_theta", 10000.0)}}

    def reference(n, drafted):
        told, given, found = tokens[:n].tolist(), normed_last(runtime, streams[:n]), []
        for token in [*drafted, None]:
            x = F.linear(torch.cat((embed(runtime, told), given), -1), tensors["fc.weight"].double())
            x = x + tensors.get("fc.bias", torch.zeros(D)).double()
            left = through(tensors, "layers.0.", x, x, own)
            found.append(own_head(runtime) @ left[-1])
            told, given = [*told, token], torch.cat((given, left[-1:]))
        return found

    check(head, reference, tokens, streams)
    assert len(head.words) == V


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_eagle_3(runtime, tmp_path, prefix):
    torch.manual_seed(0)
    words = torch.tensor([0, 3, 4, 9, 10, 17, 20])
    tensors = {
        "fc.weight": random(D, 3 * D),
        "norm.weight": 1 + random(D),
        "lm_head.weight": random(len(words), D),
        "d2t": words - torch.arange(len(words)),
        "t2d": torch.isin(torch.arange(V), words),
        f"{prefix}hidden_norm.weight": 1 + random(D),
        f"{prefix}input_layernorm.weight": 1 + random(D),
        **layer(prefix, 2 * D),
    }
    saved(tmp_path, {**CONFIG, "draft_vocab_size": len(words)}, tensors)
    head = head_of(runtime, tmp_path)
    assert head.layers == (2, 4, 5)
    assert head.words.tolist() == words.tolist()
    tokens, streams = texts(runtime, 12)
    own = {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

    def reference(n, drafted):
        told, found = tokens[:n].tolist(), []
        given = F.linear(torch.cat([streams[:n, i] for i in (2, 4, 5)], -1), tensors["fc.weight"].double())
        for token in [*drafted, None]:
            read = rms(embed(runtime, told), tensors[f"{prefix}input_layernorm.weight"])
            read = torch.cat((read, rms(given, tensors[f"{prefix}hidden_norm.weight"])), -1)
            left = through(tensors, prefix, given, read, own)
            found.append(tensors["lm_head.weight"].double() @ rms(left[-1], tensors["norm.weight"]))
            told, given = [*told, token], torch.cat((given, left[-1:]))
        return found

    check(head, reference, tokens, streams)


@pytest.mark.parametrize(("own", "name"), [(True, "medusa_lm_head.pt"), (False, "medusa_lm_head.safetensors")])
def test_medusa(runtime, tmp_path, own, name):
    torch.manual_seed(0)
    tensors = {}
    for j in range(4):
        for i in range(2):
            tensors |= {f"{j}.{i}.linear.weight": random(D, D), f"{j}.{i}.linear.bias": random(D)}
        if own:
            tensors[f"{j}.2.weight"] = random(V, D)
    saved(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors, name)  # which files say wrongly
    head = head_of(runtime, tmp_path)
    assert head.places == 4
    tokens, streams = texts(runtime, 12)

    def reference(n, drafted):
        for j in range(4):
            x = normed_last(runtime, streams[n - 1 : n])[0]
            for i in range(2):
                x = x + F.silu(tensors[f"{j}.{i}.linear.weight"].double() @ x + tensors[f"{j}.{i}.linear.bias"])
            yield (tensors[f"{j}.2.weight"].double() if own else own_head(runtime)) @ x

    check(head, reference, tokens, streams)


def test_hydra(runtime, tmp_path):
    torch.manual_seed(0)
    tensors = {"input_embed_fn.weight": random(V, D)}
    for j in range(4):
        for name in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{j}.0.{name}.weight"] = random(D, (j + 2) * D)
            tensors[f"hydra_mlp.{j}.0.{name}.bias"] = random(D)
        tensors |= {f"hydra_mlp.{j}.1.linear.weight": random(D, D), f"hydra_mlp.{j}.1.linear.bias": random(D)}
        tensors |= {f"hydra_lm_head.{j}.weight": random(V, D), f"hydra_lm_head.{j}.bias": random(V)}
    saved(tmp_path, {"hydra_head_arch": "mlp", "grounded_heads": True}, tensors, "hydra_lm_head.pt")
    head = head_of(runtime, tmp_path)
    tokens, streams = texts(runtime, 12)

    def by(name, x):
        return tensors[f"{name}.weight"].double() @ x + tensors[f"{name}.bias"]

    def reference(n, drafted):
        x = [normed_last(runtime, streams[n - 1 : n])[0]]
        for j, token in enumerate([int(tokens[n - 1]), *drafted]):
            x.append(embed(runtime, [token])[0])
            read = torch.cat(x)
            y = by(f"hydra_mlp.{j}.0.res_connection", read) + F.silu(by(f"hydra_mlp.{j}.0.linear", read))
            yield by(f"hydra_lm_head.{j}", y + F.silu(by(f"hydra_mlp.{j}.1.linear", y)))

    check(head, reference, tokens, streams)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_mlp_speculator(runtime, tmp_path, tied, scaled):
    torch.manual_seed(0)
    inner, places, tensors = 12, 4, {}
    for k in range(1 if tied else places):
        tensors |= {f"emb.{k}.weight": random(V, inner), f"head.{k}.weight": random(V, inner)}
        tensors |= {f"ln.{k}.weight": 1 + random(inner), f"ln.{k}.bias": random(inner)}
    for k in range(2 if tied else places):
        tensors[f"proj.{k}.weight"] = random(inner, inner if k else D)
    config = {"emb_dim": D, "inner_dim": inner, "n_predict": places, "tie_weights": tied, "scale_input": scaled}
    named = {f"speculator.{name}": t for name, t in tensors.items()}
    saved(tmp_path, {**config, "model_type": "mlp_speculator"}, named, "model.safetensors")
    head = head_of(runtime, tmp_path)
    tokens, streams = texts(runtime, 12)

    def get(name, k):
        tensor = tensors.get(name.format(k))
        return (tensors[name.format(1 if name[0] == "p" else 0)] if tensor is None else tensor).double()

    def reference(n, drafted):
        state = normed_last(runtime, streams[n - 1 : n])[0]
        if scaled:
            state = rms(state, eps=1e-6) / math.sqrt(2)
        share = 0.5 ** (0.5 / places)
        for k, token in enumerate([int(tokens[n - 1]), *drafted]):
            added = math.sqrt((1 - share**2) * inner / 2) * get("emb.{}.weight", k)[token]
            state = share * (get("proj.{}.weight", k) @ state) + added
            state = F.gelu(rms(state, get("ln.{}.weight", k), 1e-6) + get("ln.{}.bias", k))
            yield get("head.{}.weight", k) @ state

    check(head, reference, tokens, streams)


def eagle_tensors():
    return {"fc.weight": random(D, 2 * D), **layer("layers.0.", D)}


class Trap:
    """What no file of weights may hold."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (CONFIG, lambda: {"other.weight": random(2, 2)}, "match no known kind of head; known: EAGLE"),
        (CONFIG, lambda: {**eagle_tensors(), "layers.1.up.weight": random(2, 2)}, "the head has unknown tensors"),
        ({**CONFIG, "rope_scaling": {"type": "yarn"}}, eagle_tensors, "rope is of type 'yarn'; known"),
        ({"num_key_value_heads": KV}, eagle_tensors, "no tensor or setting 'num_attention_heads'"),
        (
            {"hydra_head_arch": "prefix-mlp"},
            lambda: {"hydra_mlp.0.0.linear.weight": random(D, D)},
            "Hydra's form 'prefix",
        ),
        (CONFIG, lambda: {"0.0.linear.weight": random(32, 32)}, "for a model of hidden size 32; expected 16"),
        (CONFIG, lambda: {"a": Trap()}, "no tensors can be read from it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(runtime, tmp_path, capfd, config, tensors, said):
    saved(tmp_path, config, tensors())
    with pytest.raises(SelfspecError, match=said):
        read_published(tmp_path, runtime)
    assert "run" not in capfd.readouterr().out


def test_folders_that_are_no_heads(runtime, tmp_path):
    with pytest.raises(SelfspecError, match="is no folder"):
        read_published(tmp_path / "gone", runtime)
    with pytest.raises(SelfspecError, match="config.json: no such file"):
        read_published(tmp_path, runtime)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SelfspecError, match="no JSON can be read"):
        read_published(tmp_path, runtime)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SelfspecError, match="holds no weights of a head; expected one of model.safetensors"):
        read_published(tmp_path, runtime)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        (lambda ran: {"head.weight": Code(ran)}, ""),
        (lambda ran: Code(ran), ""),
        (lambda ran: [torch.zeros(1)], "expected tensors by name"),
        (lambda ran: {"head.weight": 1}, "expected tensors by name"),
    ],
)
def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(saved, why, runtime, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(saved(tmp_path / "ran"), tmp_path / "pytorch_model.bin")
    with pytest.raises(SelfspecError, match=rf"pytorch_model.bin: no tensors can be read from it .*{why}") as raised:
        read_published(tmp_path, runtime)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()
