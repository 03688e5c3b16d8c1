"""lm-evaluation-harness's `hf` model with speculative decoding."""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from selfspec.basics.errors import SelfspecError
from selfspec.builtin import NAME
from selfspec.integrations.custom_generate import hf
from selfspec.models.loading import gguf_file, load_model


@register_model("selfspec")
class SelfspecLM(HFLM):  # type: ignore[misc]
    """lm-evaluation-harness's `hf` model with speculative decoding in `generate_until`; its scores are unchanged.

    `pretrained` may also be `builtin`, `smollm2-135m` or a GGUF file, loaded as by `selfspec.load`. `profile`,
    `method`, `rule`, `layout` and `extra_memory`: as in `selfspec.hf`. Raises `SelfspecError` as `selfspec.hf` does,
    and for a `tokenizer` passed with `builtin`, `smollm2-135m` or a GGUF file, because these models include a
    tokenizer.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        profile: str = "auto",
        method: str | None = None,
        rule: str | None = None,
        layout: str | None = None,
        extra_memory: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._drafted = hf(profile, method=method, rule=rule, layout=layout, extra_memory=extra_memory)
        if isinstance(pretrained, str) and (pretrained == NAME or gguf_file(pretrained) is not None):
            if kwargs.get("tokenizer") is not None:
                raise SelfspecError(f"tokenizer: given for model {pretrained}, which includes one; expected none")
            device, dtype = kwargs.get("device") or "auto", kwargs.get("dtype") or "auto"
            pretrained, kwargs["tokenizer"] = load_model(pretrained, device=device, dtype=dtype)
        super().__init__(pretrained, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(*args, **kwargs, custom_generate=self._drafted)
