"""Conversion of published heads to part files: EAGLE, EAGLE-3, Medusa, Hydra and MLPSpeculator.

The library `speculators` nests the layer's configuration. SGLang numbers hidden states by the layer that outputs them,
in a nested `eagle_config`. vLLM has different names for Medusa's tensors.

Heads are read in the formats of their authors and of inference engines.

The kind of a head is detected from the names and shapes of its tensors, which are more reliable than its configuration.
From pickle files only tensors are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import check_file, kind, parse_json
from selfspec.draft_modules.heads import LayerShape, make_part_file
from selfspec.draft_modules.module_files import PartFile
from selfspec.runtime.base import Runtime

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's configuration as one flat dict, with hidden states numbered as in `ForwardOutput`."""
    nested = config.get("transformer_layer_config") or {}
    flat = {**nested, **{name: value for name, value in config.items() if name != "transformer_layer_config"}}
    layers = "eagle_aux_hidden_state_layer_ids"
    left = (config.get("eagle_config") or {}).get(layers)
    if flat.get(layers) is None and left:
        flat[layers] = [int(layer) + 1 for layer in left]
    return flat


def authors_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename vLLM's Medusa tensors to the names of Medusa's authors; other heads' tensors are unchanged."""
    blocks = {int(match[2]) for name in tensors if (match := _BLOCK.fullmatch(name))}
    if not blocks:
        return dict(tensors)
    named = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := _HEAD.fullmatch(name):
            name = f"{match[1]}.{max(blocks) + 1}.weight"
        named[name] = tensor
    return named


FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
_PREFIXES = ("speculator.", "medusa_head.", "heads.")
_NEEDLESS = re.compile(
    r"(.*\.)?(embed_tokens\.weight|input_embed_fn\.weight|t2d|inv_freq)"
)  # tensors that the model has, or that follow from others
_LAYER = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
_ROPES = ("default", "linear", "llama3")
Tensors = dict[str, Tensor]


def read_published(folder: Path, target: Runtime) -> PartFile:
    """Read a published head from the folder of its checkpoint, as a part file for the model of `target`.

    Raises `SelfspecError` for an unknown kind of head, or a head for a model of another size.
    """
    if kind(folder) != "folder":
        raise SelfspecError(f"{folder} is no folder; expected the one of a published head, with its config.json")
    config, tensors = _config(folder), _tensors(folder)
    for test, make in _KINDS:
        if test(tensors):
            try:
                return make(config, tensors, target)
            except KeyError as error:
                raise SelfspecError(f"{folder}: the head has no tensor or setting {error}") from None
            except SelfspecError:
                raise
            except Exception as error:  # settings and shapes can be anything
                raise SelfspecError(f"{folder}: the head cannot be converted ({reason(error)})") from None
    raise SelfspecError(
        f"{folder}: its tensors ({', '.join(sorted(tensors)[:3])}, ..) match no known kind of head; "
        "known: EAGLE, EAGLE-3, Medusa, Hydra, MLPSpeculator"
    )


def _config(folder: Path) -> dict[str, Any]:
    check_file(folder / "config.json")
    try:
        read = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SelfspecError(f"{folder / 'config.json'}: no JSON can be read ({error})") from None
    if not isinstance(read, dict):
        raise SelfspecError(f"{folder / 'config.json'}: expected an object")
    return flat_config(read)


def _tensors(folder: Path) -> Tensors:
    file = next((folder / name for name in FILES if kind(folder / name) == "file"), None)
    if file is None:
        raise SelfspecError(f"{folder} holds no weights of a head; expected one of {', '.join(FILES)}")
    try:
        read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        if not isinstance(read, dict) or not all(isinstance(tensor, Tensor) for tensor in read.values()):
            raise TypeError("expected tensors by name")
    except Exception as error:  # truncated, or a pickle with more than tensors
        raise SelfspecError(f"{file}: no tensors can be read from it ({reason(error)})") from None
    tensors = {}
    for name, tensor in read.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        tensors[name] = tensor
    return authors_names(tensors)


def _part(
    kind_of: str,
    settings: dict[str, Any],
    converted: Tensors,
    left: Tensors,
    target: Runtime,
    words: list[int] | None = None,
) -> PartFile:
    """Return the part file of a head of kind `kind_of`.

    Raises `SelfspecError` if `left`, the tensors that were not converted, has tensors that the kind should not have.
    """
    if unknown := [name for name in left if not _NEEDLESS.fullmatch(name)]:
        raise SelfspecError(f"the head has unknown tensors for its kind ({kind_of}): {', '.join(sorted(unknown)[:3])}")
    return make_part_file(kind_of, settings, converted, words, target)


def _last_norm(target: Runtime) -> Tensor:
    return target.skeleton.gain


