"""A quicker model, and costs that are told: searches are the same whatever the layers and the machine."""

from __future__ import annotations

from quick import llm as llm
from quick import llm64 as llm64
from quick import whole as whole
from told import costs_are_told as costs_are_told
