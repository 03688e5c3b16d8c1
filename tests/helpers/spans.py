"""What coloured HTML says."""

from __future__ import annotations

from html.parser import HTMLParser


class Read(HTMLParser):
    """The text, the attributes of every span, and that every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.spans: list[dict[str, str | None]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        if tag == "span":
            self.spans.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
