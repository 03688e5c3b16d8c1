"""Tensor parallel models, whose weights are sharded over processes, as `transformers` loads them under `torchrun`.

Each process holds some heads of every attention and some units of every MLP. The linears that write to the residual
stream then compute partial sums, which `transformers` all-reduces when these linears are called. The input and output
of a sub-layer are complete in every process.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.models.families.base import Parts, Sizes
from selfspec.models.linears import Group, on_rows
from selfspec.types.identity import Identity


def is_sharded(model: Any) -> bool:
    """Return whether a model is tensor parallel."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def parallel_options(identity: Identity, among: int) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that shard a model over `among` processes.

    Raises `SelfspecError` if `among` does not divide the heads, and if `transformers` is too old.
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
        raise SelfspecError("tensor parallel: not supported by this transformers; expected 5.23 or newer") from error


def check_unsharded(model: Any, what: str) -> None:
    """Raise `SelfspecError`, naming the feature `what`, which needs whole weights, if a model is tensor parallel."""
    if is_sharded(model):
        raise SelfspecError(f"{what} is not supported in tensor parallel, where no process has the whole model")


def full_weight(weight: Tensor) -> Tensor:
    """Return the full weight, gathered from all processes, each of which has to call this function."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def local_weight(weight: Tensor) -> Tensor:
    """Return this process's shard of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def local_sizes(model: Any, parts: Parts, sizes: Sizes) -> Sizes:
    """Return the sizes of this process's shard: its heads, KV heads and MLP units of each layer.

    Raises `UnsupportedModelError` for a model that is not sharded by whole heads.
    """
    if dist.get_world_size() != model._tp_size:
        raise UnsupportedModelError("the model is sharded by more than tensor parallel; expected tp_size alone")
    layer = parts.layers[0]
    attention, mlp = layer.groups_of("attention")[0], layer.groups_of("mlp")[0]
    if len(attention.modules) != 3:
        raise UnsupportedModelError("tensor parallel: fused query, key and value projections; expected separate ones")
    q, k, _ = (_outputs(module, parts) for module in attention.modules)
    if q % parts.head_dim or k % parts.head_dim or q % k:
        raise UnsupportedModelError(
            f"{q / parts.head_dim:g} query heads and {k / parts.head_dim:g} key-value heads for each "
            "process; expected a number of processes that divides both"
        )
    units = sum(_outputs(module, parts) for module in mlp.modules)
    units //= 2 if len(mlp.modules) > 1 or units == 2 * sizes.intermediate else 1  # gate and up, where there is a gate
    return replace(sizes, heads=q // parts.head_dim, kv_heads=k // parts.head_dim, intermediate=units)


@torch.no_grad()
def _outputs(module: Any, parts: Parts) -> int:
    """Return the number of outputs that a linear returns in this process, by calling it on a row of zeros.

    The weight's shape does not tell, as the linear may gather its outputs from all processes.
    """
    weight = parts.norm.weight
    return int(on_rows(module)(weight.new_zeros(1, len(weight))).shape[-1])


def local_parts(model: Any, parts: Parts) -> Parts:
    """Return `parts` with the layers' linears replaced by `nn.Linear`s that hold this process's shards."""
    if not is_sharded(model):
        return parts
    layers = (replace(layer, groups=tuple(map(_local_group, layer.groups))) for layer in parts.layers)
    return replace(parts, layers=tuple(layers))


def _local_group(group: Group) -> Group:
    modules = group.modules
    own = {name: _local(module) for name, module in zip(group.names, modules, strict=True)}
    return replace(group, parent=SimpleNamespace(**own), partial=any(map(_cuts_inputs, modules)))


def _cuts_inputs(module: Any) -> bool:
    """Return whether a linear is sharded by inputs, so that each process computes a partial sum."""
    weight = module.weight
    return hasattr(weight, "placements") and any(place.is_shard() and place.dim % 2 for place in weight.placements)


def _local(module: Any) -> Any:
    """Return this process's shard of a linear as an `nn.Linear`; of a partial sum, only rank 0 has the bias."""
    if type(module) is not nn.Linear or not hasattr(module.weight, "to_local"):
        return module
    weight = local_weight(module.weight)
    bias: Tensor | None = None if _cuts_inputs(module) and dist.get_rank() > 0 else module.bias
    shard = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    shard.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        shard.bias = nn.Parameter(local_weight(bias).detach(), requires_grad=False)
    return shard


class Summed(nn.Module):
    """A linear sharded by inputs, whose output is the sum over all processes."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the complete output `[.., out]` from this process's inputs `x` `[.., in]`."""
        out: Tensor = self.linear(x).contiguous()
        dist.all_reduce(out)
        return out


def summed(group: Group) -> Group:
    """Return a group whose partial linears are wrapped in `Summed`."""
    if not group.partial:
        return group
    return replace(group, parent=SimpleNamespace(**{name: Summed(getattr(group.parent, name)) for name in group.names}))
