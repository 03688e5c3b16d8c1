"""Registry of the kinds of draft heads. A new kind needs one class, and one entry in `HEADS`."""

from __future__ import annotations

from selfspec.basics.errors import SelfspecError, reason
from selfspec.draft_modules.chimera import ChimeraHead
from selfspec.draft_modules.eagle import EagleHead
from selfspec.draft_modules.heads import Head
from selfspec.draft_modules.mlp_heads import HydraHead, MedusaHead, MlpHead
from selfspec.draft_modules.module_files import PartFile
from selfspec.draft_modules.mtp import MtpHead
from selfspec.runtime.base import Runtime

HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (EagleHead, MedusaHead, HydraHead, MlpHead, MtpHead, ChimeraHead)
}


def make_head(target: Runtime, part: PartFile, *, low: bool = True) -> Head:
    """Return the draft head in a part file, loaded for `target`; `low`: quantise its weights to int8.

    Raises `SelfspecError` if the part file holds no head, or a head that does not fit the target.
    """
    if part.kind not in HEADS:
        raise SelfspecError(f"the part is of kind '{part.kind}'; expected a head ({', '.join(HEADS)})")
    try:
        return HEADS[part.kind](target, part, low=low)
    except SelfspecError:
        raise
    except Exception as error:  # a damaged or foreign file can raise anything
        raise SelfspecError(f"part file of a head of kind {part.kind}: wrong contents ({reason(error)})") from None
