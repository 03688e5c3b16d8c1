"""The command `selfspec convert`."""

from __future__ import annotations

from selfspec.cli.common import load_llm, model_for, print_json, profile_named, quiet, set_threads, stderr
from selfspec.cli.options import ConvertCommand
from selfspec.cli.train import print_usage


def run(command: ConvertCommand) -> None:
    """Check the folders, load the model, and write the draft module and its profiles. Raises `SelfspecError`."""
    quiet()
    model = model_for(command.model, profile_named(command.profile))
    set_threads(command.device_options.threads)

    from selfspec.training.fit import check_folder
    from selfspec.training.published_modules import convert

    check_folder(command.out)
    llm = load_llm(model, command.profile, command.device_options)
    part, profiles, kind, megabytes = convert(llm, command.folder, command.out, llm.known_profile)
    if command.json:
        files = [str(path) for path in profiles]
        print_json({"part": str(part), "kind": kind, "megabytes": megabytes, "profiles": files})
    console = stderr()
    console.print(f"saved {part}: {kind}, {megabytes:.1f} MB while drafting", markup=False, soft_wrap=True)
    print_usage(profiles, console)
