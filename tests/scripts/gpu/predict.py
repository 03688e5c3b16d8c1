"""Print the nodes of captured passes and rounds, what each reads, and the time that takes at least, as Markdown.

    python tests/scripts/gpu/predict.py --context 2048 --bandwidth 3.0 --node 1.5

By default Llama 3 8B on an H100. A node takes at least `--node` microseconds, and as long as its bytes take at
`--bandwidth` TB/s. Both are assumptions until a device has been measured; so are all times here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple


class Shape(NamedTuple):
    """The sizes of a model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int


LLAMA_8B = Shape(4096, 14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocabulary=128256)
BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 64}  # of a weight; int4 with scales and zero points by 64


def layer_nodes(shape: Shape, rows: int, context: int, weight: float) -> Iterator[tuple[str, float]]:
    """Yield the name of each node of a layer, and the bytes that it reads; a weight has `weight` bytes."""
    width, kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    stream = 2.0 * rows * shape.hidden
    yield "RMSNorm", stream
    yield "query, key and value", weight * shape.hidden * (width + kv) + stream
    yield "RoPE, writing keys and values", 2.0 * rows * (width + kv)
    yield "attention by chunks", 2.0 * kv * (context + rows)
    yield "attention, combined", 4.0 * rows * width * max(1, (context + rows) // 256)
    yield "output, added to the stream", weight * width * shape.hidden + 2.0 * rows * width
    yield "RMSNorm", stream
    yield "gate and up, SiLU", 2 * weight * shape.hidden * shape.intermediate + stream
    yield "down, added to the stream", weight * shape.hidden * shape.intermediate + 2.0 * rows * shape.intermediate


def other_nodes(shape: Shape, rows: int, weight: float) -> Iterator[tuple[str, float]]:
    """Yield the nodes of a pass besides its layers."""
    stream = 2.0 * rows * shape.hidden
    yield from (("causal mask", 8.0 * rows), ("embedding", stream), ("copy to the stream", stream), ("RMSNorm", stream))
    yield "head", weight * shape.hidden * shape.vocabulary + stream


def seconds(read: float, bandwidth: float, node: float) -> float:
    """Return the seconds that a node takes at least; `bandwidth` in bytes a second, `node` in seconds."""
    return max(read / bandwidth, node)


def pass_seconds(
    shape: Shape, rows: int, context: int, weights: tuple[str, str], bandwidth: float, node: float
) -> float:
    """Return the seconds of a pass whose layers and head have these kinds of weights."""
    layer = sum(seconds(read, bandwidth, node) for _, read in layer_nodes(shape, rows, context, BYTES[weights[0]]))
    others = sum(seconds(read, bandwidth, node) for _, read in other_nodes(shape, rows, BYTES[weights[1]]))
    return shape.layers * layer + others


ROUND_NODES, STEP_NODES = 46, 5  # of a greedy round beside its passes: once, and for each draft step
PLAIN_NODES = 22  # of a round without a draft
TREE_NODES, TREE_ROWS = 61, 16  # more of a round that verifies a tree with lookup tokens in this many rows


def rounds(shape: Shape, context: int, bandwidth: float, node: float) -> Iterator[tuple[int, int, float]]:
    """Yield the draft length, the nodes and the seconds of greedy rounds on the device that draft with int4 weights."""
    passes = shape.layers * len(list(layer_nodes(shape, 1, context, 2.0))) + len(list(other_nodes(shape, 1, 2.0)))
    draft = pass_seconds(shape, 1, context, ("int4", "int8"), bandwidth, node)
    for length in (0, 2, 4, 6, 8, 12):
        others = ROUND_NODES + length * STEP_NODES if length else PLAIN_NODES
        verified = pass_seconds(shape, 1 + length, context, ("bfloat16", "bfloat16"), bandwidth, node)
        yield length, (1 + length) * passes + others, length * draft + verified + others * node


def trees(shape: Shape, context: int, bandwidth: float, node: float) -> Iterator[tuple[int, int, float]]:
    """Yield what `rounds` yields, for rounds whose verification lookup tokens fill up to `TREE_ROWS` rows."""
    verified = [
        pass_seconds(shape, rows, context, ("bfloat16", "bfloat16"), bandwidth, node)
        for rows in range(1, 1 + TREE_ROWS)
    ]
    for length, count, took in rounds(shape, context, bandwidth, node):
        if length:
            yield length, count + TREE_NODES, took + verified[-1] - verified[length] + TREE_NODES * node


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="cached tokens (2048)")
    parser.add_argument("--bandwidth", type=float, default=3.0, help="TB/s (3.0)")
    parser.add_argument("--node", type=float, default=1.5, help="microseconds that a node takes at least (1.5)")
    parser.add_argument("--acceptance", type=float, default=0.93, help="chance that a drafted token is right (0.93)")
    given = parser.parse_args()
    shape, bandwidth, node = LLAMA_8B, given.bandwidth * 1e12, given.node * 1e-6
    print("| node of a layer | MB read, bfloat16 | int8 | int4 | us, bfloat16 | int8 | int4 |\n|" + "---|" * 7)
    kinds = [list(layer_nodes(shape, 1, given.context, weight)) for weight in BYTES.values()]
    for each in zip(*kinds, strict=True):
        megabytes = " | ".join(f"{read / 1e6:.3f}" for _, read in each)
        micros = " | ".join(f"{1e6 * seconds(read, bandwidth, node):.1f}" for _, read in each)
        print(f"| {each[0][0]} | {megabytes} | {micros} |")
    plain = pass_seconds(shape, 1, given.context, ("bfloat16", "bfloat16"), bandwidth, node)
    print("\n| pass | nodes | ms | of a plain step |\n|---|---|---|---|")
    passes = {
        "plain step, bfloat16": (1, ("bfloat16", "bfloat16")),
        "verification of 9 rows": (9, ("bfloat16", "bfloat16")),
        "draft step, int8": (1, ("int8", "int8")),
        "draft step, int4, head in int8": (1, ("int4", "int8")),
    }
    for name, (rows, weights) in passes.items():
        took = pass_seconds(shape, rows, given.context, weights, bandwidth, node)
        count = shape.layers * len(kinds[0]) + len(list(other_nodes(shape, 1, 2.0)))
        print(f"| {name} | {count} | {1e3 * took:.2f} | {took / plain:.2f} |")
    print("\n| tokens drafted in a round | nodes | ms | tokens a round | speed |\n|---|---|---|---|---|")
    for length, count, took in rounds(shape, given.context, bandwidth, node):
        tokens = sum(given.acceptance**n for n in range(1 + length))
        print(f"| {length} | {count} | {1e3 * took:.2f} | {tokens:.2f} | {tokens * plain / took:.2f} |")
    print("\n| tokens drafted beside lookup tokens | nodes | ms | tokens a round at a speed of 2.0 |\n|" + "---|" * 4)
    for length, count, took in trees(shape, given.context, bandwidth, node):
        print(f"| {length} | {count} | {1e3 * took:.2f} | {2 * took / plain:.2f} |")


if __name__ == "__main__":
    main()
