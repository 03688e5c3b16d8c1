"""The web page for trying a model: one HTML file, which loads nothing from any other server."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from selfspec.show.markup import LOOKS
from selfspec.types.events import Origin

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> str:
    """Return the page's HTML, with the colours and explanations of token origins that notebooks show too."""
    styles = "\n".join(f".{_name(origin)} {{ {look.css} }}" for origin, look in LOOKS.items())
    legend = " ".join(
        f'<span class="{_name(origin)}" title="{escape(origin.meaning)}">{escape(origin)}</span>' for origin in Origin
    )
    text = files("selfspec.server").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("/* looks */", styles).replace("<!-- legend -->", legend)


def _name(origin: Origin) -> str:
    return origin.replace(" ", "-")
