"""Conversion of trained draft heads to the published formats that engines read: EAGLE, EAGLE-3, Medusa, MLPSpeculator.

`draft_modules.published_heads` reads the same formats. `words` in this module are the token ids `[W]` of a head's draft
vocabulary: the W tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.heads import WORDS, head_rows
from selfspec.draft_modules.module_files import PartFile
from selfspec.runtime.base import Runtime

Tensors = dict[str, Tensor]
_NORMS = {"embed_norm": "input_layernorm", "stream_norm": "hidden_norm"}
_MLP = ("gate_proj", "up_proj", "down_proj")
INSTEAD = "a head by selfspec train medusa, or a published EAGLE-3 head by selfspec convert"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A draft head in a published form, as configuration and named tensors.

    `form`: `eagle`, `eagle3`, `medusa` or `mlp_speculator`. `layers`: the target's hidden states that the head reads;
    i is the input of layer i, and the number of layers the output of the last layer. `lost`: features of the head that
    the form lacks.
    """

    form: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    lost: tuple[str, ...] = ()


def form_of(part: PartFile) -> str:
    """Return the name of a trained head's published form. Raises `SelfspecError` if no engine can run the head."""
    if part.kind in ("medusa", "mlp"):
        return {"mlp": "mlp_speculator"}.get(part.kind, part.kind)
    if part.kind == "eagle":
        has = {name.removeprefix("layer.").removesuffix(".weight") for name in part.tensors}
        if "fc" not in has and {"fuse", "embed_norm", "stream_norm", "norm"} <= has:
            return "eagle3"
        if "fc" in has and not has & {"fuse", "embed_norm", "stream_norm", "norm", "input_layernorm"}:
            return "eagle"
        raise SelfspecError(
            "an EAGLE head as selfspec train fits it (one layer over three normalised hidden states) has no form "
            f"that engines run; engines could run instead: {INSTEAD}"
        )
    raise SelfspecError(f"heads of kind '{part.kind}' are run by no engine; engines could run instead: {INSTEAD}")


def head_files(part: PartFile, target: Runtime) -> HeadFiles:
    """Return a trained head in its published form.

    Raises `SelfspecError` if no engine can run the head, and if it was trained for another model than `target`.
    """
    part.check(part.kind, target.skeleton.identity)
    return _FORMS[form_of(part)](part, target)


def _words(part: PartFile) -> Tensor | None:
    words = part.tensors.get(WORDS)
    return None if words is None else words.long()


def _rows(part: PartFile, target: Runtime, words: Tensor | None, name: str = "head.weight") -> Tensor:
    """Return the LM head `[words, hidden]` of a draft head.

    This is the tensor `name` of `part` if there is one, else the rows of the target's LM head for the token ids `words`
    (None: all), as bfloat16.
    """
    if name in part.tensors:
        return part.tensors[name]
    every = torch.arange(target.skeleton.identity.vocabulary or 0)
    return head_rows(target, every if words is None else words).cpu().bfloat16()


def _layer(part: PartFile, prefix: str) -> Tensors:
    """Return the tensors of the head's decoder layer by their published names, without the norms of its inputs."""
    tensors = {}
    for name, tensor in part.tensors.items():
        own, _, what = name.removeprefix("layer.").rpartition(".")
        if own.endswith("_proj"):
            tensors[f"{prefix}{'mlp' if own in _MLP else 'self_attn'}.{own}.{what}"] = tensor
        elif own == "post_attention_layernorm":
            tensors[f"{prefix}{own}.{what}"] = tensor
    return tensors


def _config(part: PartFile, target: Runtime, *, arch: str) -> dict[str, Any]:
    """Return the configuration of the head's decoder layer, as a LLaMA model with one layer."""
    shape = part.settings["shape"]
    biases = any(name.endswith("_proj.bias") for name in part.tensors)
    return {
        "architectures": [arch],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": 1,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "rms_norm_eps": shape["eps"],
        "attention_bias": biases,
        "max_position_embeddings": target.skeleton.context,
        "tie_word_embeddings": False,
        "vocab_size": target.skeleton.identity.vocabulary,
        "torch_dtype": "bfloat16",
        **_rope(part),
    }


def _rope(part: PartFile) -> dict[str, Any]:
    """Return the configuration keys of RoPE's base and scaling.

    Raises `SelfspecError` if RoPE is scaled and the file of the head does not record how.
    """
    shape, inv_freq = part.settings["shape"], part.tensors.get("layer.inv_freq")
    theta = float(shape["theta"])
    if inv_freq is None:
        return {"rope_theta": theta}
    if scaling := part.settings.get("rope"):
        return {"rope_theta": theta, "rope_scaling": dict(scaling)}
    raise SelfspecError("the head's RoPE is scaled in a way that its file does not say; convert it again")


