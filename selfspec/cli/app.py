"""The commands and their options. Each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.data import KINDS, Chat, Column, DataOptions, Template
from selfspec.cli.devices import Device, Dtype, MaxMemory, Offload, Spread, Threads
from selfspec.cli.profile_app import Json, profile_app
from selfspec.cli.see_app import see_app
from selfspec.measure.bench_methods import methods_help
from selfspec.model.loading import parse_devices

app = typer.Typer(
    name="selfspec",
    help="Lossless self-speculative decoding: the same output, sooner, with no second model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(profile_app, name="profile")
app.add_typer(see_app)

ModelOption = Annotated[str | None, typer.Option(help="builtin, a folder, or a hub id; the profile's when left out.")]
DraftingProfile = Annotated[
    str, typer.Option(help="A file, the name of a shipped one, or auto: one made for the model, else half of it.")
]
ControllerOption = Annotated[
    str | None,
    typer.Option(help="When to stop drafting: fixed:k=4, static:threshold=0.6,k_max=8, adaptive:threshold=0.6."),
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from selfspec import __version__

        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.command()
def search(
    model: Annotated[str, typer.Option(help="builtin, a folder, or a hub id.")] = "builtin",
    data: Annotated[str | None, typer.Option(help=f"Calibration prompts: a {KINDS}.")] = None,
    column: Column = None,
    template: Template = None,
    chat: Chat = False,
    objective: Annotated[
        str,
        typer.Option(help="replay: predicted, without decoding. wallclock: every trial decodes, as the paper does."),
    ] = "replay",
    strategy: Annotated[
        str, typer.Option(help="climb, tpe, dp, greedy, cmaes, gp, skopt (the paper's kind), or random.")
    ] = "climb",
    trials: Annotated[int, typer.Option(min=1, help="Skip sets to try.")] = 60,
    minutes: Annotated[float | None, typer.Option(min=0, help="End the trials after this long.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to search on, drawn by the seed.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the draw and of the strategy.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.yaml"),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that continue each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="As the model will be used; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    rule: Annotated[
        str | None,
        typer.Option(help="How sampled drafts will be verified: block (default), match (with seeds), token."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Measure costs over so many keys; the prompts' length when left out.")
    ] = None,
    controller: ControllerOption = None,
    keep: Annotated[str, typer.Option(help="Layers that are never skipped, such as 0,15.")] = "",
    granularity: Annotated[str, typer.Option(help="sublayer (attention and MLP apart) or layer.")] = "sublayer",
    max_draft_cost: Annotated[
        float | None, typer.Option(help="The most that a draft step may cost, as a share of a plain step.")
    ] = None,
    warm_starts: Annotated[bool, typer.Option(help="Try a few likely sets first; the paper does not.")] = True,
    keep_best: Annotated[bool, typer.Option("--keep-best", help="Save the best set even if plain is faster.")] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Where trials are kept: memory, a file, or a database's URL; OUT.trials.jsonl until the profile is "
            "saved when left out. Several workers may share one."
        ),
    ] = None,
    study: Annotated[str, typer.Option(help="The study's name in the storage.")] = "selfspec",
    kv: Annotated[
        str,
        typer.Option(
            help="Drafts read the target's cache (shared), or have their own, as an exported draft model (own)."
        ),
    ] = "shared",
    device: Device = "auto",
    device_map: Spread = None,
    max_memory: MaxMemory = None,
    offload_folder: Offload = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Find which sub-layers of this model, on this machine, to bypass while drafting; save a profile."""
    from selfspec.cli.search import SearchOptions, run

    code = run(
        SearchOptions(
            model=model,
            data=DataOptions(data, column, template, chat),
            objective=objective,
            strategy=strategy,
            trials=trials,
            minutes=minutes,
            prompts=prompts,
            seed=seed,
            out=out,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            context=context,
            controller=controller,
            keep=keep,
            granularity=granularity,
            max_draft_cost=max_draft_cost,
            warm_starts=warm_starts,
            keep_best=keep_best,
            storage=storage,
            study=study,
            kv=kv,
            device=parse_devices(device, device_map, max_memory, offload_folder),
            dtype=dtype,
            threads=threads,
            json=json,
        )
    )
    if code:
        raise typer.Exit(code)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input when left out.")] = None,
    model: ModelOption = None,
    profile: Annotated[str, typer.Option(help="A file, the name of a shipped one, auto, or none.")] = "auto",
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="128 where nothing says how many.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0, the default, is greedy decoding.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes sampling repeatable, and the same with and without drafting.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    generation_config: Annotated[
        str | None, typer.Option(help="A generation_config.json or its folder; 'model': the checkpoint's own.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other field of transformers' GenerationConfig, such as min_p=0.05; may be given again.",
        ),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The new text matches this (needs llguidance).")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="The new text is JSON that this schema describes (needs llguidance).")
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(help="How drafts are verified: greedy; match (default with a seed), block (default), token."),
    ] = None,
    controller: ControllerOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show rounds, acceptance and speed.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Plain decoding beside it, interleaved.")] = False,
    color: Annotated[
        bool, typer.Option("--color", help="Colour tokens by where they came from; with --json, add their events.")
    ] = False,
    device: Device = "auto",
    device_map: Spread = None,
    max_memory: MaxMemory = None,
    offload_folder: Offload = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Continue a prompt, drafting with a profile: the same output as plain decoding, sooner."""
    from selfspec.cli.generate import GenerateOptions, run

    run(
        GenerateOptions(
            prompt=prompt,
            model=model,
            profile=profile,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            generation_config=generation_config,
            settings=tuple(settings or ()),
            regex=regex,
            json_schema=json_schema,
            rule=rule,
            controller=controller,
            stats=stats,
            compare=compare,
            color=color,
            device=parse_devices(device, device_map, max_memory, offload_folder),
            dtype=dtype,
            threads=threads,
            json=json,
        )
    )


@app.command()
def audit(
    model: ModelOption = None,
    profile: DraftingProfile = "auto",
    prompts: Annotated[str | None, typer.Option(help=f"A {KINDS}; built-in held-out ones when left out.")] = None,
    column: Column = None,
    template: Template = None,
    chat: Chat = False,
    limit: Annotated[int, typer.Option(min=1, help="The most prompts.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that continue each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Above 0: sampled with the seed.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    controller: ControllerOption = None,
    device: Device = "auto",
    device_map: Spread = None,
    max_memory: MaxMemory = None,
    offload_folder: Offload = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Check that drafting changes nothing: near-ties are counted, and exit code 1 means a bug was found."""
    from selfspec.cli.audit import AuditOptions, run

    code = run(
        AuditOptions(
            model=model,
            profile=profile,
            data=DataOptions(prompts, column, template, chat),
            limit=limit,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            controller=controller,
            device=parse_devices(device, device_map, max_memory, offload_folder),
            dtype=dtype,
            threads=threads,
            json=json,
        )
    )
    if code:
        raise typer.Exit(code)


