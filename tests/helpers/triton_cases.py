"""Checks of the Triton kernels' values, run on a CPU by Triton's interpreter: `python triton_cases.py` prints failures.

The interpreter has to be asked for before kernels are imported, so that this is a program of its own. It multiplies by
numpy, where a row's bits depend on its place among the rows, as on no GPU: rows are compared at one place.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "SELFSPEC_TRITON": "1", "SELFSPEC_NATIVE": "0"}

import torch
import torch.nn.functional as F
from families import FAMILY_CONFIGS
from models import CONFIGS, SIZES, run, tiny, tokens_for
from natives import random_tree
from tape import Rerun, Unreplayed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MistralConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton.runtime.interpreter import GridExecutor

from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.models.kernels import triton, triton_float8
from selfspec.models.layout import join_all_
from selfspec.models.low_precision import fake, quantize
from selfspec.models.triton_kernels.attention import decode_attention
from selfspec.models.triton_kernels.elementwise import partner_of, rms_norm, rope_and_write
from selfspec.models.triton_kernels.products import TritonProduct
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import LENGTHS, RoundPlan
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import FULL, DraftPath

NEAR = {
    torch.float32: 1e-5,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}  # relative errors; bfloat16 is cut off, not rounded


def near(ours: Tensor, exact: Tensor, error: float) -> None:
    """Raise `AssertionError` unless the relative error is below `error`."""
    found = float((ours.double() - exact.double()).norm() / exact.double().norm())
    assert found < error, f"relative error {found}, expected below {error}"


def products_of(weight: Tensor) -> Iterator[tuple[str, TritonProduct, Tensor, float]]:
    """Yield the name, the product, the weight that it stands for, and its own relative error of each kind."""
    yield "dense", TritonProduct.dense(weight), weight, 0.0
    for bits in (8, 4):
        if bits == 8 or weight.shape[1] % 32 == 0:
            held = quantize(weight, bits)
            rounding = NEAR[weight.dtype] / 2 if bits == 4 else 0.0  # of the weight, in 16 bits
            yield f"int{bits}", triton(held, weight.dtype), held.weight(torch.float64), rounding
    yield "float8", triton_float8(quantize(weight, 8), weight.dtype), weight, 0.04


def products() -> None:
    """Every kind of weight and epilogue, over shapes that fill no block, and dtypes."""
    for dtype, (out, into) in itertools.product(NEAR, [(40, 576), (33, 80), (34, 1024)]):
        torch.manual_seed(out)
        weight, x, base = (torch.randn(*shape).to(dtype) for shape in ((out, into), (17, into), (17, out + 1)))
        bias = torch.randn(out).to(dtype)
        for _name, product, held, own in products_of(weight):
            exact = x.double() @ held.double().t()
            error = NEAR[dtype] + own
            near(product(x[:3]), exact[:3], error)
            near(product.with_bias(bias)(x), exact + bias.double(), error)
            near(product.float32(x[:1]), exact[:1], 1e-5 + own)
            stream = base.clone()[:, :out]  # a view, as the residual stream is
            product.add(stream, x)
            near(stream, base[:, :out].double() + exact, error)
            gated = torch.empty(17, out // 2, dtype=dtype)
            product.gate(x, gated) if out % 2 == 0 else None
            half = exact.shape[1] // 2
            near(gated, F.silu(exact[:, :half]) * exact[:, half:], 2 * error) if out % 2 == 0 else None


def current_devices() -> None:
    """Every kernel is launched while the device of its tensors is the current one, on which Triton launches."""
    entered: list[torch.device] = []
    launched: list[bool] = []

    class DeviceOf:
        def __init__(self, tensor: Tensor) -> None:
            self.device = tensor.device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched.append(bool(entered))
        LAUNCH(executor, *args, **kwargs)

    theirs, torch.cuda.device_of, GridExecutor.__call__ = torch.cuda.device_of, DeviceOf, launch
    try:
        for _, product, _, _ in products_of(torch.randn(32, 64)):
            for rows in (1, 2):
                product(torch.randn(rows, 64))
        runtime = LeanRuntime(of_layers(1))
        with runtime.session(20):
            runtime.forward(torch.ones(1, 1, dtype=torch.long), 0)
    finally:
        torch.cuda.device_of, GridExecutor.__call__ = theirs, LAUNCH
    assert len(launched) >= 2 * 4 + 9, launched  # each kind of product, and a layer
    assert all(launched), launched


def rows_among_others() -> None:
    """A row has the bits that it has alone, whatever stands beside it; two calls agree.

    With int4 weights, which only drafts have, one row alone is multiplied by a kernel of its own.
    """
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        weight, x = torch.randn(48, 96).to(dtype), torch.randn(16, 96).to(dtype)
        for name, product, _, _ in products_of(weight):
            alone = product(x[: 2 if name == "int4" else 1])[:1]
            for rows in (2, 9, 16):
                assert torch.equal(product(x[:rows])[:1], alone)
            assert torch.equal(product(torch.cat([x[:1], 1e3 * x[1:]]))[:1], alone)


def many_rows() -> None:
    """More rows than the kernels take are multiplied by torch, or by the kernel if weights are quantised."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 96), torch.randn(70, 96)
    for _, product, held, own in products_of(weight):
        exact, base = x.double() @ held.double().t(), torch.randn(70, 40)
        near(product(x), exact, 1e-5 + own)
        near(product.with_bias(base[0])(x), exact + base[0], 1e-5 + own)
        added = base.clone()
        product.add(added, x)
        near(added, base + exact, 1e-5 + own)


