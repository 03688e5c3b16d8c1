from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from spans import Read

from selfspec.show.markup import LOOKS, legend_html, tokens_html
from selfspec.types.events import Origin, Rejected, TokenEvent
from selfspec.types.stats import Stats


def events(*texts, origin=Origin.PLAIN):
    return [TokenEvent(i, text, origin, i + 1) for i, text in enumerate(texts)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)))
def test_its_text_is_the_text(texts):
    assert Read(tokens_html(events(*texts))).text == "".join(texts)


def test_markup_in_the_text_is_text():
    html = tokens_html(events("<b>", "&amp;", '"', "'", " \t\n", "\r\n", origin=Origin.BONUS))
    assert "<b>" not in html
    assert "&#13;\n" in html
    assert Read(html).text == "<b>&amp;\"' \t\n\r\n"


def test_hovering_says_what_is_known():
    rejected = (Rejected(1, ' "x"\n', 0.25), Rejected(2, "y"))
    corrected = TokenEvent(3, "z", Origin.CORRECTED, 4, probability=0.5, rejected=rejected)
    drafted = TokenEvent(3, "z", Origin.ACCEPTED_DRAFT, 4, place=2, confidence=0.75, source="lookup")
    assert [span["title"] for span in Read(tokens_html([corrected, drafted])).spans] == [
        'corrected; round 4; the model\'s probability 0.500; rejected: " \\"x\\"\\n" (0.250), "y"',
        "accepted draft; round 4; position 2 in the draft; from: lookup; the draft's confidence 0.750",
    ]


def test_origins_differ_without_colour_too():
    looks = [(look.bold, look.italic, look.underline) for look in LOOKS.values()]
    assert len(set(looks)) == len({look.color for look in LOOKS.values()}) == len(Origin)


def test_every_style_is_inline():
    html = "".join(tokens_html(events("a", origin=origin)) for origin in Origin)
    assert "class=" not in html
    styles = [span.get("style") for span in Read(html).spans]
    assert styles == [None, *(LOOKS[origin].css for origin in list(Origin)[1:])]


def test_the_legend_counts():
    every = [*events("a", "b", "c", origin=Origin.ACCEPTED_DRAFT), *events("d", origin=Origin.BONUS)]
    assert Read(legend_html(every)).text == "accepted draft 3 (75%) · bonus 1 (25%)"
    stats = Stats(drafted=4, accepted=3)
    assert Read(legend_html(every, stats)).text.endswith(" · acceptance 75% (3 of 4 drafted)")
    stats.sources.update({"lookup": 1, "draft path": 2})
    assert Read(legend_html(every, stats)).text.endswith(" · acceptance 75% (3 of 4 drafted: draft path 2, lookup 1)")
    del stats.sources["lookup"]
    assert Read(legend_html(every, stats)).text.endswith(" · acceptance 75% (3 of 4 drafted)"), "nothing else guessed"
    assert Read(legend_html(events("a"), Stats())).text == "plain 1 (100%) · nothing was drafted"
    assert Read(legend_html([], Stats())).text == "nothing was drafted"
