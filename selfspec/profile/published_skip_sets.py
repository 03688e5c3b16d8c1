"""Import of skip sets that other projects published.

`draft-verify`: the JSON file of Draft & Verify (2309.08168), which SWIFT (2410.06916) publishes too: an object of
skip sets by key, each an object of two lists, `attention` and `mlp`, of layers counted from 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError, one_line, short
from selfspec.basics.files import read_text
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile, Published
from selfspec.types.draft_path import SkipSet
from selfspec.types.identity import Identity
from selfspec.types.methods import MOST_LAYERS

PARTS = ("attention", "mlp")
NOTE = "published, not measured here; the controller is selfspec's default, not part of what was published"
_SHOWN = 20  # most keys listed in an error


def parse_draft_verify(text: str, key: str | None = None, *, source: str) -> tuple[str, SkipSet]:
    """Parse the JSON text of a `draft-verify` file; return the key and the skip set under that key.

    `key` may be None if the file has a single key. `source` names the file in errors. Raises only `SelfspecError`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except SelfspecError as error:
        raise SelfspecError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SelfspecError(f"{source}: not valid JSON ({one_line(error)})") from None
    if not isinstance(data, dict) or not data:
        raise SelfspecError(f"{source}: expected an object of skip sets by a model's key, got {short(data)}")
    if key is None:
        if len(data) > 1:
            raise SelfspecError(f"{source} holds {len(data)} skip sets; name one with --key: {_keys(data)}")
        key = next(iter(data))
    elif key not in data:
        raise SelfspecError(f"{source} holds no skip set {short(key)}; it holds {_keys(data)}")
    where = f"{source}: {short(key)}"
    return key, _skip_set(data[key], where)


FORMATS: dict[str, Callable[..., tuple[str, SkipSet]]] = {"draft-verify": parse_draft_verify}


def check_format(name: str) -> None:
    """Raise `SelfspecError` if `name` is not one of `FORMATS`."""
    if name not in FORMATS:
        raise SelfspecError(f"format {short(name)} is not known; known: {', '.join(FORMATS)}")


def read_published(path: Path, key: str | None = None, *, format_name: str = "draft-verify") -> tuple[str, SkipSet]:
    """Read a file of published skip sets; return the key and the skip set under that key.

    `key` may be None if the file has a single key. Raises `SelfspecError` for an unreadable file, a missing key, or an
    unknown format.
    """
    check_format(format_name)
    return FORMATS[format_name](read_text(path), key, source=str(path))


def published_profile(skip: SkipSet, model: Identity, published: Published) -> Profile:
    """Build a profile of a published skip set, with the default controller.

    Raises `SelfspecError` if the skip set names a layer that the model does not have.
    """
    skip.check(model.layers)
    return Profile(model=model, draft=LayerSkipSpec.from_path(skip), published=published, note=NOTE)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, raising an error for a repeated key, of which JSON readers silently keep the last."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise SelfspecError(f"{short(key)} is given twice")
        made[key] = value
    return made


def _skip_set(value: Any, where: str) -> SkipSet:
    if not isinstance(value, dict) or value.keys() != set(PARTS):
        raise SelfspecError(f"{where}: expected two lists of layers, 'attention' and 'mlp', got {short(value)}")
    for part in PARTS:
        layers = value[part]
        if not isinstance(layers, list):
            raise SelfspecError(f"{where}: {part}: expected a list of layers, got {short(layers)}")
        wrong = [layer for layer in layers if type(layer) is not int or not 0 <= layer < MOST_LAYERS]
        if wrong:
            raise SelfspecError(f"{where}: {part}: {short(wrong[0])} is no layer; expected whole numbers from 0 on")
    try:
        return SkipSet(tuple(value["attention"]), tuple(value["mlp"]))
    except SelfspecError as error:
        raise SelfspecError(f"{where}: {error}") from None


def _keys(data: Mapping[str, Any]) -> str:
    more = f" and {len(data) - _SHOWN} more" if len(data) > _SHOWN else ""
    return ", ".join(short(key) for key in list(data)[:_SHOWN]) + more
