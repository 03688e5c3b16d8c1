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
    why = f"p.yaml: part 'bridge': .*deep/bridge.safetensors is another file .* begins with {SHA[:12]}$"
    with pytest.raises(SelfspecError, match=why) as raised:
        read_profile(folder / "p.yaml")
    assert other not in str(raised.value), "a link may lead to a secret, whose digits nobody is shown"
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


def answers(path):
    return f"version: 2\nmodel: {{layers: 4}}\ndraft: {{kind: lookup, proposers: [{{kind: answers, path: {path}}}]}}\n"


@pytest.mark.parametrize("path", [*(file.replace(".safetensors", "") for file in ELSEWHERE), "/tmp/a", "../a"])
@pytest.mark.parametrize("inside", ["", "also", "merged"])
def test_answers_elsewhere_are_refused(path, inside):
    text = answers(f"'{path}'")
    model, draft = (line.partition(": ")[2] for line in text.splitlines()[1:])
    if inside == "also":
        text = f"version: 2\nmodel: {model}\nalso: [{{model: {model}, draft: {draft}}}]"
    elif inside:
        text = f"version: 2\nmodel: {model}\ndraft: {{kind: merged, drafters: [{draft}, {{kind: recycle}}]}}"
    with pytest.raises(
        SelfspecError, match=r"^p: answers: .* is not beside the profile; expected a path from its folder"
    ):
        parse_profile(text, source="p")


def test_answers_lie_beside_their_profile_wherever_the_command_runs(tmp_path, monkeypatch):
    folder = tmp_path / "far"
    folder.mkdir()
    (folder / "p.yaml").write_text(answers("mine.answers"))
    monkeypatch.chdir(tmp_path)
    found = read_profile(folder / "p.yaml")
    assert [one.path for one in found.local_proposers(found.draft)] == [str(folder / "mine.answers")]
    named = found.with_proposers(answers="yours.answers")  # by a person, from where the person is
    assert named.local_proposers(named.draft)[-1].path == str(tmp_path / "yours.answers")
    with pytest.raises(SelfspecError, match="is not beside the profile"):
        write_profile(named, folder / "q.yaml")
    write_profile(found, tmp_path / "q.yaml")
    assert read_profile(tmp_path / "q.yaml").draft == found.draft


def test_answers_that_are_a_link_to_elsewhere_are_refused(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "p.yaml").write_text(answers("mine.answers"))
    (tmp_path / "far" / "mine.answers").symlink_to(tmp_path / "anything")
    with pytest.raises(SelfspecError, match="mine.answers is a link out of the profile's folder; expected a file"):
        read_profile(tmp_path / "far" / "p.yaml")