def _eagle_3(part: PartFile, target: Runtime) -> HeadFiles:
    words = _words(part)
    vocabulary = target.skeleton.identity.vocabulary or 0
    tensors = _layer(part, "layers.0.")
    for mine, theirs in _NORMS.items():
        tensors[f"layers.0.{theirs}.weight"] = part.tensors[f"layer.{mine}.weight"]
    tensors["fc.weight"], tensors["norm.weight"] = part.tensors["layer.fuse.weight"], part.tensors["layer.norm.weight"]
    tensors["lm_head.weight"] = _rows(part, target, words)
    draft_ids = torch.arange(vocabulary) if words is None else words
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.isin(torch.arange(vocabulary), draft_ids)
    layers = tuple(int(layer) for layer in part.settings["layers"])
    config = _config(part, target, arch="LlamaForCausalLM")
    more = {"draft_vocab_size": len(draft_ids), "eagle_aux_hidden_state_layer_ids": list(layers)}
    return HeadFiles("eagle3", {**config, **more}, tensors, layers)


def _eagle(part: PartFile, target: Runtime) -> HeadFiles:
    tensors = _layer(part, "layers.0.")
    tensors["fc.weight"] = part.tensors["layer.fc.weight"]
    if (bias := part.tensors.get("layer.fc.bias")) is not None:
        tensors["fc.bias"] = bias
    config = _config(part, target, arch="LlamaForCausalLM") | {"bias": "fc.bias" in tensors}
    return HeadFiles("eagle", config, tensors, (target.layers,))


def _medusa(part: PartFile, target: Runtime) -> HeadFiles:
    """Return a Medusa head in vLLM's format; the tensor `token_map` holds its draft vocabulary, if it has one."""
    net, words = part.settings["net"], _words(part)
    vocabulary = target.skeleton.identity.vocabulary or 0
    places, blocks = int(net["places"]), int(net.get("blocks", 1))
    tensors = {
        f"blocks.{j}.layers.{i}.{name}": part.tensors[f"heads.{j}.{i}.linear.{name}"]
        for j in range(places)
        for i in range(blocks)
        for name in ("weight", "bias")
    }
    own = "head.0.weight" in part.tensors
    if own:
        tensors |= {f"lm_heads.{j}.weight": part.tensors[f"head.{j}.weight"] for j in range(places)}
    else:
        tensors["lm_head.weight"] = _rows(part, target, words)
    if words is not None:
        tensors["token_map"] = words
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": int(net["hidden"]),
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary if words is None else len(words),
        "num_heads": places,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
    }
    return HeadFiles("medusa", config, tensors, (target.layers,))


def _mlp(part: PartFile, target: Runtime) -> HeadFiles:
    """Return an MLPSpeculator head.

    The format has an embedding table per step. A head that instead maps the target's embeddings by a matrix gets the
    product of both as its table.
    """
    net, vocabulary = part.settings["net"], target.skeleton.identity.vocabulary or 0
    places, tied = int(net["places"]), bool(net.get("tied", False))
    tensors = {name: t for name, t in part.tensors.items() if name.split(".")[0] in ("proj", "ln")}
    ids = torch.arange(vocabulary, device=target.device)
    embedding = target.skeleton.embed(ids[None])[0].detach().cpu().float()  # with the family's multiplier
    for k in range(1 if tied else places):
        table = part.tensors[f"emb.{k}.weight"]
        tensors[f"emb.{k}.weight"] = table if net.get("tables") else (embedding @ table.float().T).bfloat16()
        own = f"head.{k}.weight" if f"head.{k}.weight" in part.tensors else "head.weight"
        tensors[f"head.{k}.weight"] = _rows(part, target, None, own).clone()
    lost: tuple[str, ...] = ()
    if (words := _words(part)) is not None and len(words) < vocabulary:
        lost = (f"the head's vocabulary of {len(words)} tokens: an MLPSpeculator drafts all of the model's tokens",)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocabulary,
        "emb_dim": int(net["hidden"]),
        "inner_dim": int(net["inner"]),
        "n_predict": places,
        "n_candidates": places,
        "top_k_tokens_per_head": [1] * places,
        "tie_weights": tied,
        "scale_input": bool(net.get("scaled", False)),
        "torch_dtype": "bfloat16",
    }
    return HeadFiles("mlp_speculator", config, tensors, (target.layers,), lost)


_FORMS = {"eagle": _eagle, "eagle3": _eagle_3, "medusa": _medusa, "mlp_speculator": _mlp}
