from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import command
import pytest
import torch
from builtin_model import on_builtin
from fields import STATS
from layouts import fastest, needs_native, seconds_by_rows
from models import CONFIGS, tiny
from selfspec.search.ledger import Ledger
from transformers import GenerationConfig
from wants import is_there, missing, needs

import selfspec
from selfspec import builtin
from selfspec.drafters import Guard
from selfspec.llm.options import Options
from selfspec.measure import audit
from selfspec.measure.bench import Benchmark
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import parse_profile, profile_schema, read_profile, write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.speculation.rules import RULES, Verdict
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import SkipSet
from selfspec.types.events import TokenEvent
from selfspec.types.identity import Identity
from selfspec.types.methods import FREE

SELFSPEC = str(Path(sys.executable).parent / "selfspec")
PROMPT = "import os\n\ndef main(args):\n    "
SHIPPED = "stdlib-llama-3.7m"
PUBLISHED = "llama-2-13b-swift-cnndm"


@pytest.fixture(autouse=True)
def brief_costs(monkeypatch):
    """Tests run side by side: the machine is always disturbed, and measuring costs for longer would not help."""
    monkeypatch.setattr("selfspec.measure.cost_fitting.DISTURBED_FACTOR", 1)


@pytest.fixture
def profile_file(tmp_path):
    profile = Profile(
        model=Identity(layers=16, name="builtin"),
        draft=LayerSkipSpec.from_path(SkipSet((3, 5, 9), (7, 11)), ControllerSpec(name="fixed", options={"k": 3})),
    )
    write_profile(profile, tmp_path / "p.yaml")
    return tmp_path / "p.yaml"


@pytest.fixture
def wrong_rule(monkeypatch):
    """Drafts are verified wrongly: another token follows them."""
    right = RULES["greedy"]

    def wrong(draft, scores, sampler, position):
        path, following, p = right(draft, scores, sampler, position)
        return Verdict(path, (following + 1) % 4096 if len(draft) else following, p)

    monkeypatch.setitem(RULES, "greedy", wrong)


