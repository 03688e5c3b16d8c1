"""What a profile says as lines of text."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from selfspec.cli.profile_text import facts
from selfspec.cli.search import print_found
from selfspec.profile.module_files_spec import ModuleFile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.costs import CostModel


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        (
            [1.0, 1.0, 2.0],
            "drafting pays for up to 7 sequences decoded together; for more, decode plainly or export to an engine",
        ),
        ([1.0, 1.0, 1.0], "drafting pays for up to 65 or more sequences decoded together"),
        ([1.0, 8.0, 9.0], "drafting is not expected to pay in batches"),
    ],
)
def test_a_profile_says_for_how_many_sequences_drafting_pays(verify, expected):
    """Passes over up to eight tokens take as long as over one; or any do; or each token takes as long as one alone."""
    costs = CostModel(base=0.01, attention=0, mlp=0, context=10, widths=[1, 8, 9], verify=verify, round=0)
    profile = find_profile_file("smollm2-135m")
    predicted = profile.predicted.model_copy(update={"draft_cost": 0.01, "acceptance_rate": 0.9})
    profile = profile.model_copy(update={"costs": costs, "predicted": predicted})
    assert facts(profile)["predicted"][1:] == [expected]
    assert len(facts(profile.model_copy(update={"costs": None}))["predicted"]) == 1


def test_one_is_singular_and_others_are_plural():
    found = find_profile_file("smollm2-135m")
    several = found.measured[0].model_copy(update={"held_out": True})
    one = several.model_copy(update={"prompts": 1, "threads": 1})
    lines = facts(found.model_copy(update={"measured": [one, several.model_copy(update={"prompts": 2, "threads": 2})]}))
    assert lines["measured"][1].startswith("1 held-out prompt x ")
    assert lines["measured"][2].endswith(", 1 thread")
    assert lines["measured"][4].startswith("2 held-out prompts x ")
    assert lines["measured"][5].endswith(", 2 threads")


@pytest.mark.parametrize("chat", [True, False])
def test_a_search_ends_with_the_command_that_uses_its_profile_as_it_was_searched(chat):
    found = find_profile_file("smollm2-135m")
    searched_on = found.calibration.model_copy(update={"chat": chat})
    console = Console(width=80)
    with console.capture() as printed:
        print_found(found.model_copy(update={"calibration": searched_on}), Path("mine.yaml"), console)
    command = f"selfspec generate {'--chat ' if chat else ''}--profile mine.yaml 'your prompt'"
    assert printed.get().splitlines()[-1] == f"saved mine.yaml; use it with: {command}"


def test_a_search_names_the_files_that_its_profile_needs():
    part = ModuleFile(file="int4-0.safetensors", sha256="0" * 64)
    found = find_profile_file("smollm2-135m").model_copy(update={"parts": {"int4": part}})
    console = Console(width=80)
    with console.capture() as printed:
        print_found(found, Path("mine.yaml"), console)
    assert "saved mine.yaml and, beside it, int4-0.safetensors; use it with: " in printed.get()
