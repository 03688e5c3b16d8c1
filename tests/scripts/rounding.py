"""Agreement of int4 drafts with the full model, for each quantiser of weights.

    python tests/scripts/rounding.py --model smollm2-135m --shift 16

The model continues calibration prompts by sampling; the quantisers read the linears' inputs on these texts. It
continues held-out prompts greedily. At each position of these texts, the draft reads the model's keys, and its own
keys for the last four tokens. Printed are the share of positions where draft and model have the same best token, the
means of 1 - TV at temperature 0.8 and of the KL divergence, how well the probability of the draft's best token tells
right ones from wrong ones (the area under the ROC curve), and the processor seconds of quantising. All attention and
MLP linears are in int4, the head in int8.

`--shift`: the number of inputs by which groups are shifted. A model whose weights come from a 4-bit file loses
nothing on that file's own groups, so its figures would be too good; shift by half the file's group size.

`--weights`: folders of the same model whose linears another library has quantised and dequantised. These are measured,
on the same texts, instead of the quantisers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import built_in
import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.replay_state import TargetText
from sklearn.metrics import roc_auc_score
from torch import Tensor

import selfspec
from selfspec.draft_modules import int4_quantization
from selfspec.llm.prompt_encoding import fit_prompt, takes_messages
from selfspec.models.low_precision import QuantizedWeight, fake
from selfspec.models.quantizers import InputMoments, quantize_int4
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.text.prompt_files import read_prompts
from selfspec.types.draft_path import DraftPath

OWN = 4  # tokens whose keys are the draft's own
FEW = 8  # texts of the small calibration
WAYS = [("nearest", 64), ("nearest", 32), ("weighted", 64), ("weighted", 32), ("gptq", 64), ("gptq", 32)]


class Shifted(QuantizedWeight):
    """A weight that was quantised with its inputs rolled by `by`."""

    by = 0

    def weight(self, dtype: torch.dtype) -> Tensor:
        return QuantizedWeight.weight(self, dtype).roll(-Shifted.by, 1)


def shifted(weight: Tensor, method: str, moments: InputMoments | None = None, *, group: int) -> QuantizedWeight:
    by = Shifted.by
    if moments is not None:
        products = None if moments.products is None else moments.products.roll((by, by), (0, 1))
        moments = InputMoments(moments.squares.roll(by), products, moments.count)
    made = quantize_int4(weight.roll(by, 1), method, moments, group=group)  # type: ignore[arg-type]
    return Shifted(4, made.values, made.scale, made.zero)


class Dequantized(QuantizedWeight):
    """A weight that another library quantised: `values` are its dequantised weights."""

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


@dataclass
class InMemory:
    """Int4 weights by layer and group."""

    weights: dict[tuple[int, int], QuantizedWeight] = field(default_factory=dict)

    def get(self, layer: int, group: int) -> QuantizedWeight | None:
        return self.weights.get((layer, group))

    def bytes(self, layer: int, group: int) -> int | None:
        weight = self.get(layer, group)
        return None if weight is None else weight.bytes


def quantised(llm: selfspec.LLM, method: str, group: int, texts: Sequence[Sequence[int]]) -> InMemory:
    made, layers = InMemory(), list(range(llm.runtime.layers))
    with mock.patch.object(int4_quantization, "quantize_int4", shifted):
        for layer, weights in int4_quantization._quantized_layers(
            llm.runtime, texts, {"method": method, "group": group}, layers
        ):
            made.weights |= {(layer, number): weight for number, weight in weights.items()}
    return made


def dequantized(folder: str) -> InMemory:
    """The weights of the linears of a model in a folder."""
    runtime, made = selfspec.load(folder, profile="none", dtype="float32").runtime, InMemory()
    for layer in range(runtime.layers):
        for number, group in runtime.skeleton.quantizer.int4_groups(layer).items():
            weight = torch.cat([module.weight.detach() for module in group.modules])
            made.weights[layer, number] = Dequantized(4, weight, weight.new_empty(0))
    return made


def agreement(runtime: Runtime, path: DraftPath, texts: Sequence[TargetText]) -> str:
    """The figures of one path, over all places of the texts."""
    compiled, shared, apart = runtime.compile(path), 0.0, 0.0
    right, confident = list[Tensor](), list[Tensor]()
    for text in texts:
        ids, n = torch.tensor([text.tokens]), len(text.tokens)
        starts = [s for s in range(text.prompt_length - 1, n - 1) if s >= OWN]
        slots = n + OWN * len(starts)
        with runtime.session(slots):
            whole = runtime.forward(ids, 0).logits[0]
            positions = torch.cat([torch.arange(s - OWN + 1, s + 1) for s in starts])[None]
            mask = torch.zeros(1, OWN * len(starts), slots, dtype=torch.bool)
            for row in range(OWN * len(starts)):
                number, behind = divmod(row, OWN)
                mask[0, row, : starts[number] - OWN + 1] = True
                mask[0, row, n + OWN * number : n + OWN * number + behind + 1] = True
            drafted = runtime.forward(
                ids[:, positions[0]], positions, path=compiled, slots=torch.arange(n, slots)[None], mask=mask
            ).logits[0, OWN - 1 :: OWN]
        target = whole[starts]
        right.append(target.argmax(-1) == drafted.argmax(-1))
        confident.append(drafted.softmax(-1).amax(-1))
        p, q = target.log_softmax(-1), drafted.log_softmax(-1)
        apart += float((p.exp() * (p - q)).sum())
        shared += float(torch.minimum((target / 0.8).softmax(-1), (drafted / 0.8).softmax(-1)).sum())
    same, places = torch.cat(right), sum(map(len, right))
    auc = roc_auc_score(same, torch.cat(confident))
    return (
        f"agree {same.float().mean():.3f}, 1 - TV {shared / places:.3f}, KL {apart / places:.4f}, AUC {auc:.2f}, "
        f"{places} places"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shift", type=int, default=0)
    parser.add_argument("--held-out", default=None, help="file of held-out prompts; built-in ones by default")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--weights", nargs="+", default=[], metavar="FOLDER", help="dequantised weights to measure")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    Shifted.by = given.shift
    llm = selfspec.load(given.model, profile="none", dtype="float32")
    held = built_in.prompts(llm, "heldout", given.prompts)
    if given.held_out is not None:
        texts = read_prompts(given.held_out).texts[: given.prompts]
        held = [llm.encode(fit_prompt(llm, text, 512, chat=takes_messages(llm))) for text in texts]
    answers = continue_prompts(llm, held, DecodingSettings(given.tokens))
    runtime, layers = LeanRuntime(llm.model, kernel=fake), llm.runtime.layers
    int8 = DraftPath.from_modes(["int8"] * (2 * layers), head="int8")
    print(f"int8: {agreement(runtime, int8, answers)}", flush=True)
    int4 = DraftPath.from_modes(["int4"] * (2 * layers), head="int8")
    for folder in given.weights:
        runtime.register_int4(folder, dequantized(folder))
        print(f"{folder}: {agreement(runtime, replace(int4, int4_weights=folder), answers)}", flush=True)
    if given.weights:
        return
    sources = built_in.prompts(llm, "calibration", given.texts)
    calibration = [text.tokens for text in continue_prompts(llm, sources, DecodingSettings(192, 0.8))]
    for method, group in WAYS:
        for texts in (calibration,) if method == "nearest" else (calibration[:FEW], calibration):
            begun = time.process_time()
            weights = quantised(llm, method, group, texts)
            seconds = time.process_time() - begun
            name = f"{method}, groups of {group}, {sum(map(len, texts)):,} tokens"
            runtime.register_int4(name, weights)
            found = agreement(runtime, replace(int4, int4_weights=name), answers)
            print(f"{name}: {found}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
