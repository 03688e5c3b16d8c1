"""Export of a profile to another inference engine: the registry of engines, the output folder and its README.md."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import disk_errors, files_in, kind, set_mode
from selfspec.export.expected import Expected, check_tokens, expected_by_rehearsal, expected_from_profile
from selfspec.export.exporter import Exporter, ExportJob, ExportPlan, ExportResult, check_drafts
from selfspec.export.gguf_files import check_type
from selfspec.export.hf import Transformers
from selfspec.export.llama_cpp import LlamaCpp
from selfspec.export.sglang import Sglang
from selfspec.export.tensorrt_llm import TensorRtLlm
from selfspec.export.vllm import Vllm
from selfspec.llm.llm import LLM
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import check_profile


def check_out(out: Path, *, force: bool) -> None:
    """Raise `SelfspecError` unless `out` can be written: a missing or empty folder, with `force` any folder."""
    there = kind(out)
    if there not in ("missing", "folder"):
        raise SelfspecError(f"--out {out} is a file; expected a folder that is empty, or not there yet")
    if there == "folder" and not force and files_in(out):
        raise SelfspecError(
            f"--out {out} is not empty; expected another folder, or --force to write over what is there"
        )
    if kind(out.absolute().parent) != "folder":
        raise SelfspecError(f"--out {out}: the folder {out.parent} does not exist; make it first")


@contextlib.contextmanager
def staged_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` on success. With `force`, other files in `out` are kept.

    Raises `SelfspecError` as `check_out` does, and if `out` cannot be written.
    """
    check_out(out, force=force)
    out = out.absolute()
    try:
        made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise SelfspecError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    try:
        with disk_errors():
            yield made
        _put(made, out)
    except OSError as error:  # a full disk
        raise SelfspecError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, out: Path) -> None:
    """Move the folder `made` to `out`; if `out` exists, move the entries of `made` into it, replacing equal names."""
    set_mode(made, 0o777)
    if not out.is_dir():
        made.rename(out)
        return
    for entry in made.iterdir():
        place = out / entry.name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        os.replace(entry, place)


def common_limitations(profile: Profile) -> list[str]:
    """Return a line for each feature of the profile that no other engine has, such as the controller."""
    spec, lost = profile.draft, []
    controller = getattr(spec, "controller", None)
    if controller is not None and controller.name != "fixed":
        lost.append(f"the controller ({controller.name}): every draft has the same number of tokens")
    if (candidates := getattr(spec, "candidates", 1)) > 1:
        lost.append(f"{candidates} candidates for each position: drafts are single sequences, not trees")
    proposers = getattr(spec, "proposers", None) or ()
    if proposers and not isinstance(spec, LookupSpec):
        kinds = ", ".join(proposer.kind for proposer in proposers)
        lost.append(f"lookup tokens ({kinds}), which save draft steps: every drafted token takes a draft step")
    elif stores := [proposer for proposer in proposers if proposer.kind == "store"]:
        lost.append(f"{len(stores)} store(s) of texts: only prompt and output are looked up")
    if isinstance(spec, LayerSkipSpec):
        if spec.vocabulary is not None:
            lost.append(f"the draft's vocabulary of {len(spec.vocabulary)} tokens: all tokens are drafted")
        if spec.below is not None:
            lost.append(f"the trained head below the path ({spec.below.part})")
        shared = profile.search is not None and profile.search.kv == "shared" and bool(len(spec.path.skip))
        hint = (
            " (the skip set was searched with the model's KV cache; selfspec search --kv own finds one for engines)"
            if shared
            else ""
        )
        lost.append(f"the shared KV cache: a draft model prefills the prompt into a separate KV cache{hint}")
    return [*lost, "the verification rule, seeds and the guard: sampling and its seeds are the engine's own"]


def page(
    engine: Exporter,
    llm: LLM,
    profile: str,
    offer: ExportPlan,
    written: ExportResult,
    expected: Expected,
    lost: Sequence[str],
) -> str:
    """Return the README in Markdown: drafts, commands, expected acceptance, limitations, versions and tests.

    `profile`: the name of the profile. `lost`: the limitations, one line each.
    """
    language = "python" if engine.name == "hf" else "bash"
    lines = [
        f"# {llm.name} for {engine.name}",
        "",
        f"Written by `selfspec export` (selfspec {version('selfspec')}) from the profile `{profile}`: {offer.drafted}.",
        "",
        "## To run",
        "",
    ]
    for what, command in written.commands:
        lines += [f"{what[0].upper()}{what[1:]}:", "", f"```{language}", command, "```", ""]
    lines += [f"{note}\n" for note in written.notes]
    tokens = "by the profile's controller" if expected.tokens is None else expected.tokens
    drafts = "The profile's controller ends drafts." if expected.tokens is None else f"Drafts of {tokens} tokens."
    lines += ["## What to expect", "", drafts, ""]
    if expected.acceptance is None or expected.per_pass is None:
        lines += [f"The acceptance is unknown: {expected.source}.", ""]
    else:
        lines += [
            "| draft length | accepted | tokens a pass of the model |",
            "|---|---|---|",
            f"| {tokens} | {expected.acceptance:.1%} | {expected.per_pass:.2f} |",
            "",
            f"Source: {expected.source}. For greedy decoding; sampled drafts are accepted less often.",
            "",
        ]
    lines += ["## Limitations", "", *(f"- {limitation}" for limitation in lost), ""]
    lines += ["## Versions", "", f"Written against {engine.read}. {engine.tried[0].upper()}{engine.tried[1:]}.", ""]
    return "\n".join(lines)


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
    check_drafts(profile)


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
    runs, job = ENGINES[engine], ExportJob(llm, profile, out, type_name)
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
