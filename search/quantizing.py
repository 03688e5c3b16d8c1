"""Int4 weights for draft paths: the quantiser, the file that a search makes or `quantize` writes, and its profile."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import (
    check_not_read,
    check_writable,
    kind,
    make_folder,
    read_cached,
    write_bytes,
    write_cached,
)
from selfspec.draft_modules.int4_quantization import (
    check_quantizable,
    int4_settings,
    layers_folder,
    open_int4,
    write_int4,
)
from selfspec.draft_modules.module_files import part_kind
from selfspec.llm.default_profile import DRAFTED, profile_by_rate
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import fit_prompt, takes_messages
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import SUFFIX, ModuleFile, bring_parts, check_parts, sha256_of
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import quantized_profile
from selfspec.text.prompt_files import Prompts
from selfspec.types.methods import AUTO_METHOD, INT4_CHOICES, INT4_METHODS, Int4Method

from .bridging import parts_folder
from .budget import Deadline, no_deadline
from .callbacks import SearchCallbacks
from .continuations import DecodingSettings, choose, continue_prompts
from .options import QuantizeOptions

INT4 = "int4"  # the weights' name among a profile's parts
GROUP = 64


def choose_method(method: str) -> Int4Method:
    """Return the method to quantise by; "auto" is GPTQ. Raises `SelfspecError` for an unknown method."""
    if method == AUTO_METHOD:
        return "gptq"
    for known in INT4_METHODS:
        if method == known:
            return known
    raise SelfspecError(f"method '{method}' of quantising is not known; known: {', '.join(INT4_CHOICES)}")


def check_int4(llm: LLM, method: str) -> None:
    """Raise `SelfspecError` if `method` is the path of a file that holds no int4 weights for this model."""
    if method not in INT4_CHOICES:
        open_int4(llm.runtime, Path(method))


def int4_for_search(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    method: str,
    *,
    deadline: Deadline,
    watch: SearchCallbacks,
    known: str | None = None,
) -> ModuleFile | None:
    """Return the file, in the cache, of the int4 weights that a search drafts with, after registering its weights.

    `texts` (token ids) are those that the weights are made from. `method`: one of `METHODS`, "auto" (GPTQ, or the
    weighted grid if the time until the deadline is too short), or the path of a file of int4 weights, which is copied.
    `known`: the name of the file with which a study's paths were scored; no other is made then. Its name says how it
    was made, and from which texts. Returns None for `nearest`, for which no file is needed, if the time until the
    deadline is too short or the weights cannot be written, and where `known` cannot be had. Raises `SelfspecError` for
    a file that does not fit the model, or cannot be copied.
    """
    runtime = llm.runtime
    if method == "nearest":
        return None
    if known is not None and kind(file := parts_folder() / known) == "file":
        with suppress(SelfspecError):  # damaged, or of other weights
            return _registered(llm, file)
    if method not in INT4_CHOICES:
        return _copied(llm, Path(method), known)
    methods: tuple[Int4Method, ...] = ("gptq", "weighted") if method == AUTO_METHOD else (choose_method(method),)
    for chosen in methods:
        settings = int4_settings(chosen, GROUP, texts)
        model = runtime.skeleton.identity.model_dump(mode="json", exclude={"name"})
        key = json.dumps([settings, model, str(runtime.dtype)], sort_keys=True)
        file = parts_folder() / f"{INT4}-{hashlib.sha256(key.encode()).hexdigest()[:12]}{SUFFIX}"
        if known not in (None, file.name):
            continue
        if kind(file) == "file":
            try:
                return _registered(llm, file)
            except SelfspecError:  # damaged, or of other weights than those that the name covers
                file.unlink()
        try:
            if _write(llm, file, texts, settings, deadline, watch):
                return _registered(llm, file)
        except (SelfspecError, OSError) as error:  # such as a full disk
            if known is None:
                watch.say(f"int4 weights are rounded to nearest: better ones cannot be written ({reason(error)})")
            return None
    if known is None:
        watch.say("int4 weights are rounded to nearest: there is too little time to quantise them better")
    return None


def _copied(llm: LLM, weights: Path, known: str | None) -> ModuleFile | None:
    """Copy a file of int4 weights to the cache and register them; None if its name there is not `known`."""
    file = parts_folder() / f"{INT4}-{sha256_of(weights)[:12]}{SUFFIX}"
    if known not in (None, file.name):
        return None
    make_folder(parts_folder())
    write_bytes(file, weights.read_bytes())
    return _registered(llm, file)


def _write(
    llm: LLM,
    file: Path,
    texts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    deadline: Deadline,
    watch: SearchCallbacks,
) -> bool:
    """Write int4 weights to a file in the cache; return whether the time until the deadline sufficed."""
    runtime = llm.runtime
    watch.stage(f"quantising to int4 ({settings['method']})", runtime.layers)
    first: float | None = None  # when the first layer was done, before which the texts are read for others, too

    def on_layer(done: int) -> bool:
        nonlocal first
        watch.step(done)
        if first is None:
            first = deadline.clock()
            return deadline.allows()
        return deadline.allows((deadline.clock() - first) / (done - 1) * (runtime.layers - done))

    make_folder(parts_folder())
    with TemporaryDirectory(dir=parts_folder()) as folder:  # other workers may make the same file
        made = Path(folder) / file.name
        if not write_int4(runtime, made, texts, settings, on_layer=on_layer):
            return False
        made.replace(file)
    return True


def _registered(llm: LLM, file: Path) -> ModuleFile:
    part = ModuleFile(file=file.name, sha256=sha256_of(file))
    llm.runtime.register_int4(part.sha256, open_int4(llm.runtime, file))
    return part


def using_int4(llm: LLM, part: ModuleFile) -> AbstractContextManager[None]:
    """Return a context in which draft paths that name no int4 weights use those of `part`."""
    return llm.runtime.using_int4(part.sha256)


def with_int4_part(profile: Profile, part: ModuleFile | None) -> Profile:
    """Return the profile with a file of int4 weights in the cache among its parts; unchanged if there is no such file.

    The draft does not name the weights yet.
    """
    if part is None:
        return profile
    try:
        check_parts({INT4: part}, parts_folder())
    except SelfspecError:  # deleted, or of a search on another machine
        return profile
    return profile.model_copy(update={"parts": {INT4: part}}).with_folder(parts_folder())


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The files that `quantize` wrote, the `settings` recorded in the file of weights, and the seconds it took."""

    weights: Path
    profile: Path
    settings: dict[str, Any]
    seconds: float


