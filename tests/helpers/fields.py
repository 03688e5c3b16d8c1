"""Fields of a `GenerationConfig` that the package serves, and what it tells of a generation."""

from __future__ import annotations

from transformers import WatermarkingConfig

FIELDS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.05},
    {"repetition_penalty": 1.6},
    {"encoder_repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], [8, 9], [3, 1]]},
    {"sequence_bias": [[[7], 3.0], [[8, 9], -4.0]]},
    {"suppress_tokens": [10, 11, 12]},
    {"begin_suppress_tokens": [20, 21, 22]},
    {"forced_eos_token_id": 33, "eos_token_id": []},
    {"min_new_tokens": 6},
    {"min_length": 12},
    {"exponential_decay_length_penalty": [4, 1.5]},
    {"renormalize_logits": True},
    {"remove_invalid_values": True},
    {"watermarking_config": WatermarkingConfig(bias=2.5)},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "min_new_tokens": 4},
]
STATS = [
    "rounds",
    "drafted",
    "nodes",
    "accepted",
    "acceptance_rate",
    "tokens_per_round",
    "seconds",
    "tokens_per_second",
    "work",
    "sources",
    "finish",
]
"""The keys of `Stats.as_dict`, in order."""
