"""Layers that add the inputs of their linears to moments, from which int4 weights are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from selfspec.models.families.base import Block, GatedMlp
from selfspec.models.families.common import PlainMlp
from selfspec.models.linears import Into, Onto
from selfspec.models.quantizers import InputMoments


def watched(block: Block, moments: Mapping[int, InputMoments]) -> Block:
    """Return a block that runs alike, and adds the inputs of its linears to the moments, by the index of the group.

    In every family, attention has two groups (queries, keys and values; output), and so has an MLP without experts.
    """

    def into(number: int, call: Into) -> Into:
        def watch(x: Tensor, out: Tensor) -> object:
            moments[number].add(x)
            return call(x, out)

        return watch if number in moments else call

    def onto(number: int, call: Onto) -> Onto:
        watch = into(number, lambda x, base: call(base, x))
        return lambda base, x: watch(x, base)

    attention = replace(
        block.attention, qkv=into(0, block.attention.qkv), add=onto(1, block.attention.add), native=None
    )
    mlp = block.mlp
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, gate_up=into(2, mlp.gate_up), down=onto(3, mlp.down), native=None)
    elif isinstance(mlp, PlainMlp):
        mlp = replace(mlp, up=into(2, mlp.up), down=onto(3, mlp.down), native=None)
    return replace(block, attention=attention, mlp=mlp)