def interrupted(warm, event, *args, cwd):
    """The command in a process of its own, in which Ctrl-C comes at an event of `command.EVENTS`.

    It reaches the process even where the tests run in the background of a shell, which has it ignored.
    """
    return subprocess.run(
        [warm.python, command.__file__, event, *on_builtin(args)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


class TestGenerate:
    def test_streams_the_text(self, cli, llm):
        code, out, err = cli("generate", PROMPT, "--max-new-tokens", 20, "--profile", "none")
        assert code == 0
        assert out == llm.generate(PROMPT, max_new_tokens=20).text + "\n"
        assert err == ""

    def test_reads_standard_input(self, cli, llm):
        code, out, _ = cli("generate", "--max-new-tokens", 5, stdin=PROMPT.encode())
        assert (code, out) == (0, llm.generate(PROMPT, max_new_tokens=5).text + "\n")

    @pytest.mark.parametrize("method", ["plain", "profile", "path", "early-exit", "model:builtin", *FREE])
    def test_any_method_gives_the_same_text(self, ran, llm, profile_file, method):
        profile = ("--profile", profile_file) if method in ("profile", "path") else ()
        found = json.loads(ran("generate", PROMPT, "--method", method, *profile, "--max-new-tokens", 20, "--json"))
        assert found["tokens"] == llm.generate(PROMPT, max_new_tokens=20).tokens
        assert (found["stats"]["drafted"] > 0) == (method != "plain")
        of_paths = dict.fromkeys(("profile", "path", "early-exit", "swift", "clasp"), "draft path")
        of_blocks = dict.fromkeys(("gauss-seidel", "hybrid-jacobi"), "jacobi")
        source = {**of_paths, **of_blocks, "model:builtin": "draft model"}.get(method, method)
        assert {name for name, count in found["stats"]["sources"].items() if count} <= {source}

    def test_json_is_one_object(self, ran, llm, profile_file):
        out = ran("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 20, "--json")
        data = json.loads(out)
        assert out.count("\n") == 1
        assert list(data) == ["text", "tokens", "finish", "stats"]
        assert data["tokens"] == llm.generate(PROMPT, max_new_tokens=20).tokens
        assert data["stats"]["drafted"] > 0
        assert list(data["stats"]) == STATS

    def test_chat(self, cli, llm, tmp_path, monkeypatch):
        """The prompt becomes a user's message, with or without drafting, streamed or not."""
        template = "# user:\n{{ messages[0]['content'] }}\n# assistant:"
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        llm.model.save_pretrained(tmp_path / "m")
        llm.tokenizer.save_pretrained(tmp_path / "m")
        expected = llm.generate(f"# user:\n{PROMPT}\n# assistant:", max_new_tokens=8)
        args = ("generate", PROMPT, "--model", "m", "--max-new-tokens", 8)
        assert json.loads(cli(*args, "--chat", "--json")[1])["tokens"] == expected.tokens
        assert cli(*args, "--chat")[1] == cli(*args, "--chat", "--profile", "none")[1] == expected.text + "\n"
        assert json.loads(cli(*args, "--json")[1])["tokens"] == llm.generate(PROMPT, max_new_tokens=8).tokens
        monkeypatch.setattr("selfspec.cli.generate.COMPARE_ROUNDS", 1)
        assert json.loads(cli(*args, "--chat", "--compare", "--json")[1])["tokens"] == expected.tokens

    def test_compare(self, cli, ran, profile_file):
        out = ran("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 12, "--compare")
        assert "identical output: yes" in out
        assert re.search(r" plain +drafted\n(.*\n)*.* first token +\d+ ms +\d+ ms\n(.*\n)*speedup: ", out)
        data = json.loads(
            ran("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 12, "--compare", "--json")
        )
        assert data["compare"]["identical"] is True
        assert data["compare"]["speedup"] > 0
        assert data["compare"]["plain"]["drafted"] == 0

    def test_compare_says_what_it_does_while_it_does_it(self, cli, profile_file):
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 8, "--compare")
        _, out, err = cli(*args)
        assert "warm-up" not in out
        assert [line.partition(":")[0] for line in err.splitlines()] == [
            "comparing plain decoding, drafts, transformers' generate; a warm-up and 3 runs of each ...",
            "warm-up, plain decoding",
            "warm-up, drafts",
            "warm-up, transformers' generate",
        ]
        assert cli(*args, "--quiet")[2] == ""

    def test_compare_names_the_first_difference(self, ran, profile_file, wrong_rule, monkeypatch):
        monkeypatch.setattr(Guard, "_to_spend", lambda self, timed: 1e9)  # drafts on any machine
        out = ran("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 20, "--compare")
        assert re.search(
            r"^identical output: no: a difference after \d+ tokens, a BUG, please report it \(the logits are \S+ "
            r"apart, rounding moves them by \S+\): .+ in plain decoding, .+ with drafts$",
            out,
            re.MULTILINE,
        )

    @pytest.mark.parametrize(("by_rows", "by_columns", "fastest_one"), [(2.0, 1.0, "columns"), (1.0, 2.0, "rows")])
    def test_speedups_are_over_the_fastest_plain_decoding(
        self, cli, profile_file, monkeypatch, by_rows, by_columns, fastest_one
    ):
        """Whichever weights were thought to suit it: here `rows`, and `columns` drafting."""
        held, compare = [], audit.compare
        monkeypatch.setattr("selfspec.models.layout.layout_times", lambda model: fastest("rows", "columns"))
        monkeypatch.setattr("selfspec.llm.llm.layout_times", lambda model: fastest("rows", "columns"))
        monkeypatch.setattr("selfspec.measure.cost_fitting.forward_seconds", seconds_by_rows(by_rows, by_columns))

        def note(llm, *args, plain_llm, **options):
            held.append((llm.layout, plain_llm.layout))
            return compare(llm, *args, plain_llm=plain_llm, **options)

        monkeypatch.setattr(audit, "compare", note)
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 4, "--compare")
        assert cli(*args)[0] == 0
        assert held == [("columns", fastest_one)]

    def test_stats_go_to_standard_error(self, cli):
        code, out, err = cli("generate", PROMPT, "--max-new-tokens", 4, "--stats")
        assert code == 0
        assert "tokens a pass" in err
        assert "tokens a pass" not in out

    @needs_native
    @pytest.mark.parametrize("layout", ["native", "rows"])
    def test_stats_say_where_float32_weights_are_held_in_16_bits(self, cli, auto, layout):
        """The built-in model's weights are bfloat16 numbers."""
        auto(layout)
        args = "generate", PROMPT, "--max-new-tokens", 4, "--stats", "--profile", "none", "--dtype", "float32"
        code, _, err = cli(*args)
        assert code == 0
        assert err.rstrip().endswith("; weights held in bfloat16, exactly") == (layout == "native")

    def test_the_controller_can_be_changed(self, cli, profile_file):
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 16, "--json")
        args += ("--temperature", 0.9, "--seed", 3)  # so that the guard reads no clock
        drafted = {k: json.loads(cli(*args, "--controller", f"fixed:k={k}")[1])["stats"]["drafted"] for k in (1, 8)}
        assert drafted[1] < drafted[8]

    def test_sampling_is_repeatable(self, cli, profile_file):
        args = ("generate", PROMPT, "--profile", profile_file, "--temperature", 0.9, "--top-k", 40, "--top-p", 0.9)
        first, again = (cli(*args, "--seed", 3, "--max-new-tokens", 12)[1] for _ in range(2))
        assert first == again

    def test_stop(self, cli, llm):
        whole = llm.generate(PROMPT, max_new_tokens=30).text
        _, out, _ = cli("generate", PROMPT, "--max-new-tokens", 30, "--stop", whole[12:16], "--stop", "zzz")
        assert out == whole[: whole.index(whole[12:16])] + "\n"

    def test_a_model_without_a_profile_says_how_to_search(self, cli, llm, tmp_path, capsys):
        folder = tmp_path / "other"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selfspec.profile.shipped, "shipped_profiles", dict)
            llm.model.save_pretrained(folder)
            llm.tokenizer.save_pretrained(folder)
            capsys.readouterr()
            code, _, err = cli("generate", PROMPT, "--model", folder, "--max-new-tokens", 2)
        assert code == 0
        assert err.startswith("no profile known: drafting with ")
        assert err.strip().endswith(f"; a faster one may be found by: selfspec search --model {folder}")

    def test_profile_none(self, cli):
        code, out, _ = cli("generate", PROMPT, "--profile", "none", "--json", "--max-new-tokens", 3)
        assert (code, json.loads(out)["stats"]["drafted"]) == (0, 0)

    def test_a_seed_gives_the_same_text_without_drafting(self, cli, profile_file):
        args = ("generate", PROMPT, "--temperature", 1.0, "--seed", 5, "--max-new-tokens", 20)
        assert cli(*args, "--profile", profile_file)[1] == cli(*args, "--profile", "none")[1]
        _, out, _ = cli(*args, "--profile", profile_file, "--compare")
        assert "identical output: yes" in out

    def test_a_generation_config(self, cli, llm, tmp_path, profile_file):
        """A file, its folder, or the checkpoint's own; other options and single fields go before it."""
        config = GenerationConfig(do_sample=True, temperature=0.9, top_k=5, repetition_penalty=1.3, max_new_tokens=9)
        config.save_pretrained(tmp_path / "own")
        args = ("generate", PROMPT, "--profile", profile_file, "--seed", 2, "--json")
        expected = llm.generate(PROMPT, config, seed=2).tokens
        for given in ("own", "own/generation_config.json"):
            assert json.loads(cli(*args, "--generation-config", given)[1])["tokens"] == expected
        assert len(json.loads(cli(*args, "--generation-config", "own", "--max-new-tokens", 4)[1])["tokens"]) == 4
        greedy = llm.generate(PROMPT, config, temperature=0.0).tokens
        assert json.loads(cli(*args, "--generation-config", "own", "--temperature", 0)[1])["tokens"] == greedy
        assert cli(*args, "--generation-config", "model", "--max-new-tokens", 3)[0] == 0
        single = ("--set", "repetition_penalty=1.3", "--set", "bad_words_ids=[[12], [13]]", "--max-new-tokens", 9)
        tokens = json.loads(cli(*args, *single)[1])["tokens"]
        settings = {"repetition_penalty": 1.3, "bad_words_ids": [[12], [13]]}
        assert tokens == llm.run(PROMPT, Options(max_new_tokens=9, settings=settings)).tokens
        assert not {12, 13} & {*tokens}

    def test_short_forms(self, cli, ran, llm):
        out = ran("generate", "-m", "builtin", "-p", PROMPT, "-n", 6, "-t", 1, "--profile", "none")
        assert out == llm.generate(PROMPT, max_new_tokens=6).text + "\n"
        code, _, err = cli("generate", PROMPT, "-p", PROMPT)
        assert code == 2
        assert "--prompt: given with a prompt as the argument; expected only one of the two" in err

    def test_options_of_settings(self, cli, llm):
        args = ("generate", PROMPT, "--profile", "none", "-n", 9, "--json")
        tokens = json.loads(cli(*args, "--repetition-penalty", 9)[1])["tokens"]
        assert tokens == llm.run(PROMPT, Options(max_new_tokens=9, settings={"repetition_penalty": 9.0})).tokens
        assert tokens != llm.generate(PROMPT, max_new_tokens=9).tokens
        sampled = json.loads(cli(*args, "--temperature", 5, "--seed", 1, "--min-p", 1)[1])["tokens"]
        assert sampled == llm.generate(PROMPT, max_new_tokens=9).tokens, "only the most probable token is left"
        assert "--min-p: no effect on greedy decoding" in cli(*args, "--min-p", 0.1)[2]
        code, _, err = cli(*args, "--min-p", 0.1, "--set", "min_p=0.2")
        assert code == 2
        assert "--set min_p and --min-p: expected only one of the two" in err

    @needs("llguidance", "llguidance")
    def test_guided(self, cli, tmp_path, profile_file):
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 20)
        _, out, _ = cli(*args, "--regex", "[0-9]{3}-[0-9]{2}")
        assert re.fullmatch(r"[0-9]{3}-[0-9]{2}\n", out)
        (tmp_path / "schema.json").write_text('{"enum": ["one", "two"]}')
        assert cli(*args, "--json-schema", "schema.json")[1] in ('"one"\n', '"two"\n')
        assert (
            "the text was cut before the guide was complete; give more --max-new-tokens"
            in cli(*args, "--regex", "[0-9]{200}")[2]
        )

    def test_a_text_that_ends_at_once(self, cli, llm):
        """As nothing else may come."""
        others = [token for token in range(llm.identity.vocabulary) if token not in llm.runtime.skeleton.ends]
        _, out, err = cli("generate", PROMPT, "--set", f"suppress_tokens={others}")
        assert out == "\n"
        assert "the model ended the text at once; an instruct model needs --chat" in err

    @pytest.mark.parametrize("rule", ["match", "block", "token"])
    def test_a_rule(self, cli, profile_file, rule):
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 8, "--temperature", 1, "--seed", 1)
        first, again = (cli(*args, "--rule", rule) for _ in range(2))
        assert first[0] == 0
        assert first[1] == again[1]

    def test_options_without_effect_are_said(self, cli):
        code, _, err = cli("generate", PROMPT, "--max-new-tokens", 2, "--profile", "none", "--seed", 1, "--top-p", 0.5)
        assert code == 0
        assert err == "--seed, --top-p: no effect on greedy decoding; --temperature above 0 samples\n"

    def test_small_numbers_are_numbers(self, cli):
        args = ("generate", PROMPT, "--max-new-tokens", 2, "--temperature", 1, "--set", "epsilon_cutoff=3e-4")
        assert cli(*args)[0] == 0

    def test_colour_changes_nothing_where_it_is_piped(self, cli, profile_file, monkeypatch):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        args = (
            "generate",
            PROMPT,
            "--profile",
            profile_file,
            "--max-new-tokens",
            16,
            "--temperature",
            0.9,
            "--seed",
            3,
        )
        _, out, err = cli(*args)
        assert err == ""
        code, colored, err = cli(*args, "--color", "--stats")
        assert (code, colored) == (0, out)
        *origins, accepted, stats = err.splitlines()
        counts = {line[:16].rstrip(): int(line[16:].split()[0]) for line in origins}
        assert counts["plain"] >= 1  # the first
        assert sum(counts.values()) == 16
        total = counts.get("accepted draft", 0)
        assert re.fullmatch(rf"acceptance \d+% \({total} of \d+ drafted\)", accepted)
        assert stats.startswith("16 tokens in ")

    def test_colour_in_a_terminal(self, cli, profile_file, monkeypatch):
        args = (
            "generate",
            PROMPT,
            "--profile",
            profile_file,
            "--max-new-tokens",
            16,
            "--temperature",
            0.9,
            "--seed",
            3,
        )
        out = cli(*args)[1]
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLUMNS", "40")):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)
        colored = cli(*args, "--color")[1]
        assert "\x1b[1;38;5;" in colored  # corrected, which some are
        assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == out
        monkeypatch.setenv("NO_COLOR", "1")
        assert {*re.findall(r"\x1b\[([0-9;]*)m", cli(*args, "--color")[1])} <= {"0", "1", "3", "1;3"}

    def test_events_as_json(self, cli, profile_file, monkeypatch):
        monkeypatch.setattr("selfspec.cli.generate.COMPARE_ROUNDS", 1)
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 8, "--json", "--color")
        data = json.loads(cli(*args)[1])
        assert list(data) == ["text", "tokens", "finish", "stats", "events"]
        assert [event["token"] for event in data["events"]] == data["tokens"]
        assert "".join(event["text"] for event in data["events"]) == data["text"]
        assert all(0 < event["probability"] < 1 for event in data["events"])
        assert list(data["events"][0]) == [field.name for field in dataclasses.fields(TokenEvent)]
        compared = json.loads(cli(*args, "--compare")[1])
        assert [event["token"] for event in compared["events"]] == data["tokens"]
        assert {event["probability"] for event in compared["events"]} == {None}  # it would take time

    def test_compare_in_colour(self, cli, profile_file, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        args = ("generate", PROMPT, "--profile", profile_file, "--max-new-tokens", 8, "--seed", 1)
        monkeypatch.setattr("selfspec.cli.generate.COMPARE_ROUNDS", 1)
        code, out, err = cli(*args, "--temperature", 0.9, "--compare", "--color")
        assert code == 0
        assert re.search(r"\x1b\[[134;]+;38;[25];[\d;]+m", out)  # rich remembers a style as it was first shown
        assert "acceptance" in err


class TestAudit:
    def test_float64_has_no_difference(self, ran):
        out = ran("audit", "--profile", SHIPPED, "--dtype", "float64", "--num-prompts", 2, "--max-new-tokens", 12)
        skipped = len(find_profile_file(SHIPPED).skip_set)
        assert f"drafts: profile stdlib-llama-3.7m, {skipped} sub-layers" in out
        assert re.search(r"2 prompts, 24 tokens, \d+ drafted, \d+ accepted \(\d+%\): 0 near-ties, 0 bugs", out)

    def test_json_own_prompts_and_profile(self, ran, tmp_path, profile_file):
        (tmp_path / "mine.txt").write_text("def f(x):\nclass A:\n")
        args = ("audit", "--prompts", "mine.txt", "--profile", profile_file, "--max-new-tokens", 8, "--json")
        data = json.loads(ran(*args, "--temperature", 0.8, "--seed", 3))
        assert (data["prompts"], data["tokens"], data["bugs"], data["dtype"]) == (2, 16, 0, "float32")
        assert data["drafted"] > 0

    def test_a_model_without_a_profile(self, ran, tmp_path):
        tiny(CONFIGS["llama"], dtype=torch.float32).save_pretrained(tmp_path / "m")
        builtin_tokenizer = Path(str(builtin.model_folder()))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin_tokenizer / file, tmp_path / "m" / file)
        (tmp_path / "p.txt").write_text("!\n")  # a token that even 61 tokens hold
        out = ran("audit", "--model", "m", "--prompts", "p.txt", "--max-new-tokens", 6)
        assert "drafts: no profile known, 8 sub-layers in int8, the head in int8; proposers: lookup" in out

    def test_a_bug_is_exit_code_1(self, cli, wrong_rule):
        code, out, _ = cli("audit", "--profile", SHIPPED, "--num-prompts", 1, "--max-new-tokens", 20)
        assert code == 1
        assert "a BUG, please report it" in out
        assert "in plain decoding" in out