@app.command()
def bench(
    model: ModelOption = None,
    profile: DraftingProfile = "auto",
    methods: Annotated[
        str, typer.Option(help=f"Which are run, separated by commas: {methods_help()}.")
    ] = "plain,skip,hf,hf-early-exit,hf-prompt-lookup",
    widen: Annotated[
        int, typer.Option(min=1, max=64, help="Times wider, with the same output: a large model's cost.")
    ] = 1,
    prompts: Annotated[str | None, typer.Option(help=f"A {KINDS}; built-in held-out ones when left out.")] = None,
    column: Column = None,
    template: Template = None,
    chat: Chat = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="The most prompts; all of a file or folder, or 12 of others (widened 6)."),
    ] = None,
    temperature: Annotated[str, typer.Option(help="One or several, separated by commas; 0 is greedy.")] = "0,0.8",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that continue each prompt; 96, or 64 widened, when left out.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each method on each prompt; 5, or 3 widened, when left out.")
    ] = None,
    controller: ControllerOption = None,
    out: Annotated[Path | None, typer.Option(help="Write everything that was measured here, as JSON.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure every method on the same prompts, interleaved: plain, layer skip, and transformers' own."""
    from selfspec.cli.bench import BenchOptions, run

    code = run(
        BenchOptions(
            model=model,
            profile=profile,
            methods=methods,
            widen=widen,
            data=DataOptions(prompts, column, template, chat),
            limit=limit,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            controller=controller,
            out=out,
            device=device,
            dtype=dtype,
            threads=threads,
            json=json,
        )
    )
    if code:
        raise typer.Exit(code)
