"""Decoding options, defined once: `LLM.run` takes them, and the options of the command line are derived from them.

The module imports nothing heavy, because the command line reads it to show its help. The command line also evaluates
the annotations, so this module does not postpone them; types of heavy modules are quoted and need not be importable.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, cast

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.option import Option, show_signature
from selfspec.llm.keyword_hints import check_keywords
from selfspec.text.prompt_template import is_unicode
from selfspec.types.methods import LOWEST_TEMPERATURE

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

    from selfspec.llm.stream import Generation
    from selfspec.speculation.drafter import Drafter
    from selfspec.text.guided import Guide

DEFAULT_NEW_TOKENS = 128
_sampling = partial(Option, panel="Sampling")
TopK = Annotated[int | None, _sampling(min=1, metavar="N", help="Sample from the N most probable tokens only.")]
TopP = Annotated[
    float | None, _sampling(metavar="X", help="Sample from the most probable tokens with total probability X.")
]


@dataclass(frozen=True, slots=True)
class Options:
    """Decoding options, as `LLM.generate` takes them.

    `config`: a `GenerationConfig`; each field means what it means in `transformers`' `generate`. Unset fields come from
    the model's own `generation_config`, then from `transformers`' defaults. The other options override the config.
    Without a `config`, `temperature` is 0, `top_k` and `top_p` are off, and `max_new_tokens` is 128. `settings`: other
    fields of a `GenerationConfig` by name, which override the fields of `config`. `adapter`: the name of one of the
    model's adapters, or `base` for none (None: the default of `Adapters`). With `probabilities`, the generation's
    `events` hold the target's probability of each token.
    """

    config: "GenerationConfig | None" = None
    _: KW_ONLY
    max_new_tokens: Annotated[
        int | None,
        Option(
            flags=("--max-new-tokens", "-n"),
            min=1,
            metavar="N",
            help="Maximum number of new tokens; 128 by default, in a chat 1024.",
        ),
    ] = None
    temperature: Annotated[
        float | None, Option(min=0, metavar="X", help="Sampling temperature; 0, the default, is greedy decoding.")
    ] = None
    top_k: TopK = None
    top_p: TopP = None
    seed: Annotated[
        int | None,
        _sampling(
            min=-1,
            metavar="N",
            help="Seed that makes sampling repeatable, and the same with and without drafting; -1: none.",
        ),
    ] = None
    stop: str | Sequence[str] = ()
    logits_processor: "Sequence[LogitsProcessor]" = ()
    guide: "Guide | None" = None
    rule: Annotated[
        str | None,
        Option(
            help="Verification of drafts: greedy; match (default with a seed), block (default) or token.",
            panel="Drafting",
        ),
    ] = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    probabilities: bool = False

    def __post_init__(self) -> None:
        """Normalise equivalent values: integral floats, seed -1 (none), empty stop strings, nearly greedy sampling."""
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if isinstance(self.stop, str | list | tuple):
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            object.__setattr__(self, "stop", tuple(stop for stop in stops if stop != ""))
        set_greedy(self)

    def check(self) -> None:
        """Raise `SelfspecError` for an option that is invalid for every model."""
        from transformers import GenerationConfig

        from selfspec.speculation.rules import check_rule
        from selfspec.speculation.sampling import as_integer, check_sampling

        if self.max_new_tokens is not None:
            as_integer(self.max_new_tokens, "max_new_tokens", least=1)
        check_sampling(self.temperature or 0.0, self.top_k, self.top_p)
        if self.rule is not None:
            check_rule(self.rule)
        if not isinstance(self.config, GenerationConfig | None):
            raise SelfspecError(
                f"config: expected a transformers GenerationConfig, got {type(self.config).__name__}; other options "
                "are named, as in max_new_tokens=64"
            )
        if not isinstance(self.settings, Mapping):
            raise SelfspecError(f"settings {short(self.settings)}: expected fields of a GenerationConfig by name")
        known = vars(GenerationConfig())
        for name in self.settings:
            if name not in known or name.startswith("_"):
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SelfspecError(f"GenerationConfig has no field '{name}'{hint}")
        sampled = self.settings.get("do_sample")
        if self.temperature is not None and sampled is not None and bool(sampled) != (self.temperature > 0):
            raise SelfspecError(
                f"temperature {self.temperature:g} and do_sample {sampled} contradict each other; leave one of them out"
            )
        stop_texts(self.stop)


def set_greedy(options: Any) -> None:
    """Set frozen options to greedy decoding if `top_p` is 0, or if `temperature` is so low that it means that."""
    temperature, top_p = options.temperature, options.top_p
    try:
        cold = temperature is not None and 0 < temperature < LOWEST_TEMPERATURE
    except TypeError:
        raise SelfspecError(f"temperature {short(temperature)}: expected a number") from None
    if top_p == 0 or cold:
        object.__setattr__(options, "temperature", 0.0)
    if top_p == 0:
        object.__setattr__(options, "top_p", None)


@dataclass(frozen=True, slots=True)
class GenerateOptions(Options):
    """Decoding options of `LLM.generate` and `LLM.stream`; `drafter` replaces the profile's drafter."""

    _: KW_ONLY
    drafter: "Drafter | None" = None


@dataclass(frozen=True, slots=True)
class ManyOptions(Options):
    """Decoding options and the further arguments of `LLM.generate_many`.

    `batch_size`: the most prompts that are decoded at a time. `memory`: size of the KV cache in GiB (None: the default
    of `Batch`). `ended`: called with a prompt's index and generation when the prompt's generation ends.
    """

    _: KW_ONLY
    batch_size: int = 8
    memory: float | None = None
    ended: "Callable[[int, Generation], None] | None" = None


def stop_texts(stop: str | Sequence[str] | None, where: str = "") -> tuple[str, ...]:
    """Return stop strings as a tuple. `where`: a prefix of the error message.

    Raises `SelfspecError` for a stop string that is empty, not a text or not valid Unicode.
    """
    if not isinstance(stop, Iterable | None):
        raise SelfspecError(f"{where}stop {short(stop)}: expected a text, or several")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text and is_unicode(text) for text in stops):
        raise SelfspecError(f"{where}a stop string is empty or not valid text; expected at least one character")
    return stops


P = ParamSpec("P")
OwnerT = TypeVar("OwnerT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
OptionsT = TypeVar("OptionsT", bound=Options)


def options_method(
    options: Callable[P, OptionsT], call: Callable[[OwnerT, RequestT, OptionsT], ResultT]
) -> Callable[Concatenate[OwnerT, RequestT, P], ResultT]:
    """Return a method that takes a request and the fields of `options`, and calls `call(self, request, options)`.

    The method has the name (without a leading `_`), the docstring and the return type of `call`. Its `TypeError` for an
    unknown keyword argument says what was probably meant.
    """
    name = call.__name__.removeprefix("_")
    owner, request = list(inspect.signature(call).parameters.values())[:2]
    from_fields: Callable[..., OptionsT] = options

    def method(*args: Any, **kwargs: Any) -> ResultT:
        signature = inspect.signature(method)
        check_keywords(name, signature.parameters, kwargs)
        given = signature.bind(*args, **kwargs).arguments
        return call(given.pop(owner.name), given.pop(request.name), from_fields(**given))

    method.__name__, method.__doc__ = name, call.__doc__
    show_signature(method, options, owner, request, returns=call.__annotations__["return"])
    return cast("Callable[Concatenate[OwnerT, RequestT, P], ResultT]", method)
