"""Every pass on a pretended CUDA device: shapes, dtypes and devices are checked by torch, nothing is computed.

A tensor that was left on the host, a value that a pass reads, or a product that refuses its operands fails here as on a
GPU. torch's CUDA builds can do this without a GPU, its CPU builds cannot.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from measuring import Part
from subjects import paths
from tape import Unreplayed
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.models.kernels import ON_CUDA
from selfspec.models.layout import join_all_
from selfspec.models.low_precision import QuantizedWeight
from selfspec.runtime.forward import LeanRuntime

part = Part("fake")
if torch.version.cuda is None:
    part.line("fake device", said="torch is not a CUDA build: left out")
    sys.exit(0)
device = torch.device("cuda", 0)
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2,
    vocab_size=512, max_position_embeddings=1024,
)  # fmt: skip


def kernel(weight: QuantizedWeight, dtype: torch.dtype):
    return ON_CUDA[8 if weight.zero is None else 4][name if weight.zero is None else "weights only"](weight, dtype)


def tokens(n: int) -> torch.Tensor:
    return torch.ones(1, n, dtype=torch.long, device=device)


def take_pretended(*modules: ModuleType) -> None:
    """Let weights that hold no values count as weights; else none is quantised, and all paths run in full."""
    for module in modules:
        for name, stand_in in STAND_INS.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)


STAND_INS = {
    "is_dense": lambda weight: isinstance(weight, torch.Tensor),
    "joined_tensor": lambda parts: torch.cat(list(parts)),
    "_fingerprint": lambda parts: None,
}
take_pretended(*[module for name, module in sys.modules.items() if name.startswith("selfspec.models")])

for dtype in (torch.bfloat16, torch.float16):
    for name in ON_CUDA[8]:
        with FakeTensorMode():
            with device:
                model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
            join_all_(model)
            runtime = LeanRuntime(model, kernel=kernel, recorder=Unreplayed())
            with runtime.session(64):
                for label, path in {"plain": None, **paths(runtime.layers)}.items():
                    compiled = None if path is None else runtime.compile(path)
                    assert compiled is None or not compiled.unquantized, compiled.unquantized
                    about = {"dtype": str(dtype).removeprefix("torch."), "int8": name, "path": label}
                    runtime.forward(tokens(20), 0, logits="last", path=compiled)
                    for n in (1, 3, 8):
                        for position in (20, 21, 22):
                            logits = runtime.forward(tokens(n), position, path=compiled).logits
                            assert logits.device == device
                    part.line("fake device", said="passed", **about)