def check_quantized_out(out: Path, profile: str | None) -> None:
    """Raise `SelfspecError` unless int4 weights can be written to `out`, and a profile beside it.

    A file at `out` is replaced only if it holds such weights: not a model's own, say; and a profile only with them, and
    never `profile`, which is read.
    """
    if out.suffix != SUFFIX:
        raise SelfspecError(f"--out {out}: expected a file whose name ends in {SUFFIX}")
    beside = out.with_suffix(".yaml")
    check_not_read(beside, profile)
    for file in (out, beside):
        check_writable(file)
    if kind(out) == "file" and part_kind(out) != INT4:
        raise SelfspecError(f"--out {out} is a file without int4 weights of selfspec; expected another path")
    if kind(out) == "missing" and kind(beside) == "file":
        raise SelfspecError(f"--out {out}: the weights' profile would replace {beside}; expected another path")


def quantize(
    llm: LLM,
    out: Path,
    options: QuantizeOptions,
    watch: SearchCallbacks,
    *,
    prompts: Prompts | None = None,
    chat: bool = False,
    profile: Profile | None = None,
) -> QuantizedModel:
    """Quantise the attention and MLP weights of a model to int4, and write them to `out` and a profile beside it.

    `prompts` None: the built-in ones. `profile`: the profile whose draft path uses the weights (None: a path with every
    sub-layer in int4, and the head in int8). An interrupted call keeps its texts and layers in the folder `out`.layers,
    from which the same call resumes. Raises `SelfspecError` for a profile without int4 sub-layers, and as `write_int4`.
    """
    begun = time.perf_counter()
    used = _profile(llm, profile)
    check_quantizable(llm.runtime)  # before any text is decoded
    folder = layers_folder(out)
    texts = _texts(llm, folder / "texts.json", options, prompts, chat, watch)
    method = choose_method(options.method)
    settings = int4_settings(method, options.group, texts, seed=options.seed)
    watch.stage(f"quantising to int4 ({method}, groups of {options.group})", llm.runtime.layers)

    def on_layer(done: int) -> bool:
        watch.step(done)
        return True

    write_int4(llm.runtime, out, texts, settings, on_layer=on_layer)
    (folder / "texts.json").unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
    _write_profile(used, out)
    return QuantizedModel(out, out.with_suffix(".yaml"), settings, time.perf_counter() - begun)


