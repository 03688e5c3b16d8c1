"""The command `selfspec convert`."""

from __future__ import annotations

from selfspec.cli.common import print_json, quiet, set_threads, stderr
from selfspec.cli.options import ConvertCommand
from selfspec.cli.train import use
from selfspec.models.loading import check_at_hand


def run(given: ConvertCommand) -> None:
    """Check the folders, load the model, and write the draft module and its profiles. Raises `SelfspecError`."""
    quiet()
    check_at_hand(given.model)
    set_threads(given.where.threads)

    from selfspec.llm.llm import load
    from selfspec.training.fit import check_folder
    from selfspec.training.published_modules import convert

    check_folder(given.out)
    llm = load(given.model, profile=given.profile, device=given.where.place, dtype=given.where.dtype)
    part, profiles, kind, megabytes = convert(llm, given.folder, given.out, llm.profile)
    if given.json:
        files = [str(path) for path in profiles]
        print_json({"part": str(part), "kind": kind, "megabytes": megabytes, "profiles": files})
    console = stderr()
    console.print(f"saved {part}: {kind}, {megabytes:.1f} MB while drafting", markup=False, soft_wrap=True)
    use(profiles, console)
