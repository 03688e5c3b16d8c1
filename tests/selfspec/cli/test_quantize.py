"""`selfspec quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import selfspec.search.quantizing as quantizing

from selfspec.draft_modules.module_files import read_part
from selfspec.profile.reading import read_profile

FEW = ["--num-prompts", "3", "--max-new-tokens", "9", "--threads", "1"]


def test_weights_and_a_profile_that_uses_them(cli):
    code, out, err = cli("quantize", "--out", "w.safetensors", "--group", 32, *FEW, "--json")
    told = json.loads(out)
    assert not code
    assert (told["method"], told["group"], told["texts"]["count"]) == ("gptq", 32, 3)
    assert (told["weights"], told["profile"]) == ("w.safetensors", "w.yaml")
    assert {name: told[name] for name in ("method", "group", "seed", "texts")} == read_part(
        Path("w.safetensors")
    ).settings
    assert "saved w.safetensors: gptq, groups of 32, from 3 texts of together" in err
    assert "use it with: selfspec generate --profile w.yaml 'your prompt'" in err
    profile = read_profile(Path("w.yaml"))
    assert "32 sub-layers in int4, the head in int8" in profile.draft.summary
    assert not Path("w.safetensors.layers").exists()
    plain = cli("generate", "--profile", "none", "--max-new-tokens", "24", "def read(")[1]
    assert cli("generate", "--profile", "w.yaml", "--max-new-tokens", "24", "def read(")[1] == plain


def test_the_default_is_gptq(cli):
    assert not cli("quantize", *FEW)[0]
    assert read_part(Path("int4.safetensors")).settings["method"] == "gptq"
    assert not cli("quantize", "--int4", "nearest", "--out", "n.safetensors")[0]
    assert read_part(Path("n.safetensors")).settings["texts"]["count"] == 0


def test_a_profile_with_int4_sub_layers_gets_the_weights(cli):
    draft = "{kind: layer-skip, skip: {mlp: [3]}, int4: {attention: [1], mlp: [1, 2]}}"
    Path("p.yaml").write_text(f"version: 2\nmodel: {{layers: 16, name: builtin}}\ndraft: {draft}\n")
    assert not cli("quantize", "--profile", "p.yaml", "--int4", "nearest", "--out", "w.safetensors")[0]
    profile = read_profile(Path("w.yaml"))
    assert (profile.draft.int4_weights, profile.skip_set.mlp) == ("int4", (3,))
    assert profile.path == read_profile(Path("p.yaml")).path


def test_weights_are_replaced_and_no_other_file(cli):
    again = ["quantize", "--int4", "nearest", "--out", "w.safetensors"]
    assert not cli(*again)[0]
    assert not cli(*again)[0]
    other = Path("model.safetensors")
    other.write_bytes(b"weights")
    code, out, err = cli(*again[:-1], other)
    assert (code, out) == (2, "")
    assert "--out model.safetensors is a file without int4 weights of selfspec; expected another path" in err
    assert other.read_bytes() == b"weights"
    assert "--out .: expected a file whose name ends in .safetensors" in cli(*again[:-1], ".")[2]
    Path("profile.yaml").write_text("mine")
    code, out, err = cli(*again[:-1], "profile.safetensors")
    assert (code, out) == (2, "")
    assert "--out profile.safetensors: the weights' profile would replace profile.yaml" in err
    assert Path("profile.yaml").read_text() == "mine"


def test_an_interrupted_call_is_resumed(cli, monkeypatch):
    """With the same texts, from the layers that were finished."""
    write, continued = quantizing.write_int4, []

    def interrupted(*args, on_layer, **kw):
        def stop(done):
            if done == 5:
                raise KeyboardInterrupt
            return on_layer(done)

        return write(*args, on_layer=stop, **kw)

    monkeypatch.setattr(quantizing, "write_int4", interrupted)
    code, _, err = cli("quantize", *FEW)
    assert code == 130
    assert "to resume, run the same command again: selfspec quantize --num-prompts 3" in err
    assert len(list(Path("int4.safetensors.layers").glob("*.safetensors"))) == 5
    counts = []

    def watched(*args, on_layer, **kw):
        return write(*args, on_layer=lambda done: counts.append(done) or on_layer(done), **kw)

    monkeypatch.setattr(quantizing, "write_int4", watched)
    monkeypatch.setattr(quantizing, "continue_prompts", lambda *_, **__: continued.append(1))
    assert not cli("quantize", *FEW)[0]
    assert counts == list(range(6, 17))
    assert not continued


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--out", "w.bin"], "error: --out w.bin: expected a file whose name ends in .safetensors"),
        (["--int4", "awq"], "error: method 'awq' is not known; known: auto, nearest, weighted, gptq"),
        (["--group", "48"], "error: group 48: expected 64 or 32"),
        (["--out", "no/w.safetensors"], "the folder no does not exist"),
        (["--profile", "stdlib-llama-3.7m", *FEW], "error: the profile's draft path has no sub-layer in int4"),
        (["--minutes", "0"], "error: minutes 0.0: expected more than 0, and finite"),
        (["--temperature", "inf"], "error: temperature inf: expected 0 or more, and finite"),
    ],
)
def test_bad_input_is_one_line(cli, args, told):
    code, _, err = cli("quantize", *args)
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_a_wrong_file_is_one_line(cli):
    assert not cli("quantize", "--int4", "nearest", "--out", "w.safetensors")[0]
    Path("w.safetensors").write_bytes(b"something else")
    code, _, err = cli("generate", "--profile", "w.yaml", "hello")
    assert code == 2
    assert "part 'int4': w.safetensors is another file than the profile was made with" in err
    code, _, err = cli("search", "--int4", "w.safetensors", "--trials", "1")
    assert code == 2
    assert "w.safetensors: no trained part can be read from it" in err