def norms() -> None:
    """RMSNorm as `transformers` computes it, with a sum before it."""
    for dtype, width in itertools.product(NEAR, (32, 80, 576)):
        torch.manual_seed(width)
        module = LlamaRMSNorm(width, eps=1e-5)
        module.weight.data = torch.randn(width).to(dtype)
        x, add = torch.randn(5, width + 1).to(dtype)[:, :width], torch.randn(5, width).to(dtype)
        weight, before = module.weight.detach(), x.clone()
        out = rms_norm(x, weight, 1e-5, torch.empty(5, width, dtype=dtype))
        near(out, module(before), NEAR[dtype])
        assert torch.equal(x, before)
        assert torch.equal(rms_norm(x[:1], weight, 1e-5, torch.empty(1, width, dtype=dtype)), out[:1])
        rms_norm(x, weight, 1e-5, out, add)
        near(x, before.double() + add.double(), NEAR[dtype])
        near(out, module(x), NEAR[dtype])


def rope() -> None:
    """Queries, keys and values, rotated by halves and by pairs, to scattered slots of some rows of the cache."""
    batch, n, heads, kv_heads = 2, 3, 4, 2
    for dtype, dim, pairs in itertools.product(NEAR, (8, 40), (False, True)):
        torch.manual_seed(dim)
        qkv = torch.randn(batch * n, (heads + 2 * kv_heads) * dim).to(dtype)
        cos, sin = (torch.randn(50, 1, dim).to(dtype) for _ in range(2))
        partner = torch.arange(dim) ^ 1 if pairs else None
        positions, slots = torch.tensor([[7, 8, 8], [30, 31, 49]]), torch.tensor([[7, 8, 9], [2, 0, 19]])
        q = torch.empty(batch * kv_heads, heads // kv_heads, n, dim, dtype=dtype)
        keys, values = (torch.zeros(4, kv_heads, 20, dim, dtype=dtype) for _ in range(2))
        keys = keys.transpose(-1, -2).contiguous().transpose(-1, -2) if pairs else keys
        tables = (cos, sin, partner_of(partner, dim, qkv.device))
        rope_and_write(qkv, tables, positions, slots, q, (keys, values), 1)
        x = qkv.view(batch, n, -1, dim).double()
        rotated = x * cos[positions].double() + x[..., tables[2]] * sin[positions].double()
        expected = rotated[:, :, :heads].transpose(1, 2).reshape(q.shape)
        near(q, expected, NEAR[dtype])
        for row, token in itertools.product(range(batch), range(n)):
            slot = int(slots[row, token])
            near(keys[1 + row, :, slot], rotated[row, token, heads:-kv_heads], NEAR[dtype])
            assert torch.equal(values[1 + row, :, slot].double(), x[row, token, -kv_heads:])
        assert not keys[0].any()
        assert int(values[1:3].any(-1).sum()) == batch * n * kv_heads


def attention() -> None:
    """Grouped heads over one and several chunks: causal, in a window, and as random masks show."""
    kinds = ((40, None, False), (600, None, False), (600, 37, False), (600, None, True), (9000, 300, True))
    for dtype, (slots, window, masked) in itertools.product(NEAR, kinds):
        if dtype != torch.float32 and slots == 9000:
            continue
        batch, n, group, kv_heads, dim = (1, 2, 2, 1, 16) if slots == 9000 else (2, 3, 4, 2, 24)
        torch.manual_seed(slots)
        q = torch.randn(batch * kv_heads, group, n, dim).to(dtype)
        keys, values = (torch.randn(batch + 1, kv_heads, slots + 16, dim).to(dtype) for _ in range(2))
        own = torch.tensor([[slots - 5, slots - 4, slots - 3], [slots // 3, slots // 3 + 1, 3]])[
            :batch, :n
        ].contiguous()
        kv_len, number = slots - (2 if masked else 0), torch.arange(slots)
        seen = number <= own[..., None]
        seen &= number > own[..., None] - (window or slots)
        if masked:
            seen &= torch.rand(seen.shape) < 0.5
            seen[..., 0] = True
            seen = seen[..., :kv_len].contiguous()
        out = torch.empty(batch * n, kv_heads * group * dim, dtype=dtype)

        def attend(q: Tensor, own: Tensor, mask: Tensor | None, out: Tensor) -> Tensor:
            decode_attention(
                q, (keys, values), own, out, scaling=0.2, kv_len=kv_len, mask=mask,
                window=None if masked else window, first_row=1,
            )  # fmt: skip
            return out

        attend(q, own, seen if masked else None, out)
        k, v = (t[1:, :, :kv_len].double() for t in (keys, values))
        scores = torch.einsum("bhgnd,bhsd->bhgns", q.view(batch, kv_heads, group, n, dim).double(), k) * 0.2
        weights = scores.masked_fill(~seen[:, None, None, :, :kv_len], -torch.inf).softmax(-1)
        exact = torch.einsum("bhgns,bhsd->bnhgd", weights, v).reshape(out.shape)
        near(out, exact, NEAR[dtype])
        alone = out.new_empty(1, out.shape[1])  # the first token, without the others and their larger slots
        first = q.view(batch, kv_heads, group, n, dim)[:1, :, :, :1].reshape(kv_heads, group, 1, dim)
        attend(first.contiguous(), own[:1, :1].contiguous(), seen[:1, :1].contiguous() if masked else None, alone)
        near(alone, exact[:1], NEAR[dtype])
        if batch > 1:  # padding reads no chunk that others do not need
            padded, seen_ones, again = own.clone(), seen if masked else None, torch.empty_like(out)
            padded[1, 2] = slots
            keys[2, :, 256 * (1 + slots // 3 // 256) :] = torch.nan
            attend(q, padded, seen_ones, again)
            assert torch.equal(again[3:5], out[3:5])
            assert again[5].isfinite().all()


def passes(models: dict, dtype: torch.dtype, error: float, *, joined: bool = False) -> None:
    """Whole passes against the eager runner's, beside each other: chains, trees and two rows, eagerly and recorded."""
    for name, config in models.items():
        config = copy.deepcopy(config)
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        model = tiny(config, dtype=dtype)
        if joined:
            join_all_(model)
        os.environ["SELFSPEC_TRITON"] = "0"
        theirs = LeanRuntime(model, rows=2)
        assert not theirs._eager_runner.reads_lengths
        os.environ["SELFSPEC_TRITON"] = "1"
        for recorder in (None, Rerun()):
            ours = LeanRuntime(model, rows=2, recorder=recorder)
            assert ours._eager_runner.reads_lengths, name
            _compare(ours, theirs, tokens_for(model, rows=2, n=80), error)
            if recorder is not None:
                assert recorder.recorded == 5, (name, recorder.recorded)  # one a shape, whatever the length


def _compare(ours: Runtime, theirs: Runtime, tokens: Tensor, error: float) -> None:
    chance = random.Random(0)
    with ours.session(100), theirs.session(100):
        assert ours._eager_runner.reads_lengths != theirs._eager_runner.reads_lengths
        start = 0
        for width in (70, 1, 3, 1):  # the first is too wide for the kernels
            both = [one.forward(tokens[:, start : start + width], start).logits for one in (ours, theirs)]
            near(*both, error)
            start += width
        for rows in ([0], [1], [0, 1]):
            tree = random_tree(chance, 4)
            draft = Draft(tuple(token % 11 for token in tree.tokens), tree.parents, None, tree.q_row)
            placed = [PlacedDraft(row, 3, start + row, draft) for row in rows]
            steps = [one.forward_drafts(placed) for one in (ours, theirs)]
            for one, other in zip(*steps, strict=True):
                near(one.logits, other.logits, error)


def passes_in_float32() -> None:
    """Every variety of RoPE, heads, biases and windows that the kernels support."""
    window = MistralConfig(**SIZES, sliding_window=16)
    some = {name: CONFIGS[name] for name in ("llama-biases",)}
    others = {name: FAMILY_CONFIGS[name] for name in ("gpt_neox", "cohere2")}
    passes({**some, "window": window, **others}, torch.float32, 1e-4)


def passes_in_bfloat16() -> None:
    """With joined weights, so that all fused kernels run."""
    passes(
        {"llama": CONFIGS["llama"], "window": MistralConfig(**SIZES, sliding_window=16)},
        torch.bfloat16,
        0.08,
        joined=True,
    )


def draft_paths() -> None:
    """Quantised and skipped sub-layers, with a quantised head, against the dequantised weights."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
    model = tiny(type(CONFIGS["llama"])(**sizes), dtype=torch.float32)
    join_all_(model)
    modes = ["int4", "int8", "skip", "full", "int8", "int4", "int4", "int8"]
    path = DraftPath.from_modes(modes, head="int8")
    ours, theirs = (LeanRuntime(model, kernel=kernel) for kernel in (triton, fake))
    tokens = tokens_for(model, n=12)
    with ours.session(32), theirs.session(32):
        for start, width in ((0, 8), (8, 1), (9, 3)):
            both = [
                one.forward(tokens[:, start : start + width], start, path=one.compile(path)).logits
                for one in (ours, theirs)
            ]
            near(*both, 1e-4)


def rounds() -> None:
    """Texts of rounds on the device, whose passes read the number of keys there, and of plain decoding.

    Of one sequence, with chains and with trees, and of three in four cache rows that end at different times.
    """
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    os.environ["SELFSPEC_DEVICE_ROUND"] = "0"
    host = LeanRuntime(model)
    os.environ["SELFSPEC_DEVICE_ROUND"] = "1"
    recorder = Rerun()
    device = LeanRuntime(model, recorder=recorder)
    trees = {"candidates": 2, "proposer_chain": ProposerChain([Lookup()])}
    for temperature, drafting in itertools.product((0.0, 0.7), ({}, trees)):
        drafter = LayerSkipDrafter(device, DraftPath.from_modes(["full", "skip"] * 4), FixedK(2), **drafting)
        ours, theirs = (
            run(one, by, [1, 2, 3, 1, 2], 9, sampler=Sampler(temperature=temperature, seed=1 if temperature else None))[
                0
            ]
            for one, by in ((device, drafter), (host, PlainDrafter()))
        )
        assert ours == theirs, (ours, theirs)
    assert recorder.recorded == 4, recorder.recorded
    device = LeanRuntime(model, recorder=recorder, rows=4)
    prompts, rooms = ([1, 2, 3], [4, 5], [6, 7, 8, 9]), (9, 3, 6)
    seqs = [SequenceState(list(prompt), room, Sampler()) for prompt, room in zip(prompts, rooms, strict=True)]
    with Engine(device, LayerSkipDrafter(device, DraftPath.from_modes(["full", "skip"] * 4), FixedK(2))) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            engine.step()
    for seq, prompt, room in zip(seqs, prompts, rooms, strict=True):
        assert seq.tokens[len(prompt) :] == run(host, PlainDrafter(), prompt, room)[0]
    assert {key.batch for made in device.device_rounds._made.values() for key in made} >= {1, 4}


class Nodes(TorchDispatchMode):
    """Counts what would be nodes of a graph: kernels, and torch's operations that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._within = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        views = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in given for t in made)
        self.count += not (self._within or views or "empty" in name)
        return out

    def launch(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        self.count, self._within = self.count + 1, True
        LAUNCH(executor, *args, **kwargs)
        self._within = False


LAUNCH = GridExecutor.__call__


class Counted(Unreplayed):
    """A recorder that counts the nodes of what it is to record."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def record(self, body: Callable, pool: object) -> tuple:
        counting = Nodes()
        GridExecutor.__call__ = lambda executor, *args, **kwargs: counting.launch(executor, *args, **kwargs)
        with counting:
            result = body()
        GridExecutor.__call__ = LAUNCH
        self.nodes.append(counting.count)
        return result, lambda: None


def of_layers(layers: int) -> object:
    """A LLaMA with `layers` layers, its weights joined."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers = layers
    model = tiny(config, dtype=torch.bfloat16)
    join_all_(model)
    return model


def nodes() -> None:
    """A layer of a captured pass over one or several tokens is nine kernels, and nothing else."""
    counts = {}
    for layers in (2, 3):
        model = of_layers(layers)
        for width in (1, 3):
            recorder = Counted()
            runtime = LeanRuntime(model, recorder=recorder)
            with runtime.session(20):
                runtime.forward(torch.ones(1, width, dtype=torch.long), 0)
            counts[layers, width] = recorder.nodes
    assert counts == {(layers, width): [9 * layers + 5] for layers in (2, 3) for width in (1, 3)}, counts


def nodes_of_a_round() -> None:
    """A layer of a round on the device is nine kernels for each draft step and for verification.

    Everything else, a pass's own five nodes included, is within `OTHER_NODES`: once, and for each draft step. A tree
    adds at most `TREE_NODES`, and nothing to a layer.
    """
    os.environ["SELFSPEC_DEVICE_ROUND"] = "1"
    chains, (lookup, both) = ((0.0, 0, ()), (0.0, 2, ()), (0.0, 4, ()), (0.7, 4, ())), TREES
    shapes = (*chains, (0.0, 4, lookup), (0.7, 4, both))
    for count, (temperature, length, tree) in itertools.product((1, 3), shapes):
        others = set()
        for layers in (2, 3):
            recorder = Counted()
            runtime = LeanRuntime(of_layers(layers), recorder=recorder, rows=4)
            sampler = Sampler(temperature=temperature, seed=1 if temperature else None)
            seqs = [SequenceState([1, 2, 3], 9, sampler, row=row) for row in range(count)]
            full, stopping = runtime.compile(FULL), AdaptiveThreshold().stopping(LENGTHS[-1])
            with runtime.session(40):
                plan = RoundPlan(length, full, [stopping] * count)._replace(**dict(tree))
                runtime.device_rounds.launch(seqs, plan, None)
            others.add(recorder.nodes[0] - 9 * layers * (1 + length))
        (other,) = others  # the same, however many layers there are
        once, each = OTHER_NODES[temperature > 0]
        more = TREE_NODES if tree else 0
        assert other <= once + length * each + more, (count, temperature, length, tree, other)


OTHER_NODES = {False: (54, 10), True: (62, 16)}  # greedily, and with tied noise
TREE_NODES = 75  # more in a round that verifies a tree of 16 rows
TREES = ((("lookup", 11),), (("candidates", 2), ("lookup", 7)))


CASES = (
    nodes, nodes_of_a_round, rounds,
    current_devices,
    products, rows_among_others, many_rows, norms, rope, attention, passes_in_float32, passes_in_bfloat16, draft_paths,
)  # fmt: skip


def main() -> None:
    """Run the cases that are named, or all, and print {name: traceback or None} as JSON."""
    torch.set_num_threads(1)
    found: dict[str, str | None] = {}
    for case in CASES:
        if not sys.argv[1:] or case.__name__ in sys.argv[1:]:
            with torch.inference_mode():
                try:
                    found[case.__name__] = case()
                except Exception:
                    found[case.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
