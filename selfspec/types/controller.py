"""The specification of a controller in a profile: plain data, from which `selfspec.controllers` makes controllers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from selfspec.basics.checked_model import Data

Option = Annotated[int, Field(ge=-(10**9), le=10**9)] | Annotated[float, Field(allow_inf_nan=False)]


class ControllerSpec(Data):
    """The registered name of a controller, and its options, which `selfspec.controllers` checks."""

    name: str = Field(description="Name: fixed, static, adaptive or rate.")
    options: dict[str, Option] = Field(
        {}, description="Options, such as threshold or k_max; omitted options keep their defaults."
    )
