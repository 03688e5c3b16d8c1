"""Options of `generate` and `chat`: checks before anything is loaded, and loading of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import parse_json, read_text
from selfspec.cli.common import check_named_method, drafting_with, model_for, profile_named, search_hint, stderr
from selfspec.cli.options import DecodingOptions
from selfspec.controllers import parse_controller
from selfspec.profile.schema import Profile
from selfspec.text.prompt_template import is_unicode

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.sampling_plan import Plan
    from selfspec.speculation.drafter import Drafter
    from selfspec.types.controller import ControllerSpec

OWN_CONFIG = "model"  # value of --generation-config that selects the checkpoint's configuration


@dataclass(frozen=True, slots=True)
class DecodingRequest:
    """Decoding options, checked as far as possible without the model.

    `options`: as given. `model`: the model's name. `profile`: a profile, `auto` or `none`. `controller`: None for the
    profile's controller. `schema`: the text of the JSON schema for guided generation, if one is given.
    """

    options: DecodingOptions
    model: str
    profile: str | Profile
    controller: ControllerSpec | None
    schema: str | None

    def check(self) -> Options:
        """Return the options that need no model. Raises `SelfspecError` for options that no model supports."""
        options = self.options
        options.device_options.set_threads()

        from selfspec.models.loading import read_generation_config
        from selfspec.text.guided import check_guide

        named = options.generation_config
        how = replace(
            options.generation_options,
            config=None if named is None or named == OWN_CONFIG else read_generation_config(Path(named)),
            stop=tuple(options.stop or ()),
            settings=_settings(options),
        )
        how.check()
        if self._guided:
            try:
                check_guide(regex=options.regex, json_schema=self.schema)
            except SelfspecError as error:
                of_file = options.regex is None and options.json_schema != self.schema
                prefix = f"{options.json_schema}: " if of_file else ""
                raise SelfspecError(f"{prefix}{error}") from None
        return how

    def check_chat(self, *, chat: bool, system: str | None) -> None:
        """Raise `SelfspecError` for a system message that is invalid or that the chat template does not accept.

        `chat`: also for a model without chat template.
        """
        from selfspec.llm.messages import message
        from selfspec.llm.prompt_encoding import check_chat

        if system is not None:
            message("system", system)
        if chat:
            check_chat(self.model, system=system is not None)

    def load(self) -> LLM:
        """Load the model with its profile."""
        from selfspec.llm.llm import load

        options = self.options
        return load(
            self.model,
            profile=self.profile,
            device=options.device_options.placement,
            dtype=options.device_options.dtype,
            store=options.store,
            answers=options.answers,
            method=options.method,
            tensor_parallel=options.device_options.tensor_parallel,
            extra_memory=options.extra_memory,
        )

    def run_as_worker(self) -> None:
        """In a tensor-parallel process other than the first, compute for the first process and do not return.

        In the first process, and without tensor parallelism, do nothing.
        """
        if self.options.device_options.is_worker:
            self.options.device_options.set_threads()
            self.load()

    def load_plain(self, *, layout: str = "auto") -> LLM:
        """Load the model without a profile; by default in the fastest weight layout for plain decoding."""
        from selfspec.llm.llm import load

        where = self.options.device_options
        return load(self.model, profile="none", device=where.placement, dtype=where.dtype, layout=layout)

    def complete(self, llm: LLM, how: Options) -> Options:
        """Return `how` with the options that need the model, if given: its generation configuration, and the guide."""
        if self.options.generation_config == OWN_CONFIG:
            how = replace(how, config=llm.model.generation_config)
        if self._guided:
            how = replace(how, guide=llm.guide(regex=self.options.regex, json_schema=self.schema))
        return how

    def hint(self, llm: LLM, planned: Plan, how: Options) -> None:
        """Print which options have no effect, and how to search for a profile if there is none."""
        sampling_options = {
            "--seed": how.seed,
            "--top-k": how.top_k,
            "--top-p": how.top_p,
            "--min-p": self.options.min_p,
        }
        idle = [name for name, value in sampling_options.items() if value is not None]
        if planned.sampler.greedy and idle:
            _say(f"{', '.join(idle)}: no effect on greedy decoding; --temperature above 0 samples")
        if llm.has_default_profile:
            _say(search_hint(llm))

    def drafter(self, llm: LLM) -> Drafter:
        """Return the profile's drafter, with the controller of `--controller` if that is given."""
        profile = self._controlled(llm)
        return llm.drafter if profile is None else llm.guarded_drafter(profile)

    def drafter_in_batches(self, llm: LLM) -> Callable[[Any], Drafter] | None:
        """Return what makes a batch's drafter, with the controller of `--controller`; None if that is not given."""
        profile = self._controlled(llm)
        return None if profile is None else partial(llm.guarded_drafter_on, profile)

    def _controlled(self, llm: LLM) -> Profile | None:
        """Return the profile with the controller of `--controller`; None where it is not given, or has no effect."""
        if self.controller is None:
            return None
        if llm.profile is None or not llm.profile.drafts:
            _say("--controller has no effect: without a profile that drafts, nothing is drafted")
            return None
        return llm.profile.with_controller(self.controller)

    def drafts_by(self, llm: LLM) -> str:
        """Return where the profile that `llm` drafts with comes from, and what it drafts with, in words."""
        drafting = self.options
        return drafting_with(
            llm.profile,
            llm.identity,
            drafting.profile,
            default=llm.has_default_profile,
            method=drafting.method,
            store=drafting.store,
        ).source

    @property
    def _guided(self) -> bool:
        return self.options.regex is not None or self.schema is not None


def decoding(options: DecodingOptions) -> DecodingRequest:
    """Return the request for `options`, checked as far as possible without heavy imports. Raises `SelfspecError`."""
    profile = profile_named(options.profile)
    model = model_for(options.model, profile)
    controller = None if options.controller is None else parse_controller(options.controller)
    check_named_method(options.method)
    _check_stops(options.stop or ())
    return DecodingRequest(options, model, profile or options.profile, controller, _schema(options.json_schema))


def _schema(given: str | None) -> str | None:
    """Return the JSON text of `--json-schema`: itself if it begins like an object, or else that file's text."""
    return given if given is None or given.lstrip().startswith("{") else read_text(Path(given))


def _check_stops(stops: Sequence[str]) -> None:
    for stop in stops:
        if not is_unicode(stop):
            raise SelfspecError("--stop: the text is not valid Unicode; expected UTF-8")


def _settings(options: DecodingOptions) -> dict[str, Any]:
    """Return the fields of the generation configuration that have no option in Python. Raises `SelfspecError`."""
    settings = dict(_setting(text) for text in options.settings or ())
    for name, value in (("min_p", options.min_p), ("repetition_penalty", options.repetition_penalty)):
        if value is not None and name in settings:
            raise SelfspecError(f"--set {name} and --{name.replace('_', '-')}: expected only one of the two")
        if value is not None:
            settings[name] = value
    return settings


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    parsed: Any = None
    try:
        parsed = parse_json(value)  # JSON, unlike YAML, reads 3e-4 as a number
    except ValueError:
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
            equals = ""
    if not equals or not name.strip():
        raise SelfspecError(f"--set {text}: expected NAME=VALUE, such as typical_p=0.9")
    return name.strip(), parsed


def _say(text: str) -> None:
    stderr().print(text, markup=False, soft_wrap=True)