class TestBench:
    ARGS = ("bench", "--profile", SHIPPED, "--num-prompts", 2, "--max-new-tokens", 6, "--rounds", 1)

    def test_every_method_at_every_temperature(self, cli, tmp_path):
        code, out, err = cli(*self.ARGS, "--json", "--out", "bench.json")
        assert code == 0
        data = json.loads(out)
        assert data == json.loads((tmp_path / "bench.json").read_text())
        assert (data["prompts"], data["max_new_tokens"], data["rounds"], data["widened"]) == (2, 6, 1, 1)
        assert [at["temperature"] for at in data["temperatures"]] == [0, 0.8]
        for at in data["temperatures"]:
            assert list(at["methods"]) == ["plain", "profile", "hf", "hf-prompt-lookup"]
            assert at["methods"]["plain"]["ratio"]["plain"]["median"] == 1
            assert at["methods"]["hf"]["ratio"]["hf"]["median"] == 1
            assert at["plain_of_roofline"] > 0
            assert at["profile"]["oracle"]["speedup"] > 0
        assert re.search(
            r"temperature 0: 8 runs will take about \d+ (s|min), and measuring costs \d+ (s|min), for each of 2", err
        )

    def test_a_seed_repeats_the_texts(self, cli, monkeypatch):
        seen, run = [], Benchmark._run
        monkeypatch.setattr(Benchmark, "_run", lambda *args: seen.append(run(*args)) or seen[-1])
        args = (
            "bench",
            "--profile",
            SHIPPED,
            "--num-prompts",
            2,
            "-n",
            6,
            "--rounds",
            2,
            "--temperature",
            1,
            "--methods",
            "plain,profile,hf",
            "--json",
        )
        assert json.loads(cli(*args, "--seed", 5)[1])["seed"] == 5
        assert cli(*args, "--seed", 5)[0] == cli(*args, "--seed", 6)[0] == 0
        first, again, other = (ran.texts for ran in seen)
        assert {len(texts) for by_prompt in first.values() for texts in by_prompt} == {1}
        assert first == again != other

    def test_a_table(self, ran):
        out = ran(*self.ARGS, "--methods", "plain,profile", "--temperature", "0", "--widen", 2)
        assert "builtin widened 2 times; " in out
        assert "of plain decoding" in out
        assert re.search(r"^profile +\d+\.\d\d ", out, re.MULTILINE)
        (drafts,) = re.findall(r"^drafts: profile .*", out, re.MULTILINE)
        assert drafts.count("skipped") == 1, "the draft path is described once"
        assert "hf" not in out

    @needs_native
    def test_weights_held_in_16_bits_are_said(self, ran, auto):
        auto("native")
        out = ran(*self.ARGS, "--methods", "plain", "--temperature", "0")
        assert "for drafting (0 B more); held in bfloat16, exactly" in out

    def test_plain_alone(self, cli):
        code, out, _ = cli(*self.ARGS, "--methods", "plain", "--temperature", "0.5", "--json")
        (at,) = json.loads(out)["temperatures"]
        assert code == 0
        assert list(at["methods"]) == ["plain"]
        assert "profile" not in at


