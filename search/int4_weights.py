"""Int4 weights for draft paths: the choice of the quantiser, and the file that a search makes, kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind, write_bytes
from selfspec.draft_modules.int4_files import open_int4
from selfspec.draft_modules.int4_quantization import int4_settings, write_int4
from selfspec.llm.llm import LLM
from selfspec.profile.module_files_spec import SUFFIX, ModuleFile, check_parts, sha256_of
from selfspec.profile.schema import Profile
from selfspec.types.int4_methods import AUTO, CHOICES, METHODS, Int4Method

from .bridging import parts_folder
from .budget import Deadline
from .callbacks import SearchCallbacks

INT4 = "int4"  # the weights' name among a profile's parts
GROUP = 64


def choose_method(method: str) -> Int4Method:
    """Return the method to quantise by; "auto" is GPTQ. Raises `SelfspecError` for an unknown method."""
    if method == AUTO:
        return "gptq"
    for known in METHODS:
        if method == known:
            return known
    raise SelfspecError(f"method '{method}' of quantising is not known; known: {', '.join(CHOICES)}")


def check_int4(llm: LLM, method: str) -> None:
    """Raise `SelfspecError` if `method` is the path of a file that holds no int4 weights for this model."""
    if method not in CHOICES and llm.runtime.supports_trained:
        open_int4(llm.runtime, Path(method))


def int4_for_search(
    llm: LLM, texts: Sequence[Sequence[int]], method: str, *, deadline: Deadline, watch: SearchCallbacks
) -> ModuleFile | None:
    """Return the file, in the cache, of the int4 weights that a search drafts with, after registering its weights.

    `texts` (token ids) are those that the weights are made from. `method`: one of `METHODS`, "auto" (GPTQ, or the
    weighted grid if the time until the deadline is too short), or the path of a file of int4 weights, which is copied.
    Returns None for `nearest`, for which no file is needed; if the time until
    the deadline is too short; and if the model does not support such weights. Raises `SelfspecError` for a file that
    does not fit the model.
    """
    runtime = llm.runtime
    if method == "nearest" or not runtime.supports_trained:
        return None
    parts_folder().mkdir(parents=True, exist_ok=True)
    if method not in CHOICES:
        file = parts_folder() / f"{INT4}-{sha256_of(Path(method))[:12]}{SUFFIX}"
        write_bytes(file, Path(method).read_bytes())
        return _registered(llm, file)
    methods: tuple[Int4Method, ...] = ("gptq", "weighted") if method == AUTO else (choose_method(method),)
    for chosen in methods:
        settings = int4_settings(chosen, GROUP, texts)
        model = runtime.skeleton.identity.model_dump(mode="json", exclude={"name"})
        key = json.dumps([settings, model, str(runtime.dtype)], sort_keys=True)
        file = parts_folder() / f"{INT4}-{hashlib.sha256(key.encode()).hexdigest()[:12]}{SUFFIX}"
        if kind(file) == "file":
            try:
                return _registered(llm, file)
            except SelfspecError:  # damaged, or of other weights than those that the name covers
                file.unlink()
        if _write(llm, file, texts, settings, deadline, watch):
            return _registered(llm, file)
    watch.say("int4 weights are rounded to nearest: there is too little time to quantise them better")
    return None


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
    begun = deadline.clock()

    def on_layer(done: int) -> bool:
        watch.step(done)
        return deadline.allows((deadline.clock() - begun) / done * (runtime.layers - done))

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
