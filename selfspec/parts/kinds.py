"""The kinds of trained heads. A new one is one class, and one line here."""

from __future__ import annotations

from selfspec.basics.errors import SelfspecError
from selfspec.parts.chimera import ChimeraHead
from selfspec.parts.eagle import EagleHead
from selfspec.parts.files import PartFile
from selfspec.parts.heads import Head
from selfspec.parts.mtp import MtpHead
from selfspec.parts.steps import HydraHead, MedusaHead, MlpHead
from selfspec.runtime.forward import Runtime

HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (EagleHead, MedusaHead, HydraHead, MlpHead, MtpHead, ChimeraHead)
}


def make_head(target: Runtime, part: PartFile, *, low: bool = True) -> Head:
    """The head that a part holds, at work for a model. Raises `SelfspecError` where it is none, or not for it."""
    if part.kind not in HEADS:
        raise SelfspecError(f"the part is of kind '{part.kind}'; want a head ({', '.join(HEADS)})")
    return HEADS[part.kind](target, part, low=low)
