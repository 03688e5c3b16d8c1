"""The peak memory of commands that measure, on a model whose vocabulary holds most of its weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from selfspec.builtin import model_folder

RUN = """
import resource, sys
import torch, transformers
torch.set_num_threads(1)
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
imported = peak()
from selfspec.cli import main
sys.argv = ["selfspec", *sys.argv[1:]]
try:
    main()
finally:
    print("grown by", peak() - imported)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A random model of about 350 MB with the built-in model's tokenizer, and its bytes."""
    path = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    sizes = {"hidden_size": 640, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=60_000, num_hidden_layers=6, head_dim=160, max_position_embeddings=32768, **sizes)
    )
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(path)
    return path, sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.long("a model of 350 MB")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in kilobytes on Linux")
@pytest.mark.parametrize(
    "command",
    [
        ["search", "--modes", "full,int8,int4,skip", "--minutes", "0.3", "--max-new-tokens", "16"],
        ["bench", "--methods", "plain,profile,hf", "--num-prompts", "1", "--rounds", "1", "--max-new-tokens", "4"],
    ],
    ids=lambda command: command[0],
)
def test_the_peak_beyond_imports_is_at_most_three_times_the_weights(large, command, tmp_path):
    path, weights = large
    words = [*command, "--model", str(path), "--out", str(tmp_path / "out.yaml")]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = int(done.stdout.rsplit("grown by", 1)[1])
    assert grown <= 3 * weights