def _check_width(width: int, target: Runtime) -> None:
    want = target.skeleton.sizes.hidden
    if width != want:
        raise SelfspecError(f"the head is for a model of hidden size {width}; expected {want}")


def _layer(tensors: Tensors, prefix: str) -> Tensors:
    """Remove a decoder layer's matrices, and the biases of q, k and v, from `tensors`; return them."""
    converted = {f"layer.{name.split('.')[1]}.weight": tensors.pop(f"{prefix}{name}.weight") for name in _LAYER}
    for name in _LAYER[:3]:
        if (bias := tensors.pop(f"{prefix}{name}.bias", None)) is not None:
            converted[f"layer.{name.split('.')[1]}.bias"] = bias
    return converted


def _shape(config: Mapping[str, Any], converted: Tensors) -> dict[str, Any]:
    """Return a decoder layer's settings for a part file: its sizes and RoPE scaling.

    If RoPE is scaled, its frequencies are added to `converted` as `layer.inv_freq`.
    """
    hidden, heads = len(converted["layer.down_proj.weight"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    rope_parameters = config.get("rope_parameters") or {}
    theta = float(config.get("rope_theta") or rope_parameters.get("rope_theta") or 10000.0)
    scaling = {**rope_parameters, **(config.get("rope_scaling") or {})}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    if rope not in _ROPES:
        raise SelfspecError(f"the head's rope is of type '{rope}'; known: {', '.join(_ROPES)}")
    shape = LayerShape(
        hidden,
        len(converted["layer.up_proj.weight"]),
        heads,
        len(converted["layer.k_proj.weight"]) // head_dim,
        head_dim,
        float(config.get("rms_norm_eps", 1e-6)),
        theta,
    )
    if rope == "default":
        return {"shape": asdict(shape)}
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            rope_parameters={**scaling, "rope_type": rope, "rope_theta": theta},
        )
    )
    converted["layer.inv_freq"] = rotary.inv_freq
    return {"shape": asdict(shape), "rope": {**scaling, "rope_type": rope}}


def _eagle(config: dict[str, Any], tensors: Tensors, target: Runtime) -> PartFile:
    """Convert an EAGLE or EAGLE-2 head, which reads token embeddings and normed hidden states.

    It has no output head: the model's head is used.
    """
    converted = _layer(tensors, "layers.0.")
    converted["layer.post_attention_layernorm.weight"] = tensors.pop("layers.0.post_attention_layernorm.weight")
    for name in ("fc.weight", "fc.bias", "layers.0.input_layernorm.weight"):
        if name in tensors:
            converted[f"layer.{name.removeprefix('layers.0.')}"] = tensors.pop(name)
    _check_width(len(converted["layer.fc.weight"]), target)
    shape = _shape(config, converted)
    converted["layer.given_norm.weight"] = _last_norm(target)
    return _part("eagle", {**shape, "layers": [target.layers]}, converted, tensors, target)


def _eagle_3(config: dict[str, Any], tensors: Tensors, target: Runtime) -> PartFile:
    """Convert an EAGLE-3 head, which reads token embeddings and fused hidden states of three layers.

    It has an output head.
    """
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        if config.get(flag):
            raise SelfspecError(f"the head uses an option of later EAGLE-3 versions, {flag}, which is not supported")
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    converted = _layer(tensors, prefix)
    for mine, theirs in (
        ("embed_norm", f"{prefix}input_layernorm"),
        ("stream_norm", f"{prefix}hidden_norm"),
        ("post_attention_layernorm", f"{prefix}post_attention_layernorm"),
        ("fuse", "fc"),
        ("norm", "norm"),
    ):
        converted[f"layer.{mine}.weight"] = tensors.pop(f"{theirs}.weight")
    fuse = converted["layer.fuse.weight"]
    _check_width(fuse.shape[1] // 3, target)
    _check_width(len(fuse), target)
    shape = _shape(config, converted)
    n = target.layers
    aux_layers = config.get("eagle_aux_hidden_state_layer_ids")
    layers = [2, n // 2, n - 3] if aux_layers is None else [int(layer) for layer in aux_layers]
    if len(layers) != 3 or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] <= n:
        raise SelfspecError(
            f"the head reads hidden states of layers {layers}; expected three rising numbers from 0 to {n}"
        )
    converted["head.weight"] = tensors.pop("lm_head.weight")
    offsets = tensors.pop("d2t", None)
    words = None if offsets is None else (torch.arange(len(offsets)) + offsets).tolist()
    return _part("eagle", {**shape, "layers": layers}, converted, tensors, target, words=words)


def _numbers(tensors: Tensors, pattern: str) -> list[int]:
    return sorted({int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))})


def _of_steps(net: dict[str, Any], converted: Tensors, target: Runtime) -> dict[str, Any]:
    """Return the settings of a head with the network `net`; add the norm of the target that it reads to `converted`."""
    converted["given_norm.weight"] = _last_norm(target)
    return {"net": net, "eps": target.skeleton.sizes.eps, "layers": [target.layers]}