class TestCompare:
    ARGS = ("compare", "--num-prompts", 3, "--max-new-tokens", 6, "--patience", 2)

    def test_all_that_apply_a_table_and_a_profile_to_use(self, cli, ran, profile_file, tmp_path):
        out = ran(*self.ARGS, "--profile", profile_file, "--out", "best.yaml", "--temperature", "0")
        rows = re.findall(r"^(\S+) +\d", out, re.MULTILINE)
        assert {*FREE, "plain", "profile", "early-exit", "hf", "hf-prompt-lookup"} <= {*rows}
        assert "output: every method gave the same tokens as plain decoding on every prompt" in out
        assert re.search(r"^recommended: ", out, re.MULTILINE)
        assert max(map(len, re.findall(r"^(?:method|\S+ +\d).*", out, re.MULTILINE))) <= 80
        best = read_profile(tmp_path / "best.yaml")
        assert best.drafts == ("selfspec generate --model builtin --profile best.yaml" in out)
        assert cli("generate", PROMPT, "--profile", "best.yaml", "--max-new-tokens", 4)[0] == 0

    def test_json_of_what_was_named(self, ran, profile_file):
        named = ("--methods", f"lookup,{profile_file}", "--draft-model", "builtin", "--json")
        found = json.loads(ran(*self.ARGS, *named))
        for at in found["temperatures"]:
            assert [*at["methods"]] == ["plain", "lookup", str(profile_file), "model:builtin"]
            assert at["methods"]["model:builtin"]["memory_bytes"] > at["methods"]["lookup"]["memory_bytes"]
        assert found["recommended"]["method"] in at["methods"]

    def test_what_ships_for_the_model_is_measured_unless_it_was_slower(self, cli, monkeypatch):
        args = ("compare", "--num-prompts", 2, "--max-new-tokens", 4, "--patience", 2, "--temperature", "0", "--json")
        found = json.loads(cli(*args)[1])
        assert found["source"] == "profile auto drafts nothing for this model"
        assert "profile" not in found["temperatures"][0]["methods"]
        monkeypatch.setattr(Profile, "slower", False)
        found = json.loads(cli(*args)[1])
        assert found["source"].startswith("profile stdlib-llama-3.7m, ")
        assert "profile" in found["temperatures"][0]["methods"]

    def test_tasks_take_turns_and_have_their_fastest(self, cli, tmp_path):
        rows = [("qa", "def f(x):\n"), ("qa", "class A:\n"), ("rag", "import os\n"), ("rag", "x = 1\n")]
        questions = [{"question_id": n, "category": c, "turns": [t]} for n, (c, t) in enumerate(rows)]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
        args = ("compare", "--prompts", "spec-bench:q.jsonl", "--methods", "lookup", "--max-new-tokens", 4)
        code, out, err = cli(*args, "--temperature", "0")
        assert code == 0, err
        assert re.search(r"^qa \(2\): (plain|lookup) ", out, re.MULTILINE)


class TestSearch:
    @pytest.mark.measured_costs
    def test_finds_and_saves(self, cli, tmp_path):
        args = ("search", "--trials", 3, "--num-prompts", 2, "--max-new-tokens", 6, "--out", "found.yaml")
        code, out, err = cli(*args)
        assert (code, out) == (0, "")
        assert "saved found.yaml" in err
        assert "continuing prompts ...\nmeasuring costs ...\n" in err, "a line for each stage where no bar moves"
        assert "0/?" not in err
        assert re.search(r"costs: plain step [\d.]+ ms, verifying 4 tokens [\d.]+ times as much as 1", err)
        assert not (tmp_path / "found.yaml.trials.jsonl").exists()
        profile = read_profile(tmp_path / "found.yaml")
        assert profile.search.trials == 3
        assert cli("generate", PROMPT, "--profile", "found.yaml", "--max-new-tokens", 4)[0] == 0

    def test_json_and_own_data(self, ran, tmp_path):
        (tmp_path / "mine.jsonl").write_text('{"prompt": "def f(x):\\n"}\n{"text": "class A:\\n"}\n')
        args = (
            "search",
            "--prompts",
            "mine.jsonl",
            "--strategy",
            "skopt",
            "--trials",
            2,
            "--max-new-tokens",
            4,
            "--json",
        )
        data = json.loads(ran(*args))
        assert data["out"] == "profile.yaml"
        assert data["profile"]["calibration"]["source"] == "mine.jsonl"
        assert (tmp_path / "profile.yaml").exists()

    def test_prompts_that_are_cut_are_counted(self, cli, tmp_path):
        (tmp_path / "mine.jsonl").write_text(json.dumps({"text": "x = 1\n" * 2000}) + '\n{"text": "class A:"}\n')
        args = ("search", "--prompts", "mine.jsonl", "--trials", 1, "--max-new-tokens", 4, "--minutes", 0.001)
        assert "warning: 1 prompt is cut: 8000 tokens, but only 1020 fit the context together with the" in cli(*args)[2]
        args = ("bench", "--prompts", "mine.jsonl", "--methods", "plain", "--max-new-tokens", 2, "--rounds", 1)
        assert "warning: 1 prompt is cut: 8000 tokens, but only 1022 fit the context together with the" in cli(*args)[2]

    def test_a_context_that_the_model_cannot_have(self, cli):
        code, out, err = cli("search", "--context", 999999)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("error: context 999999: expected at most ")

    def test_every_option(self, cli, ran, tmp_path):
        args = ("search", "--trials", 2, "--num-prompts", 2, "--max-new-tokens", 6, "--keep-best", "--minutes", 5)
        args += ("--keep-layers", "0,15", "--granularity", "layer", "--max-draft-cost", 1000, "--context", 40)
        args += ("--temperature", 0.8, "--top-p", 0.9, "--controller", "static:threshold=0.4,k_max=3")
        assert cli(*args, "--strategy", "tpe")[0] == 0
        profile = read_profile(tmp_path / "profile.yaml")
        assert profile.skip_set.attention == profile.skip_set.mlp
        assert not {0, 15} & {*profile.skip_set.mlp}
        assert profile.costs.context == 40
        assert profile.draft.controller.options["threshold"] == 0.4
        assert (profile.measured[0].temperature, profile.measured[0].top_p) == (0.8, 0.9)
        out = ran("profile", "show", "profile.yaml")
        assert "predicted" in out

    def test_the_papers_recipe(self, cli, tmp_path):
        args = ("search", "--objective", "wallclock", "--strategy", "skopt", "--no-warm-starts", "--trials", 2)
        assert cli(*args, "--num-prompts", 2, "--max-new-tokens", 4)[0] == 0
        assert read_profile(tmp_path / "profile.yaml").search.objective == "wallclock"

    def test_an_interrupt_saves_the_best_and_says_how_to_resume(self, cli, warm, tmp_path):
        """Ctrl-C while the fourth trial is scored: no traceback, a profile, the command that goes on from there."""
        args = ("search", "--trials", 5, "--num-prompts", 2, "--max-new-tokens", 8, "--threads", 1, "--keep-best")
        done = interrupted(warm, "interrupted:3", *args, cwd=tmp_path)
        assert done.returncode == 130
        assert "Traceback" not in done.stderr
        assert f"run the same command again: selfspec {' '.join(on_builtin(args))}" in done.stderr
        profile = read_profile(tmp_path / "profile.yaml")
        assert profile.note == "interrupted after 3 trials; not measured"
        assert profile.path.cheaper
        journal = tmp_path / "profile.yaml.trials.jsonl"
        assert journal.read_text().count('"draft_cost"') == 3
        assert cli(*args)[0] == 0
        resumed = read_profile(tmp_path / "profile.yaml")
        assert resumed.measured
        assert resumed.search.trials == 5
        assert not journal.exists()


