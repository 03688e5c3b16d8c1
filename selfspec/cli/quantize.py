"""The command `selfspec quantize`."""

from __future__ import annotations

import shlex
import sys

from selfspec.cli.common import load_llm, model_for, print_json, profile_named, quiet, set_threads, stderr
from selfspec.cli.quantize_options import QuantizeCommand
from selfspec.cli.search import SearchWatch
from selfspec.cli.train import print_usage


def run(command: QuantizeCommand) -> int:
    """Validate the options before loading the model, then quantise; return 130 after an interrupt."""
    quiet()
    from selfspec.search.quantizing import check_quantized_out, quantize

    model = model_for(command.model, profile_named(command.profile))
    check_quantized_out(command.out)
    command.data.check_not_written(command.out, f"--out {command.out}")
    prompts = command.data.read()
    set_threads(command.device_options.threads)

    console = stderr()
    llm = load_llm(model, command.profile, command.device_options)
    try:
        with SearchWatch(console) as watch:
            made = quantize(
                llm,
                command.out,
                command.quantize_options,
                watch,
                prompts=prompts,
                chat=command.data.chat,
                profile=llm.known_profile,
            )
    except KeyboardInterrupt:
        again = shlex.join(["selfspec", *sys.argv[1:]])
        console.print(f"to resume, run the same command again: {again}", markup=False, soft_wrap=True)
        return 130
    texts = made.settings["texts"]
    console.print(
        f"saved {made.weights}: {made.settings['method']}, groups of {made.settings['group']}, from {texts['count']} "
        f"texts of together {texts['tokens']:,} tokens, in {made.seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    print_usage([made.profile], console)
    if command.json:
        print_json(
            {"weights": str(made.weights), "profile": str(made.profile), **made.settings, "seconds": made.seconds}
        )
    return 0
