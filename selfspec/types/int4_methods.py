"""Names of the methods that quantise weights to int4; `selfspec.models.quantizers` implements them."""

from __future__ import annotations

from typing import Literal, get_args

Int4Method = Literal["nearest", "weighted", "gptq"]
METHODS: tuple[Int4Method, ...] = get_args(Int4Method)
AUTO = "auto"  # chosen by the amount of text
CHOICES = (AUTO, *METHODS)
GROUP_SIZES = (64, 32)
