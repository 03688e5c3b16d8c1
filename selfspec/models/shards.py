"""Models whose weights are spread over processes: tensor parallel, as `transformers` loads it under `torchrun`.

Each process holds some heads of every attention and some units of every MLP. The linears that write to the stream then
give a part of a sum, which `transformers` has all processes sum up as they are called; what enters and leaves a
sub-layer is whole everywhere. Knows nothing of caches, prompts and drafts.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.models.families.base import Parts
from selfspec.models.linears import Group, on_rows
from selfspec.models.sizes import Sizes
from selfspec.types.identity import Identity


def is_sharded(model: Any) -> bool:
    """Whether a model's weights are spread over processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def parallel_options(identity: Identity, among: int) -> dict[str, Any]:
    """What `from_pretrained` is to be told so that so many processes share a model.

    Raises `SelfspecError` for heads that cannot be shared out, and where `transformers` is too old.
    """
    for heads, kind in ((identity.heads, "query"), (identity.kv_heads, "key-value")):
        if heads is not None and heads % among:
            raise SelfspecError(
                f"the model's {heads} {kind} heads cannot be shared out among {among} processes; expected a number of "
                "processes that divides them"
            )
    try:
        from transformers import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=among)} if among > 1 else {}
    except (ImportError, TypeError) as error:
        raise SelfspecError("tensor parallel wants a newer transformers; 5.23 has what it takes") from error


def check_whole(model: Any, what: str) -> None:
    """Raise `SelfspecError` where a model's weights are spread over processes, for `what` reads whole ones."""
    if is_sharded(model):
        raise SelfspecError(f"{what} cannot be had in tensor parallel, where no process has the whole model")


def whole_weight(weight: Tensor) -> Tensor:
    """A weight with the parts of all processes, each of which has to ask for it."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def own_weight(weight: Tensor) -> Tensor:
    """What this process has of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def local_sizes(model: Any, parts: Parts, sizes: Sizes) -> Sizes:
    """The sizes of what this process holds: some heads, key-value heads and units of each layer.

    Raises `UnsupportedModelError` for a model that is shared out otherwise than by whole heads.
    """
    if dist.get_world_size() != model._tp_size:
        raise UnsupportedModelError("the model is shared out by more than tensor parallel; expected tp_size alone")
    layer = parts.layers[0]
    attention, mlp = layer.groups_of("attention")[0], layer.groups_of("mlp")[0]
    if len(attention.modules) != 3:
        raise UnsupportedModelError("tensor parallel wants models with separate projections of queries, keys, values")
    q, k, _ = (_outputs(module, parts) for module in attention.modules)
    if q % parts.head_dim or k % parts.head_dim or q % k:
        raise UnsupportedModelError(
            f"{q / parts.head_dim:g} query heads and {k / parts.head_dim:g} key-value heads fall to a "
            "process; expected a number of processes that divides both"
        )
    units = sum(_outputs(module, parts) for module in mlp.modules) // 2
    return replace(sizes, heads=q // parts.head_dim, kv_heads=k // parts.head_dim, intermediate=units)


@torch.no_grad()
def _outputs(module: Any, parts: Parts) -> int:
    """How many outputs a linear that reads the stream has here; its weight does not say whether they are gathered."""
    weight = parts.norm.weight
    return int(on_rows(module)(weight.new_zeros(1, len(weight))).shape[-1])


def local_parts(model: Any, parts: Parts) -> Parts:
    """The layers' linears as they are here, as plain ones, to be read; the others are left as they are."""
    if not is_sharded(model):
        return parts
    layers = (replace(layer, groups=tuple(map(_local_group, layer.groups))) for layer in parts.layers)
    return replace(parts, layers=tuple(layers))


def _local_group(group: Group) -> Group:
    modules = group.modules
    own = {name: _local(module) for name, module in zip(group.names, modules, strict=True)}
    return replace(group, parent=SimpleNamespace(**own), partial=any(map(_cuts_inputs, modules)))


def _cuts_inputs(module: Any) -> bool:
    """Whether each process has some inputs of a linear, and so gives a part of a sum."""
    weight = module.weight
    return hasattr(weight, "placements") and any(place.is_shard() and place.dim % 2 for place in weight.placements)


def _local(module: Any) -> Any:
    """What this process has of a linear, as a plain one. Of a bias that is added to a sum, the first process has it."""
    if type(module) is not nn.Linear or not hasattr(module.weight, "to_local"):
        return module
    weight = own_weight(module.weight)
    bias: Tensor | None = None if _cuts_inputs(module) and dist.get_rank() > 0 else module.bias
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    found.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        found.bias = nn.Parameter(own_weight(bias).detach(), requires_grad=False)
    return found


class Summed(nn.Module):
    """A linear of which each process has some inputs: what all give, summed up."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """The whole output `[.., out]`, of this process's inputs `x` `[.., in]`."""
        out: Tensor = self.linear(x).contiguous()
        dist.all_reduce(out)
        return out


def summed(group: Group) -> Group:
    """A group whose linears give what all processes' do together."""
    if not group.partial:
        return group
    return replace(group, parent=SimpleNamespace(**{name: Summed(getattr(group.parent, name)) for name in group.names}))