class TestProfile:
    def test_show_draws_the_map(self, ran, profile_file):
        out = ran("profile", "show", profile_file)
        assert "layer      0123456789012345\nattention  ###.#.###.######\nmlp        #######.###.####\n" in out
        assert "5 of 32 sub-layers skipped" in out
        assert "fixed (k 3)" in out

    def test_show_a_shipped_one(self, ran):
        out = ran("profile", "show", "stdlib-llama-3.7m")
        assert "climb, replay" in out

    def test_validate(self, cli, profile_file):
        code, out, _ = cli("profile", "validate", profile_file)
        assert (code, out) == (0, f"{profile_file}: valid, 5 sub-layers skipped\n")
        code, out, _ = cli("profile", "validate", profile_file, "--model", "builtin")
        assert (code, out) == (0, f"{profile_file}: valid, 5 sub-layers skipped, fits builtin\n")
        code, out, _ = cli("profile", "validate", PUBLISHED)
        assert (code, out) == (0, f"{PUBLISHED}: valid, 34 sub-layers skipped, published, not measured here\n")

    def test_show_a_published_one(self, ran):
        out = ran("profile", "show", PUBLISHED)
        assert re.search(r"published +arXiv:2410.06916 *\n +hemingkx/SWIFT, commit 88caed7", out)
        assert re.search("measured +published, not measured here", out)

    def test_the_map_of_many_layers_is_in_blocks(self, cli, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        _, out, _ = cli("profile", "show", "llama-2-70b-draft-verify")
        rows = [line.split() for line in out.splitlines() if line.startswith(("layer", "attention", "mlp"))]
        assert [(name, len(row)) for name, row in rows] == [
            (name, n) for n in (60, 20) for name in ("layer", "attention", "mlp")
        ]
        assert (rows[1][1] + rows[4][1]).count(".") == 47

    def test_list_fits_80_columns(self, ran, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        out = ran("profile", "list")
        assert max(map(len, out.splitlines())) <= 80
        assert re.search(
            r"llama-2-70b-swift-cnndm +80 +41 \+ 37 +published, not measured here *\n"
            r" meta-llama/Llama-2-70b-hf +arXiv:2410.06916",
            out,
        )
        assert "\n meta-llama/Llama-2-13b-chat-hf " in out, "the longest name is on one line"
        own = find_profile_file("stdlib-llama-3.7m")
        for m in own.measured:
            assert f"{m.speedup:g}x, temperature {m.temperature:g}" in out

    def test_list_as_json(self, cli):
        code, out, _ = cli("profile", "list", "--json")
        listed = {profile.pop("name"): profile for profile in json.loads(out)["profiles"]}
        assert code == 0
        assert len(listed) >= 10
        skip = find_profile_file(PUBLISHED).skip_set
        attention, mlp = (dict.fromkeys(part, "skip") for part in (skip.attention, skip.mlp))
        assert listed[PUBLISHED] == {
            "model": "meta-llama/Llama-2-13b-hf",
            "layers": 40,
            "draft": "layer-skip",
            "skipped": {"attention": 20, "mlp": 14},
            "modes": {
                "attention": [attention.get(i, "full") for i in range(40)],
                "mlp": [mlp.get(i, "full") for i in range(40)],
                "head": "full",
            },
            "bits_per_weight": None,
            "standing": "published, not measured here",
            "measured": [],
            "source": "arXiv:2410.06916",
            "published": find_profile_file(PUBLISHED).published.model_dump(),
        }
        assert [m["temperature"] for m in listed["stdlib-llama-3.7m"]["measured"]] == [0, 0.8]
        assert 15 < listed["stdlib-llama-3.7m"]["bits_per_weight"] < 16

    def test_list_a_folder(self, cli, tmp_path, profile_file):
        (tmp_path / "other.yaml").write_text("services: {}")
        (tmp_path / "notes.txt").write_text("notes")
        code, out, err = cli("profile", "list", tmp_path)
        assert code == 0
        assert re.search(r"p\.yaml +16 +3 \+ 2 +not measured *\n builtin", out)
        assert err.startswith(f"invalid profile: {tmp_path}/other.yaml: ")
        assert err.count("\n") == 1

    def test_diff(self, cli, tmp_path, profile_file):
        assert cli("profile", "diff", profile_file, profile_file) == (
            0,
            f"{profile_file} and {profile_file}: no difference\n",
            "",
        )
        profile = read_profile(profile_file)
        draft = LayerSkipSpec.from_path(SkipSet((3, 4, 9), (7,)), profile.draft.controller, candidates=2)
        changed = {"draft": draft, "versions": {"torch": "3"}}
        write_profile(profile.model_copy(update=changed), tmp_path / "q.yaml")
        code, out, _ = cli("profile", "diff", "p.yaml", "q.yaml")
        assert code == 1
        assert "A: p.yaml\nB: q.yaml\n" in out
        assert "attention  ###.BA###.######\nmlp        #######.###A####\n" in out
        assert "skipped: 2 by A alone, 1 by B alone, 3 by both (.)" in out
        assert re.search(r"candidates +1, no token tree +at most 2 per position", out)
        assert re.search(r"versions\.torch +- +'3'", out)
        assert "controller" not in out
        code, out, _ = cli("profile", "diff", "p.yaml", "q.yaml", "--json")
        data = json.loads(out)
        assert code == 1
        assert data["skipped_by_a_alone"] == {"attention": [5], "mlp": [11]}
        assert data["skipped_by_b_alone"] == {"attention": [4], "mlp": []}
        assert {"key": "draft.candidates", "a": 1, "b": 2} in data["differences"]

    def test_diff_of_measurements_and_of_other_models(self, cli, tmp_path):
        own = find_profile_file("stdlib-llama-3.7m")
        first, second = own.measured
        slower = [first.model_copy(update={"speedup": 0.5}), second]
        write_profile(own.model_copy(update={"measured": slower}), tmp_path / "q.yaml")
        code, out, _ = cli("profile", "diff", "stdlib-llama-3.7m", "q.yaml")
        assert code == 1
        assert re.search(r"measured +0.935x plain decoding.* 0.5x plain decoding", out)
        assert "layer" not in out
        _, out, _ = cli("profile", "diff", "stdlib-llama-3.7m", "q.yaml", "--json")
        assert json.loads(out)["differences"] == [{"key": "measured.0.speedup", "a": 0.935, "b": 0.5}]
        code, out, _ = cli("profile", "diff", "stdlib-llama-3.7m", PUBLISHED)
        assert code == 1
        assert "19 of 32 sub-layers skipped" in out
        assert "34 of 80 sub-layers skipped" in out

    def test_import(self, cli, ran, tmp_path):
        (tmp_path / "sets.json").write_text(
            '{"a": {"attention": [5, 3], "mlp": [15]}, "b": {"attention": [], "mlp": []}}'
        )
        args = ("profile", "import", "sets.json", "--format", "draft-verify", "--key", "a")
        code, out, err = cli(*args, "--model", "org/model", "--layers", 20, "--out", "a.yaml")
        saved = "saved a.yaml: 3 of 40 sub-layers skipped, published, not measured here\n"
        assert (code, out, err) == (0, "", saved)
        profile = read_profile(tmp_path / "a.yaml")
        assert profile.model == Identity(name="org/model", layers=20)
        assert profile.skip_set == selfspec.SkipSet((3, 5), (15,))
        assert (profile.published.file, profile.published.key) == ("sets.json", "a")
        out = ran(*args, "--model", "builtin")
        assert parse_profile(out, source="out").model == find_profile_file("stdlib-llama-3.7m").model.model_copy(
            update={"fingerprint": None}
        )

    def test_import_for_a_model_that_is_cached(self, ran, tmp_path, monkeypatch):
        """Its configuration is read where it lies; the network is not asked."""
        cached = tmp_path / "models--org--model"
        (cached / "snapshots" / "1").mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("1")
        tiny(CONFIGS["llama"]).config.save_pretrained(cached / "snapshots" / "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
        (tmp_path / "sets.json").write_text('{"a": {"attention": [3], "mlp": []}}')
        out = ran("profile", "import", "sets.json", "--model", "org/model")
        model = parse_profile(out, source="out").model
        assert (model.name, model.layers, model.hidden) == ("org/model", 4, 32)

    def test_schema(self, ran):
        out = ran("profile", "schema")
        assert json.loads(out) == profile_schema()

    def test_a_published_one_drafts(self, cli, ran, tmp_path):
        (tmp_path / "sets.json").write_text('{"a": {"attention": [3, 5], "mlp": [9]}}')
        cli("profile", "import", "sets.json", "--model", "builtin", "--out", "a.yaml")
        out = ran("generate", PROMPT, "--profile", "a.yaml", "--max-new-tokens", 12, "--compare")
        assert "identical output: yes" in out


WRONG = {
    "method": ("generate x --method hf", "method 'hf' is not known; known: plain, profile, path, early-exit, lookup"),
    "draft model": ("generate x --method model:./no", "model ./no: no such folder"),
    "bench draft model": ("bench --methods plain,model:./no", "model ./no: no such folder"),
    "method without a profile": (
        "generate x --profile none --method path",
        "method 'path' needs a profile that drafts",
    ),
    "missing profile": ("generate x --profile no.yaml", "profile no.yaml: no such file"),
    "broken profile": ("generate x --profile broken.yaml", "broken.yaml, line 2: not valid YAML"),
    "unknown key": ("generate x --profile key.yaml", "key.yaml: unknown key 'draft.skip.heads'"),
    "index out of range": ("generate x --profile index.yaml", "layer 16 does not exist; the model has 16"),
    "another model's": (
        "generate x --profile other.yaml --model builtin",
        "another model: layers 4 in the profile, 16",
    ),
    "validate another's": ("profile validate other.yaml --model builtin", "of another model than builtin"),
    "validate broken": ("profile validate broken.yaml", "not valid YAML"),
    "show missing": ("profile show no.yaml", "no such file"),
    "profile's controller": ("generate x --profile controller.yaml", "controller 'magic' is not known"),
    "validate controller": ("profile validate controller.yaml", "controller 'magic' is not known"),
    "huge number": ("profile validate huge.yaml", "huge.yaml, line 2: .*a number of 6,002 characters"),
    "endless aliases": ("profile show endless.yaml", "endless.yaml: .*more than 500,000 values"),
    "too many layers": ("profile show layers.yaml", "less than or equal to 10000, got 99999999"),
    "a pipe": ("profile show pipe", "pipe is a device or a pipe; expected a regular file"),
    "a device": ("search --prompts /dev/zero", "expected a .jsonl file"),
    "empty name": (["generate", "x", "--profile", ""], "the profile's name is empty"),
    "empty model": (["generate", "x", "--model", ""], "the model's name is empty"),
    "long name": (f"profile show {'a' * 5000}", "not a valid path"),
    "long model": (f"search --model {'a/' * 5000}", "not a valid path"),
    "long out": (f"search --out {'a' * 5000}", "not a valid path"),
    "no Unicode": ("generate a\udcff", "the prompt is not valid Unicode text; give UTF-8"),
    "half a surrogate": ("search --prompts half.jsonl", "half.jsonl, line 1: the text has half a surrogate pair"),
    "another device": ("generate x --device hpu", "device 'hpu' cannot be used"),
    "many threads": ("generate x --threads 99999999999", "'--threads'"),
    "great seed": ("search --seed 99999999999", "'--seed'"),
    "stop no Unicode": ("generate x --stop \udcff", "--stop: the text is not valid Unicode"),
    "negative seed": ("generate x --seed -2", "'--seed'"),
    "data as out": ("search --prompts half.txt --out half.txt", "--out half.txt would write over the data file"),
    "int4 as out": ("search --int4 half.txt --out half.txt", "--out half.txt would write over a file that is read"),
    "key given twice": ("profile validate twice.yaml", "line 2: not valid YAML ('skip' is given twice)"),
    "shown controller": ("profile show controller.yaml", "controller.yaml: controller 'magic' is not known"),
    "code in a model": ("generate x --model code", "model code cannot be loaded: "),
    "negative layers": ("profile validate index2.yaml --model negative", "model negative cannot be read"),
    "empty controller": (["search", "--controller", ""], "controller '' is not known"),
    "search outgrows": ("search --max-new-tokens 1024", "max_new_tokens 1024: expected 1 to 1023"),
    "broken model": ("generate x --model broken", "model broken cannot be loaded: "),
    "missing weights": ("generate x --model lacking", "9 weights are missing, such as model.layers.16"),
    "empty prompt": (["generate", ""], "the prompt is empty"),
    "long prompt": (["generate", "import os\n" * 600], "outgrow the model's context (1024 positions)"),
    "too many tokens": ("generate x --max-new-tokens 5000", "at most 1024 new tokens fit"),
    "negative tokens": ("generate x --max-new-tokens -1", "'--max-new-tokens'"),
    "no number": ("generate x --max-new-tokens many", "'--max-new-tokens'"),
    "negative temperature": ("generate x --temperature -1", "'--temperature'"),
    "nan temperature": ("generate x --temperature nan", "temperature"),
    "top-p": ("generate x --top-p 1.5", "top_p 1.5: expected more than 0"),
    "controller": ("generate x --controller fixed:k=0", "expected a whole number from 1 to 64"),
    "no model": ("generate x --model /no/such", "model /no/such: no such folder"),
    "no model's folder": ("generate x --model .", "the folder has no config.json"),
    "no model's file": ("generate x --model key.yaml", "key.yaml is a file, but not a GGUF file; expected a folder"),
    "hub without network": ("generate x --model org/model", "model org/model cannot be loaded"),
    "device": ("generate x --device abacus", "device 'abacus' cannot be used"),
    "dtype": ("generate x --dtype int3", "dtype 'int3' is not known"),
    "threads": ("generate x --threads 0", "'--threads'"),
    "unknown option": ("generate x --colour", "No such option: --colour"),
    "unknown command": ("serach", "No such command 'serach'"),
    "missing data": ("search --prompts no.jsonl", "no.jsonl: no such file"),
    "data without a name": (["search", "--prompts", ""], "the data's name is empty"),
    "no such set": ("search --prompts squad", "squad: no such file or folder; expected a .jsonl file"),
    "a set without network": (
        "search --prompts cnn_dailymail",
        "download a parquet file of its split train of config 3.0.0 from https://huggingface.co/datasets/abisee/cnn_d",
    ),
    "audit's set without network": ("audit --prompts gsm8k", "--prompts FILE.parquet --column question"),
    "column without data": ("search --column x", "--column and --template: given without --prompts"),
    "template without data": (["audit", "--template", "{x}"], "--column and --template: given without --prompts"),
    "template": (["search", "--prompts", "half.txt", "--template", "{text.x}"], "expected nothing but the name"),
    "column": ("bench --prompts half.txt --column x", "half.txt: no column 'x' (there are: text)"),
    "no parquet": ("audit --prompts no.parquet", "no.parquet: no such file"),
    "folder without texts": ("audit --prompts broken", "broken: holds no prompts; expected text files"),
    "no chat": ("search --chat", "model builtin: the tokenizer has no chat template"),
    "audit no chat": ("audit --chat", "model builtin: the tokenizer has no chat template"),
    "bench no chat": ("bench --chat", "model builtin: the tokenizer has no chat template"),
    "generate no chat": ("generate x --chat", "model builtin: the tokenizer has no chat template"),
    "wide and spread": ("bench --widen 2 --device-map auto", "--widen and --device-map: a widened model"),
    "spread and placed": ("bench --device cpu --device-map auto", "--device cpu and --device-map: expected"),
    "folder as out": ("search --prompts . --out half.txt", "--out half.txt would write over the data file"),
    "empty data": ("search --prompts empty.txt", "empty.txt: holds no prompts"),
    "other data": ("search --prompts key.yaml", "expected a .jsonl file"),
    "strategy": ("search --strategy oracle", "strategy 'oracle' is not known; known: tpe, cmaes"),
    "objective": ("search --objective magic", "objective 'magic' is not known; known: replay, wallclock"),
    "granularity": ("search --granularity head", "granularity 'head' is not known; known: sublayer, layer"),
    "keep no number": ("search --keep-layers first", "keep 'first': expected layer numbers such as 0,15"),
    "keep no layer": ("search --keep-layers 99", "keep: layer 99 does not exist; the model has 16 layers"),
    "keep all": (f"search --keep-layers {','.join(map(str, range(16)))}", "every layer is kept"),
    "no minutes": ("search --minutes 0", "minutes 0.0: expected more than 0"),
    "no context": ("search --context 0", "'--context'"),
    "draft cost": ("search --max-draft-cost -1", "max_draft_cost -1.0: expected more than 0"),
    "draft cost by the clock": (
        "search --max-draft-cost 0.5 --objective wallclock",
        "need the cost model of the replay objective",
    ),
    "search's temperature": ("search --temperature nan", "'--temperature': Input should be greater than"),
    "search's top-p": ("search --top-p 2", "top_p 2.0: expected more than 0"),
    "another search's trials": ("search --out old.yaml", "old.yaml.trials.jsonl holds the trials of another"),
    "no trials' file": ("search --out text.yaml", "text.yaml.trials.jsonl is not a file of trials"),
    "damaged trials": ("search --out bad.yaml", "bad.yaml.trials.jsonl is damaged"),
    "trials in the profile": (
        "search --storage profile.yaml",
        "--storage profile.yaml: the profile is written there; expected another path",
    ),
    "no such database": ("search --storage nodb://host/x", "storage nodb://host/x: expected memory, a file, or a"),
    "no server": ("search --storage postgresql://127.0.0.1:1/x", "storage postgresql://127.0.0.1:1/x: connection"),
    "a secret": ("search --storage mysql://me:secret@h:x/y", r"storage mysql://me:\*\*\*@h:x/y: expected memory"),
    "pick from nothing": ("profile pick none.jsonl", "none.jsonl: no such file; expected a file of trials"),
    "pick from text": ("profile pick text.yaml.trials.jsonl", "is not a file of trials"),
    "pick no study": (
        "profile pick mine --storage old.yaml.trials.jsonl",
        "study 'mine': not in this storage; the storage holds selfspec",
    ),
    "pick no trials": ("profile pick old.yaml.trials.jsonl", "holds no trials that could be picked from"),
    "pick too cheap": (
        "profile pick old.yaml.trials.jsonl --max-draft-cost 0",
        "--max-draft-cost 0: expected more than 0",
    ),
    "pick from too little": (
        "profile pick old.yaml.trials.jsonl --extra-memory -1",
        "--extra-memory -1: expected 0 or more, as a share of the model's bytes",
    ),
    "profile's costs": ("profile validate costs.yaml", "expected rising numbers of rows from 1 on"),
    "no trials": ("search --trials 0", "'--trials'"),
    "out without folder": ("search --out no/p.yaml", "the folder no does not exist"),
    "out is a folder": ("search --out .", "is a folder; expected a file to write"),
    "rule": ("generate x --rule magic", "verification rule 'magic' is not known; known: greedy, match"),
    "rule for sampling": ("generate x --rule block", "'block' does not fit temperature 0; expected greedy"),
    "field": ("generate x --set minp=1", "GenerationConfig has no field 'minp'; did you mean min_p?"),
    "field without value": ("generate x --set min_p", "--set min_p: expected NAME=VALUE, such as typical_p=0.9"),
    "field beyond YAML": (["generate", "x", "--set", r'min_p="\U80000000"'], "--set min_p="),
    "field's value": ("generate x --set do_sample=true --set min_p=x", "generation config: "),
    "length": ("generate x --set max_length=abc", "max_length abc: expected a whole number of at least 1"),
    "fewest": ("generate x --set min_new_tokens=abc", "min_new_tokens abc: expected a whole number"),
    "time": ("generate x --set max_time=5s", "max_time 5s: expected seconds"),
    "no token": ("generate x --set forced_eos_token_id=99999", "token 99999 is not in the vocabulary of 4096"),
    "stop field": (["generate", "x", "--set", "stop_strings=['']"], "a stop string is empty"),
    "beams": ("generate x --set num_beams=4", "num_beams 4 is not served; selfspec decodes one sequence"),
    "no config": ("generate x --generation-config no", "generation config no: no such file"),
    "broken config": ("generate x --generation-config broken.yaml", "generation config broken.yaml cannot"),
    "regex": ("generate x --regex a(", r"regular expression 'a\(': unclosed group"),
    "regex of words": (
        ["generate", "x", "--regex", r"\bword\b"],
        "word.*b': lookarounds not supported yet; WordUnicode$",
    ),
    "schema": ("generate x --json-schema schema.json", "schema.json: JSON schema: "),
    "two guides": ("generate x --regex a --json-schema key.json", "expected one of them"),
    "no schema": ("generate x --json-schema no.json", "no.json: no such file"),
    "no schema's text": ("generate x --json-schema empty.txt", "JSON schema"),
    "audit nothing": (
        "audit --profile index2.yaml --model builtin",
        "profile index2.yaml drafts nothing for this model; expected --profile with one that drafts",
    ),
    "audit no prompts": ("audit --prompts no.jsonl", "no.jsonl: no such file"),
    "audit outgrows": (f"audit --profile {SHIPPED} --max-new-tokens 1024", "outgrow the model's context"),
    "audit's profile": ("audit --profile other.yaml -m builtin", "of another model: layers 4 in the profile, 16"),
    "bench method": (
        "bench --methods plain,magic",
        "method 'magic' is not known; known: plain, profile, path, guarded, early-exit, lookup, ",
    ),
    "compare method": ("compare --methods magic", "method 'magic' is not known; known: plain, profile, path"),
    "compare draft model": ("compare --draft-model ./no", "model ./no: no such folder"),
    "compare profile": ("compare --methods no.yaml", "no.yaml: no such file"),
    "compare no profile": ("compare --profile none --methods profile", "method 'profile' needs a profile"),
    "compare temperature": ("compare --temperature x", "--temperature x: expected numbers"),
    "bench twice": ("bench --methods plain,plain", "a method is named twice"),
    "bench without plain": ("bench --methods profile", "must have 'plain' among them"),
    "bench temperature": ("bench --temperature 0,x", "--temperature 0,x: expected numbers separated by commas"),
    "bench out": ("bench --out no/b.json", "the folder no does not exist"),
    "no questions' file": ("bench --prompts spec-bench:no.jsonl", "no.jsonl: no such file"),
    "questions without a file": ("audit --prompts spec-bench:", "names no file; expected spec-bench:PATH"),
    "no questions": ("bench --prompts spec-bench:half.txt", "half.txt, line 1: not valid JSON"),
    "questions in columns": (
        "bench --prompts spec-bench:half.txt --column turns",
        "spec-bench:half.txt: takes no column and no template",
    ),
    "questions as out": (
        "bench --prompts spec-bench:half.txt --out half.txt",
        "--out half.txt would write over the data file",
    ),
    "bench no prompts": ("bench --prompts no.jsonl", "no.jsonl: no such file"),
    "bench outgrows": ("bench --max-new-tokens 1024", "outgrow the model's context"),
    "bench's profile": ("bench --profile other.yaml -m builtin", "of another model: layers 4 in the profile, 16"),
    "search no model": ("search --model /no/such", "no such folder"),
    "list nothing": ("profile list no", "no: no such folder"),
    "list a file": ("profile list key.yaml", "key.yaml is a file; expected a folder"),
    "list no profiles": ("profile list code", "code holds no profile: no .yaml files"),
    "diff nothing": ("profile diff index2.yaml no.yaml", "profile no.yaml: no such file"),
    "diff one": ("profile diff index2.yaml", "Missing argument 'b'"),
    "diff broken": ("profile diff broken.yaml index2.yaml", "broken.yaml, line 2: not valid YAML"),
    "near a shipped one": ("profile show llama-2-13b", "did you mean llama-2-13b-swift-cnndm?"),
    "import nothing": ("profile import no.json --model org/m", "no.json: no such file"),
    "import no model": ("profile import sets.json", "Missing option '--model'"),
    "import no key": (
        "profile import sets.json --model org/m",
        "sets.json holds 2 skip sets; name one with --key: 'a', 'b'",
    ),
    "import no such key": (
        "profile import sets.json --model org/m --key c",
        "sets.json holds no skip set 'c'; it holds 'a', 'b'",
    ),
    "import no layers": (
        "profile import sets.json --model org/m --key a",
        "model org/m is not on this machine; expected --layers, its number of layers",
    ),
    "import few layers": (
        "profile import sets.json --model org/m --key a --layers 3",
        "sets.json: 'a': skip.attention: layer 3 does not exist; the model has 3 layers",
    ),
    "import other layers": (
        "profile import sets.json --model builtin --key a --layers 3",
        "--layers 3: model builtin has 16 layers; leave the option out",
    ),
    "import twice": (
        "profile import sets.json --model org/m --key b --layers 9",
        "sets.json: 'b': skip.mlp: layer 1 is listed twice",
    ),
    "import format": (
        "profile import sets.json --model org/m --format swift",
        "format 'swift' is not known; known: draft-verify",
    ),
    "import over itself": (
        "profile import sets.json --model org/m --key a --layers 9 --out ./sets.json",
        "--out sets.json would write over a file that is read",
    ),
    "import no place": (
        "profile import sets.json --model org/m --key a --layers 9 --out no/p.yaml",
        "the folder no does not",
    ),
    "import no hub id": (
        "profile import sets.json --model a..b --key a",
        "neither an existing folder nor a valid hub id",
    ),
}


@pytest.fixture(scope="module")
def old_trials(tmp_path_factory):
    """A file of trials that other options made."""
    path = tmp_path_factory.mktemp("old") / "trials.jsonl"
    Ledger(path, settings={"seed": -1})
    return path.read_text()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_clear_line(cli, tmp_path, monkeypatch, old_trials, name):
    """Exit code 2, one line on standard error, nothing on standard output, before any work."""
    if name in ("regex", "regex of words", "schema") and not is_there("llguidance"):
        missing("llguidance")
    files = {
        "broken.yaml": "model: {layers: 16\nskip: ]",
        "key.yaml": "version: 2\nmodel: {layers: 16}\ndraft: {kind: layer-skip, skip: {heads: [1]}}",
        "index.yaml": "version: 2\nmodel: {layers: 16}\ndraft: {kind: layer-skip, skip: {mlp: [16]}}",
        "other.yaml": "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: [1]}}",
        "controller.yaml": "version: 2\nmodel: {layers: 16}\n"
        "draft: {kind: layer-skip, skip: {mlp: [1]}, controller: {name: magic}}",
        "empty.txt": "\n",
        "huge.yaml": f"version: 2\nmodel: {{layers: 0x{'f' * 6000}}}",
        "endless.yaml": "version: 2\nmodel: {layers: 16}\nnote:\n- &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)),
        "layers.yaml": "version: 2\nmodel: {layers: 99999999}",
        "half.txt": "a",
        "twice.yaml": "skip: {}\nskip: {}\nmodel: {layers: 16}",
        "key.json": "{}",
        "schema.json": '{"type": "thing"}',
        "index2.yaml": "version: 2\nmodel: {layers: 16}",
        "sets.json": '{"a": {"attention": [3], "mlp": []}, "b": {"attention": [], "mlp": [1, 1]}}',
        "costs.yaml": "version: 2\nmodel: {layers: 16}\n"
        "costs: {context: 9, base: 0.1, attention: 0.1, mlp: 0.1, widths: [2], "
        "verify: [0.1], round: 0.1}",
        "old.yaml.trials.jsonl": old_trials,
        "bad.yaml.trials.jsonl": old_trials + "{\n",
        "text.yaml.trials.jsonl": "my notes\n",
        "half.jsonl": '{"prompt": "\\ud800"}',
    }
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    for folder in ("broken", "code", "negative"):
        (tmp_path / folder).mkdir()
    (tmp_path / "negative" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": -1}')
    (tmp_path / "code" / "config.json").write_text(
        '{"model_type": "custom", "auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}}'
    )
    (tmp_path / "code" / "x.py").write_text("raise SystemExit('its code was run')")
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama", "layer_types": ["no"]}')
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for file in builtin.model_folder().iterdir():  # links, as its weights are 7 MB
        (lacking / file.name).symlink_to(file)
    config = json.loads((lacking / "config.json").read_text())
    (lacking / "config.json").unlink()
    (lacking / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 17}))
    from selfspec.runtime.forward import LeanRuntime

    monkeypatch.setattr(LeanRuntime, "forward", lambda *_, **__: pytest.fail("work was done"))
    line, message = WRONG[name]
    before = sorted(tmp_path.iterdir())
    code, out, err = cli(*(line.split() if isinstance(line, str) else line))
    assert (code, out) == (2, ""), err
    assert message in err or re.search(message, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_odd_text_in_a_profile_is_shown_as_text(ran, tmp_path):
    (tmp_path / "p.yaml").write_text(
        'version: 2\nmodel: {layers: 3, name: "[/usr/x]"}\nnote: "\\e]0;title\\x07 \\ud800"\n'
    )
    out = ran("profile", "show", "p.yaml")
    assert "[/usr/x]" in out
    assert "\x1b]" not in out


def test_a_byte_order_mark_is_no_text(cli, tmp_path):
    (tmp_path / "p.yaml").write_bytes(b"\xef\xbb\xbfversion: 2\r\nmodel: {layers: 3}\r\n")
    assert cli("profile", "validate", "p.yaml")[0] == 0


@pytest.mark.parametrize("redirect", [">&-", "> /dev/full"])
def test_standard_output_that_takes_nothing(redirect):
    command = f"{SELFSPEC} generate hi --max-new-tokens 2 --profile none {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_what_the_system_refuses_is_told_with_its_file():
    full = "OSError(28, 'No space left on device', 'a.json')"
    code = (
        f"import selfspec.cli as c, selfspec.cli.app as a; a.app = lambda **_: (_ for _ in ()).throw({full}); c.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: a.json: No space left on device\n")


def test_no_command_at_all_shows_the_help(cli):
    code, out, err = cli()
    assert (code, err) == (2, "")
    assert "generate" in out


OUTS = {
    "search": ["search", "--trials", 1, "--out"],
    "trials": ["search", "--trials", 1, "--out", "new.yaml", "--storage"],
    "bench": ["bench", "--out"],
    "compare": ["compare", "--out"],
    "plot": ["plot", "p.yaml", "--out"],
    "report": ["report", "--profile", "p.yaml", "--out"],
    "index": ["index", "texts.txt", "--out"],
    "generate": ["generate", "--prompts", "texts.txt", "--out"],
    "join": ["profile", "join", "p.yaml", "p.yaml", "--out"],
    "import": ["profile", "import", "p.yaml", "--model", "builtin", "--out"],
    "pick": ["profile", "pick", "p.yaml", "--max-draft-cost", 1, "--out"],
}


@pytest.mark.parametrize("command", OUTS)
def test_a_link_is_not_written_through(command, cli, tmp_path):
    write_profile(Profile(model=Identity(layers=4)), tmp_path / "p.yaml")
    (tmp_path / "texts.txt").write_text("def main():\n")
    (tmp_path / "target").write_text("before")
    name = "link.svg" if command == "plot" else "link"
    (tmp_path / name).symlink_to(tmp_path / "target")
    code, out, err = cli(*OUTS[command], name)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {name} is a symbolic link; expected a file to write")
    assert (tmp_path / "target").read_text() == "before"
    assert (tmp_path / name).is_symlink()


def test_a_controller_without_a_draft_is_said(cli):
    code, _, err = cli("generate", PROMPT, "--profile", "none", "--max-new-tokens", 2, "--controller", "fixed:k=3")
    assert code == 0
    assert err.startswith("--controller has no effect")


def test_no_prompt_at_all(cli):
    code, _, err = cli("generate")
    assert (code, err) == (2, "error: no prompt: give it as an argument or on standard input\n")


def test_standard_input_that_is_no_text(cli):
    code, _, err = cli("generate", stdin=b"a\xff")
    assert (code, err) == (2, "error: standard input: not UTF-8 text (byte 1)\n")


def test_a_read_only_place(cli, tmp_path):
    if os.getuid() == 0:
        code, _, err = cli("search", "--out", "/proc/p.yaml")
    else:
        tmp_path.chmod(0o500)
        code, _, err = cli("search", "--out", tmp_path / "p.yaml")
    assert code == 2
    assert "cannot be written" in err


def test_other_weights_are_one_warning(cli, tmp_path):
    (tmp_path / "p.yaml").write_text(
        "version: 2\nmodel: {layers: 16, fingerprint: '0'}\ndraft: {kind: layer-skip, skip: {mlp: [3]}}"
    )
    code, _, err = cli("generate", PROMPT, "--profile", "p.yaml", "-m", "builtin", "--max-new-tokens", 2)
    assert code == 0
    assert err.startswith("warning: the profile was made for other weights")
    assert err.count("\n") == 1


def test_help_loads_nothing_heavy():
    code = "import sys; sys.argv = ['selfspec', '--help']\nfrom selfspec.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pydantic', 'optuna')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "generate" in done.stdout
    assert done.returncode == 0


def test_version():
    done = subprocess.run([SELFSPEC, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"selfspec {selfspec.__version__}\n"


def test_an_interrupt_keeps_what_was_printed(llm, warm, tmp_path):
    """Ctrl-C in a stream: the text so far stays, no traceback, exit code 130."""
    args = ("generate", PROMPT, "--max-new-tokens", 40, "--profile", "none", "--threads", 1)
    done = interrupted(warm, "interrupted-text:20", *args, cwd=tmp_path)
    assert done.returncode == 130
    shown = done.stdout.removesuffix("\n")
    assert len(shown) > 10
    assert llm.generate(PROMPT, max_new_tokens=19).text.startswith(shown)
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_traceback():
    how = "-m builtin --max-new-tokens 900 --threads 1"
    command = f"{SELFSPEC} generate 'import os' {how} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert len(done.stdout) == 1
    assert done.returncode == 1  # as click ends where nobody reads
    assert b"Traceback" not in done.stderr
    assert b"Error" not in done.stderr
