"""Everything that a profile can name stands in every conformance suite."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from every_drafter import KINDS, REPRESENTATIVES, table

from selfspec.draft_modules import registry as heads
from selfspec.drafters import registry

SUITES = {  # each with the name of what it runs
    "engine/test_loop.py": "DRAFTERS",
    "engine/test_engine.py": "DRAFTERS",
    "speculation/test_match.py": "DRAFTERS",
    "speculation/test_law.py": "TABLE",
}
TABLE = table(11)


def test_every_kind_of_the_registry_stands_in_the_table():
    assert {*registry._MAKERS} - {"echo"} == {*KINDS}
    named = {name for names in KINDS.values() for name in names}
    assert named <= {*TABLE}
    assert {*REPRESENTATIVES} <= {*TABLE}


def test_every_kind_of_head_stands_in_the_table():
    assert {*heads.HEADS} <= {*KINDS["head"]}


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_the_whole_table(suite):
    path = Path(__file__).parents[1] / suite
    spec = spec_from_file_location(f"conformance_{path.stem}", path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {*TABLE} <= {*getattr(module, SUITES[suite])}
