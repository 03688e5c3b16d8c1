"""A model that two processes share, as torchrun starts them: every text is plain decoding's of the whole model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import parallel
import pytest
import torch.distributed as dist
from models import SIZES, tiny
from transformers import AutoTokenizer, LlamaConfig

import selfspec
from selfspec import builtin
from selfspec.cli import main
from selfspec.models.shards import parallel_options
from selfspec.types.identity import Identity

SECONDS = 240  # after which processes that wait for each other are taken to do so for ever
pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo"),
    pytest.mark.long("torchrun"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model with biases, whose vocabulary cannot be halved."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {**SIZES, "num_hidden_layers": 3, "vocab_size": 4097}
    tiny(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin.model_folder()).save_pretrained(folder)
    return folder


def launched(*arguments: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What two processes of a command come to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def found(model):
    """What `parallel` wrote, of all ways at once: to start two processes takes longer than they do."""
    out = model / "out.json"
    done = launched(parallel.__file__, model, out)
    assert out.exists(), done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("compiled", parallel.WAYS)
def test_texts_are_those_of_plain_decoding_in_one_process(found, compiled):
    assert found[compiled]
    for got, want in found[compiled]:
        assert got == want


def test_sequences_were_broken_off_and_others_were_not(found):
    for compiled in ("broken off", "joining and leaving"):
        lengths = {len(got) for got, _ in found[compiled]}
        assert min(lengths) < parallel.NEW == max(lengths)


def test_each_process_holds_half_of_the_heads(found):
    assert found["sizes"] == [2, 4]


def test_what_reads_whole_weights_is_refused_by_name(found):
    search, hf, trained, embedding = found["refused"]
    assert "a search is not supported in tensor parallel" in search
    assert "selfspec.hf is not supported in tensor parallel" in hf
    assert "trained weights are not supported in tensor parallel" in trained
    assert "the embedding is sharded" in embedding


def test_the_first_process_says_that_the_other_is_gone(found):
    assert found["lost"].startswith("tensor parallel: a pass was interrupted, so the processes are out of step")


def test_the_other_process_says_that_the_first_is_gone(model):
    """And a model that was loaded so by the user is wrapped."""
    code = "import os, selfspec, sys\n" + (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, DistributedConfig\n"
        "shared = {'distributed_config': DistributedConfig(tp_size=2)}\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='float64', **shared)\n"
        "llm = selfspec.wrap(model.eval(), AutoTokenizer.from_pretrained(sys.argv[1]), profile='none')\n"
        "found = llm.generate('x', max_new_tokens=4)\n"
        "print(*found.tokens, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model)],
            env={**os.environ, **told, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    (tokens, first), (nothing, second) = [one.communicate(timeout=SECONDS) for one in both]
    whole = selfspec.load(str(model), dtype="float64", profile="none").generate("x", max_new_tokens=4)
    assert both[0].returncode == -9, first
    assert list(map(int, tokens.split())) == whole.tokens
    assert (both[1].returncode, nothing) == (1, "")
    assert "SelfspecError: process 1 has lost the other tensor parallel processes" in second


def test_the_command_reads_and_prints_once(model):
    arguments = ("--model", str(model), "--dtype", "float64", "--profile", "none", "--max-new-tokens", "8")
    prompt = "def main(args):\n"
    done = launched("-m", "selfspec", "generate", "--tensor-parallel", *arguments, given=prompt)
    whole = selfspec.load(str(model), dtype="float64", profile="none").generate(prompt, max_new_tokens=8)
    assert (done.returncode, done.stdout.removesuffix("\n")) == (0, whole.text), done.stderr


def test_without_torchrun_one_line_says_how(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["selfspec", "generate", "--tensor-parallel", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.fullmatch(r"error: tensor parallel: .*torchrun --nproc-per-node 2 .*\n", capsys.readouterr().err)
    with pytest.raises(selfspec.SelfspecError, match="torchrun"):
        selfspec.load("builtin", tensor_parallel=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--compare",), "--compare loads the model more than once"),
        (("--device", "cpu"), "with a device or device map: expected neither"),
        (("--model", "smollm2-135m.gguf"), "no such file"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_loading(monkeypatch, capsys, options, match):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["selfspec", "generate", "--tensor-parallel", *options, "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


def test_heads_that_cannot_be_shared_out_are_refused():
    for sizes, kind in (({"heads": 9, "kv_heads": 3}, "9 query"), ({"heads": 8, "kv_heads": 1}, "1 key-value")):
        with pytest.raises(selfspec.SelfspecError, match=f"{kind} heads cannot be shared out among 2 processes"):
            parallel_options(Identity(layers=2, **sizes), 2)


def free_port() -> int:
    """A port that nobody listens at."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