def _blocks(tensors: Tensors, prefix: str, target: Runtime) -> tuple[dict[str, int], Tensors]:
    """Remove the linears of residual blocks from `tensors`; return the network's sizes, and the linears."""
    hidden = len(tensors[f"{prefix}0.0.linear.weight"])
    _check_width(hidden, target)
    places = len(_numbers(tensors, rf"{re.escape(prefix)}(\d+)\.0\.linear\.weight"))
    blocks = len(_numbers(tensors, rf"{re.escape(prefix)}0\.(\d+)\.linear\.weight"))
    names = [f"{j}.{i}.linear.{name}" for j in range(places) for i in range(blocks) for name in ("weight", "bias")]
    converted = {f"heads.{name}": tensors.pop(f"{prefix}{name}") for name in names}
    return {"hidden": hidden, "places": places, "blocks": blocks}, converted


def _medusa(_config: dict[str, Any], tensors: Tensors, target: Runtime) -> PartFile:
    """Convert a Medusa head, with one output head for each draft position, one for all (vLLM), or none."""
    net, converted = _blocks(tensors, "", target)
    words = tensors.pop("token_map", None)
    for mine, theirs in [("head", "lm_head"), *((f"head.{j}", f"{j}.{net['blocks']}") for j in range(net["places"]))]:
        if (own := tensors.pop(f"{theirs}.weight", None)) is not None:
            converted[f"{mine}.weight"] = own if words is None or len(own) == len(words) else own[words.long()]
    words_kept = None if words is None else words.tolist()
    return _part("medusa", _of_steps(net, converted, target), converted, tensors, target, words_kept)


def _hydra(config: dict[str, Any], tensors: Tensors, target: Runtime) -> PartFile:
    """Convert a Hydra head: residual blocks and an output head for each draft position.

    Raises `SelfspecError` for other forms of Hydra than the MLP of its configuration `mlp`.
    """
    arch = config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or "hydra_mlp.0.0.res_connection.weight" not in tensors or config.get("hidden_state_offset"):
        raise SelfspecError(
            f"the head is of Hydra's form '{arch}'; known is 'mlp', grounded, with hidden_state_offset 0"
        )
    net, converted = _blocks(tensors, "hydra_mlp.", target)
    for j in range(net["places"]):
        for name in ("weight", "bias"):
            converted[f"heads.{j}.0.short.{name}"] = tensors.pop(f"hydra_mlp.{j}.0.res_connection.{name}")
        converted[f"head.{j}.weight"] = tensors.pop(f"hydra_lm_head.{j}.weight")
        if (bias := tensors.pop(f"hydra_lm_head.{j}.bias", None)) is not None:
            converted[f"head.{j}.bias"] = bias
    return _part("hydra", _of_steps(net, converted, target), converted, tensors, target)


def _mlp(config: dict[str, Any], tensors: Tensors, target: Runtime) -> PartFile:
    """Convert an MLPSpeculator head; the file may hold only the first copy of tied tensors."""
    places, tied = int(config["n_predict"]), bool(config.get("tie_weights", False))
    tables, inner = tensors["emb.0.weight"].shape
    hidden = tensors["proj.0.weight"].shape[1]
    _check_width(hidden, target)
    converted: Tensors = {}
    left: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)", name)
        if match is None:
            left[name] = tensor
        elif not tied or int(match[2]) <= int(match[1] == "proj"):  # skips copies of tied tensors
            converted[name] = tensor
    net = {"hidden": hidden, "places": places, "inner": inner, "tied": tied, "tables": tables}
    net["scaled"] = bool(config.get("scale_input", False))
    return _part("mlp", _of_steps(net, converted, target), converted, left, target)


def _has(*names: str) -> Callable[[Tensors], bool]:
    return lambda tensors: all(name in tensors for name in names)


def _reads_both(tensors: Tensors) -> bool:
    weight = tensors.get("layers.0.self_attn.q_proj.weight", tensors.get("midlayer.self_attn.q_proj.weight"))
    down = tensors.get("layers.0.mlp.down_proj.weight", tensors.get("midlayer.mlp.down_proj.weight"))
    return weight is not None and down is not None and weight.shape[1] == 2 * len(down)


_KINDS: tuple[tuple[Callable[[Tensors], bool], Callable[[dict[str, Any], Tensors, Runtime], PartFile]], ...] = (
    (_has("0.0.linear.weight"), _medusa),
    (_has("hydra_mlp.0.0.linear.weight"), _hydra),
    (_has("emb.0.weight", "proj.0.weight"), _mlp),
    (_reads_both, _eagle_3),
    (_has("fc.weight", "layers.0.self_attn.q_proj.weight"), _eagle),
)
