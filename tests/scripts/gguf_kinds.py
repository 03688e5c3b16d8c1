"""Speed of a GGUF model kept in its bits, by type of its weights, beside llama.cpp and openvino-genai.

    python tests/scripts/gguf_kinds.py --folder build/kinds --llama-python ENV/python --openvino-python ENV/python

A Llama of 0.34 billion random weights, whose widths are multiples of 256 as K-quants need, with SmolLM2's tokenizer, is
written in float32; llama.cpp quantises it. Each engine decodes the same prompts greedily in a process of its own, in
turns. The table has tokens/s after the first token, and the time to the first token of a prompt of 256 tokens. Both
environments are as `tests/scripts/results/run.py` describes; llama.cpp's is needed, since it quantises.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "results"))

from decoders import FILE_TYPES  # type: ignore[import-not-found]  # noqa: E402
from run import Worker  # type: ignore[import-not-found]  # noqa: E402

from selfspec.models.hub_names import packaged_file  # noqa: E402

SIZES = {
    "block_count": 24,
    "embedding_length": 1024,
    "feed_forward_length": 3072,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
    "rope.dimension_count": 64,
}
PROMPT, NEW, ROUNDS = 256, 48, 3


def write_wide(source: Path, target: Path) -> None:
    """Write a random Llama of `SIZES` with the tokenizer and settings of `source`."""
    reader, draw = GGUFReader(source), np.random.default_rng(0)
    writer = GGUFWriter(str(target), "llama")
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, held in reader.fields.items():
        short = name.removeprefix("llama.")
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type") or "quantization" in name:
            continue
        if short in SIZES:
            writer.add_uint32(name, SIZES[short])
        elif held.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, held.contents())
        else:
            writer.add_key_value(name, held.contents(), held.types[0])
    d, inner, kv = SIZES["embedding_length"], SIZES["feed_forward_length"], 4 * 64
    layer = {
        "attn_q": (d, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, d),
        "ffn_gate": (inner, d),
        "ffn_up": (inner, d),
        "ffn_down": (d, inner),
    }
    words = len(reader.fields["tokenizer.ggml.tokens"].data)

    def add(name: str, *shape: int) -> None:
        values = (
            draw.standard_normal(shape, np.float32) * np.float32(0.02) if len(shape) > 1 else np.ones(shape, np.float32)
        )
        writer.add_tensor(f"{name}.weight", values)

    add("token_embd", words, d)
    add("output_norm", d)
    for i in range(SIZES["block_count"]):
        for name, shape in layer.items():
            add(f"blk.{i}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}", d)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def engines(file: Path, given: argparse.Namespace) -> dict[str, Worker]:
    """A process of each engine on this file; an engine that cannot read it is left out."""
    common: dict[str, Any] = {"threads": given.threads}
    ours = Worker(sys.executable, "selfspec", model=str(file), dtype="file", drafts={"selfspec": "plain"}, **common)
    found = {"selfspec": ours}
    peers = {"llama.cpp": given.llama_python, "openvino": given.openvino_python}
    for name, python in peers.items():
        if python:
            try:
                found[name] = Worker(python, name, file=str(file), name=name, context=PROMPT + NEW + 8, **common)
            except SystemExit as error:
                print(f"{file.name}: not read by {name} ({error})", file=sys.stderr)
    return found


def row(kind: str, file: Path, given: argparse.Namespace) -> str:
    """The table's row of a file."""
    workers, draw = engines(file, given), random.Random(0)
    after: dict[str, list[float]] = {name: [] for name in workers}
    first: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(ROUNDS + 1):
        ids = [draw.randrange(100, 40000) for _ in range(PROMPT)]
        for name, worker in workers.items():
            found = worker.ask(method=name, ids=ids, new=NEW, temperature=0.0)
            if turn:  # the first is a warm-up
                after[name].append((len(found["tokens"]) - 1) / (found["seconds"] - found["first"]))
                first[name].append(found["first"])
    for worker in workers.values():
        worker.close()
    cells = [kind, f"{file.stat().st_size / 1e6:.0f}"]
    for figures, unit in ((after, 1.0), (first, 1e3)):
        cells += [
            f"{statistics.median(figures[name]) * unit:.0f}" if name in figures else "-"
            for name in ("selfspec", "llama.cpp", "openvino")
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the files that are not there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--openvino-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=["F32", *FILE_TYPES])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    whole = given.folder / "F32.gguf"
    if not whole.exists():
        write_wide(packaged_file("smollm2-135m"), whole)
    print("| weights | file, MB | selfspec | llama.cpp | openvino | first token: selfspec | llama.cpp | openvino |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in given.kinds:
        file = given.folder / f"{kind}.gguf"
        if not file.exists():
            command = [
                given.llama_python,
                str(HERE / "results" / "decoders.py"),
                "quantise",
                str(whole),
                str(file),
                kind,
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(row(kind, file, given), flush=True)


if __name__ == "__main__":
    main()