def _profile(llm: LLM, profile: Profile | None) -> Profile:
    """Return the profile that is to use the weights. Raises `SelfspecError` if its path has no int4 sub-layer."""
    if profile is None:
        if llm.runtime.part_bytes("head", 0, "int8") is None:
            return quantized_profile(llm.identity, "int4", head="full", drafted=DRAFTED)
        return profile_by_rate(llm.model, llm.identity, "int4")
    if not isinstance(profile.draft, LayerSkipSpec) or not len(profile.path.int4):
        raise SelfspecError(
            "the profile's draft path has no sub-layer in int4; expected one that has, or --profile none"
        )
    return profile


def _texts(
    llm: LLM, file: Path, options: QuantizeOptions, prompts: Prompts | None, chat: bool, watch: SearchCallbacks
) -> list[list[int]]:
    """Return the model's continuations of prompts (token ids), prompts included; those in `file` if it has them."""
    if options.method == "nearest":
        return []
    new = min(options.max_new_tokens, llm.runtime.skeleton.context - 1)
    chosen = choose(
        prompts,
        source="prompts",
        count=options.texts,
        seed=options.seed,
        chat=chat,
        takes_messages=takes_messages(llm),
    )
    texts = [*chosen.search, *(chosen.measure if prompts is not None and chosen.held_out else ())][: options.texts]
    encoded = [llm.encode(fit_prompt(llm, text, new, chat=chosen.chat)) for text in texts]
    if not encoded:
        raise SelfspecError(f"{chosen.source}: holds no prompts")
    model = llm.runtime.skeleton.identity.model_dump(mode="json", exclude={"name"})
    key = {"model": model, "prompts": encoded, "new": new, "temperature": options.temperature, "seed": options.seed}
    kept = read_cached(file)
    if isinstance(kept, dict) and kept.get("key") == key and _are_texts(kept.get("texts")):
        return list(kept["texts"])
    deadline = no_deadline()
    if options.minutes is not None:
        deadline = Deadline(time.perf_counter() + 60 * options.minutes, time.perf_counter)
    watch.stage("continuing prompts", 2 * new)
    done = continue_prompts(
        llm,
        encoded,
        DecodingSettings(new, options.temperature),
        seed=options.seed,
        on_token=watch.step,
        deadline=deadline,
    )
    made = [list(text.tokens) for text in done]
    write_cached(file, {"key": key, "texts": made})
    return made


def _are_texts(texts: object) -> bool:
    return isinstance(texts, list) and all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in texts)


def _write_profile(profile: Profile, weights: Path) -> None:
    """Write `profile` with the int4 weights in the file `weights`, beside that file, with its other parts."""
    assert isinstance(profile.draft, LayerSkipSpec)
    others = {name: part for name, part in profile.parts.items() if name in _parts_of(profile.draft)}
    if profile.folder is not None:
        others = bring_parts(others, profile.folder, weights.parent)
    parts = {**others, INT4: ModuleFile(file=weights.name, sha256=sha256_of(weights))}
    draft = profile.draft.model_copy(update={"int4_weights": INT4})
    update = {"draft": draft, "parts": parts, "measured": [], "predicted": None, "also": []}
    changed = profile.model_copy(update=update).with_folder(weights.parent)
    write_profile(changed, weights.with_suffix(".yaml"))


def _parts_of(draft: LayerSkipSpec) -> Sequence[str]:
    below = None if draft.below is None else draft.below.part
    return [name for name in (draft.trained, below) if name is not None]
