"""Trained weights beside a profile: found where it lies, and refused where they are missing or others."""

from __future__ import annotations

import hashlib

import pytest

from selfspec.basics.errors import SelfspecError
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import parse_profile, profile_text, read_profile, write_profile
from selfspec.profile.schema import Profile
from selfspec.types.identity import Identity

WEIGHTS = b"weights"
SHA = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "bridge.safetensors").write_bytes(WEIGHTS)
    return tmp_path


def profile(file="deep/bridge.safetensors", sha256=SHA):
    return Profile(model=Identity(layers=4), parts={"bridge": ModuleFile(file=file, sha256=sha256)})


def test_a_part_is_found_beside_its_profile(folder, monkeypatch):
    write_profile(profile(), folder / "p.yaml")
    found = read_profile(folder / "p.yaml")
    assert found.part_path("bridge") == folder / "deep" / "bridge.safetensors"
    assert found.model_copy(update={"note": "x"}).part_path("bridge") == folder / "deep" / "bridge.safetensors"
    assert profile_text(found) == profile_text(profile())
    monkeypatch.chdir(folder / "deep")  # it is the profile's folder that counts
    assert sha256_of(read_profile(folder / "p.yaml").part_path("bridge")) == SHA


def test_no_other_part_is_found(folder):
    write_profile(profile(), folder / "p.yaml")
    with pytest.raises(SelfspecError, match="the profile has no part 'head'; it has: bridge"):
        read_profile(folder / "p.yaml").part_path("head")
    with pytest.raises(SelfspecError, match="has no part 'head'; it has: none"):
        Profile(model=Identity(layers=4)).part_path("head")
    with pytest.raises(SelfspecError, match="part 'bridge': the profile was not read from a file"):
        profile().part_path("bridge")


def test_a_part_that_is_missing_or_another_file_is_refused(folder):
    text = profile_text(profile())
    (folder / "p.yaml").write_text(text)
    (folder / "deep" / "bridge.safetensors").write_bytes(b"others")
    other = hashlib.sha256(b"others").hexdigest()[:12]
    why = f"p.yaml: part 'bridge': .*deep/bridge.safetensors is another file .* begins with {other}, not {SHA[:12]}$"
    with pytest.raises(SelfspecError, match=why):
        read_profile(folder / "p.yaml")
    (folder / "deep" / "bridge.safetensors").unlink()
    with pytest.raises(SelfspecError, match=r"p.yaml: part 'bridge': .*deep/bridge.safetensors: no such file$"):
        read_profile(folder / "p.yaml")
    assert parse_profile(text, source="p") == profile()


def test_a_profile_is_not_written_without_its_parts(folder):
    with pytest.raises(SelfspecError, match="part 'bridge': .*: no such file"):
        write_profile(profile("bridge.safetensors"), folder / "p.yaml")
    assert not (folder / "p.yaml").exists()


ELSEWHERE = (
    "/a.safetensors",
    "../a.safetensors",
    "a/../../a.safetensors",
    "a.safetensors/..",
    "C:\\a.safetensors",
    "C:a.safetensors",
    "\\a.safetensors",
    "..\\a.safetensors",
    "\\\\host\\share\\a.safetensors",
)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_a_part_elsewhere_is_refused(file):
    with pytest.raises(
        SelfspecError, match="is not beside the profile; expected a path from its folder, without '..'$"
    ):
        parse_profile(profile_text(profile()).replace("deep/bridge.safetensors", f"'{file}'"), source="p")


@pytest.mark.parametrize("file", ["a.bin", "a", "''"])
def test_a_part_of_another_format_is_refused(file):
    with pytest.raises(SelfspecError, match=r"is no .safetensors file; expected one$"):
        parse_profile(profile_text(profile()).replace("deep/bridge.safetensors", file), source="p")
