"""Export of a profile to another inference engine, and the registry of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.export.draft_export import drafts_of
from selfspec.export.expected import Expected, check_tokens, expected_by_rehearsal, expected_from_profile
from selfspec.export.exporter import Exporter, ExportJob, ExportResult
from selfspec.export.folder import check_out, staged_folder
from selfspec.export.gguf_files import check_type
from selfspec.export.hf import Transformers
from selfspec.export.limitations import common_limitations
from selfspec.export.llama_cpp import LlamaCpp
from selfspec.export.readme import page
from selfspec.export.sglang import Sglang
from selfspec.export.tensorrt_llm import TensorRtLlm
from selfspec.export.vllm import Vllm
from selfspec.llm.llm import LLM
from selfspec.profile.choosing import check_profile
from selfspec.profile.schema import Profile

ENGINES: dict[str, Exporter] = {
    exporter.name: exporter for exporter in (Vllm(), Sglang(), LlamaCpp(), TensorRtLlm(), Transformers())
}
"""The exporter of each engine, by the engine's name. To add an engine, write an exporter and list it here."""

NEW = 64  # tokens that a rehearsal, a test run of the drafts, decodes after each prompt


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export to the folder `out`.

    `files`: paths relative to `out`. `drafted`: a description of the drafts. `written`: the commands to run and notes.
    `limitations`: features of the profile that the engine lacks. `expected`: the draft length and acceptance.
    """

    out: Path
    files: tuple[str, ...]
    drafted: str
    written: ExportResult
    limitations: tuple[str, ...]
    expected: Expected


def find_engine(name: str) -> Exporter:
    """Return the exporter of an engine, by the engine's name. Raises `SelfspecError` for an unknown name."""
    if name not in ENGINES:
        raise SelfspecError(f"--to {name}: expected one of {', '.join(ENGINES)}")
    return ENGINES[name]


def check(engine: str, profile: Profile, out: Path, *, type_name: str | None = None, force: bool = False) -> None:
    """Raise `SelfspecError` for invalid arguments of `export` that can be found before the model is loaded."""
    find_engine(engine)
    check_out(out, force=force)
    check_type(type_name)
    drafts_of(profile)


def export(
    llm: LLM,
    profile: Profile,
    engine: str,
    out: Path,
    *,
    prompts: Sequence[Sequence[int]] = (),
    new: int = NEW,
    tokens: int | None = None,
    type_name: str | None = None,
    force: bool = False,
    name: str = "profile",
) -> Exported:
    """Write the files and the README.md with which an engine drafts as the profile does, as far as the engine can.

    `prompts`: the prompts (token ids) of a rehearsal, which decodes `new` tokens after each prompt to measure the
    acceptance; without prompts the expected acceptance comes from the profile. `tokens`: the draft length (None: the
    length of the highest expected speed). `type_name`: the type of the target's weights in GGUF files, such as `q8_0`
    (None: the model's dtype). `force`: overwrite files in `out`. `name`: the profile's name in the README. The weights
    of `llm` must have the layout `rows`. Raises `SelfspecError`, and writes nothing, if the engine cannot run this kind
    of drafts or `out` cannot be written.
    """
    check(engine, profile, out, type_name=type_name, force=force)
    check_profile(profile, llm.identity)
    runs, job = ENGINES[engine], ExportJob(llm, profile, drafts_of(profile), out, type_name)
    offer = runs.plan_export(job)
    check_tokens(tokens, offer.most)
    if prompts:
        expected = expected_by_rehearsal(llm, profile, offer, prompts, new=new, tokens=tokens)
    else:
        expected = expected_from_profile(profile, offer, tokens=tokens)
    lost = offer.limitations if offer.itself else (*offer.limitations, *common_limitations(profile))
    with staged_folder(out, force=force) as folder:
        written = offer.write(folder, expected.tokens or 0)
        text = page(runs, llm, name, offer, written, expected, lost)
        (folder / "README.md").write_text(text, encoding="utf-8")
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    return Exported(out, files, offer.drafted, written, lost, expected)
