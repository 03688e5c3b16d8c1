"""The built-in model with adapters that change what it says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from selfspec import builtin


def adapted(seed: int) -> Any:
    """With low-rank changes to its attention and its down projections."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(str(builtin.model_folder()), dtype=torch.float32)
    changed = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, changed).eval()
