"""The page, in a real browser: streams in colours, live figures, stopping, keys; on a desk, on a phone, in the dark."""

from __future__ import annotations

import pytest
from batches import ToyBatch, continued
from servers import served, until

from selfspec.server.app import page
from selfspec.show.markup import LOOKS
from selfspec.types.events import Origin

PROMPT = "def main(args):"
DONE = "#send:not([disabled])"


@pytest.fixture
def opened(browser):
    """Opens a server's page: the tab, what it asked for, and what went wrong."""
    contexts = []

    def at(one, width=1100, **how):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **how))
        tab, asked, wrong = contexts[-1].new_page(), [], []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(f"{one.url}/")
        return tab, asked, wrong

    yield at
    for context in contexts:
        context.close()


def send(tab, text, **fields):
    for name, value in fields.items():
        tab.fill(f"#{name}", str(value))
    tab.fill("#prompt", text)
    tab.click("#send")


def test_an_answer_streams_in_its_colours(opened, toy, chatting):
    tab, asked, wrong = opened(toy)
    tab.wait_for_selector("#model:has-text('toy, 1025 tokens, chat')")
    send(tab, PROMPT, limit=40, seed=3, temperature=0.5)
    tab.wait_for_selector("article.answer:not([aria-busy])")
    expected = continued(chatting.encode([{"role": "user", "content": PROMPT}]), 40)
    text = chatting.tokenizer.decode(expected, skip_special_tokens=True)
    assert tab.locator("article.user").text_content() == PROMPT
    assert tab.locator("article.answer").text_content() == text
    drafted = tab.locator("article.answer span.accepted-draft").first
    assert drafted.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 158, 115, 0.3)"
    assert tab.locator("article.answer span.plain").count() > 3
    assert tab.locator("#acceptance").text_content() == "100%"
    assert tab.locator("#counts").text_content() == "(20 of 20 drafted)"
    assert tab.locator("#tokens").text_content() == "40"
    assert float(tab.locator("#rate").text_content()) > 0
    assert wrong == []
    assert {url.removeprefix(toy.url) for url in asked} == {"/", "/v1/models", "/v1/chat/completions"}


def test_what_was_said_before_is_said_again(opened, toy):
    tab, _, _ = opened(toy)
    for number in (1, 2):
        send(tab, f"turn {number}", limit=3)
        tab.wait_for_selector(f"article.answer:not([aria-busy]) >> nth={number - 1}")
        tab.wait_for_selector(DONE)
    until(lambda: len(toy.log) > 1)
    first, second = [line["prompt_tokens"] for line in toy.log if line["path"].endswith("completions")][-2:]
    assert second > first * 1.5
    tab.click("#clear")
    assert tab.locator("article").count() == 0


def test_a_text_is_stopped(opened, chatting):
    with served(chatting, ToyBatch(chatting, seconds=0.01)) as slow:
        tab, _, wrong = opened(slow)
        send(tab, PROMPT, limit=900)
        tab.wait_for_selector("article.answer span", state="attached")
        assert tab.locator("#send").is_disabled()
        assert float(tab.locator("#tokens").text_content()) < 900, "it is live"
        tab.click("#stop")
        tab.wait_for_selector(DONE)
        until(lambda: slow.service.idle)
        assert wrong == []
        assert tab.locator("article.wrong").count() == 0


def test_a_key_is_asked_for(opened, chatting):
    with served(chatting, ToyBatch(chatting), api_key="secret") as locked:
        tab, _, _ = opened(locked)
        tab.wait_for_selector("article.wrong:has-text('wants its API key')")
        tab.fill("#key", "secret")
        send(tab, PROMPT, limit=4)
        tab.wait_for_selector("article.answer:not([aria-busy])")
        assert tab.locator("article.wrong").count() == 0


def test_an_error_is_shown_as_text(opened, toy):
    tab, _, _ = opened(toy)
    tab.wait_for_selector("#model:has-text('toy')")
    send(tab, "<img src=x onerror=alert(1)>", limit=5000)
    tab.wait_for_selector("article.wrong[role=alert]:has-text('tokens that fit')")
    assert tab.locator("article.user").text_content() == "<img src=x onerror=alert(1)>"
    assert tab.locator("article.answer").count() == 0


def test_a_model_without_a_template_continues_texts(opened, llm):
    with served(llm, ToyBatch(llm)) as bare:
        tab, _, wrong = opened(bare)
        tab.wait_for_selector("#model:has-text('continues texts')")
        send(tab, PROMPT, limit=4)
        tab.wait_for_selector("article.answer:not([aria-busy])")
        text = llm.tokenizer.decode(continued(llm.encode(PROMPT), 4))
        assert tab.locator("article.answer").text_content() == PROMPT + text
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(opened, toy, scheme):
    tab, _, _ = opened(toy, 390, color_scheme=scheme)
    send(tab, PROMPT, limit=60)
    tab.wait_for_selector("article.answer:not([aria-busy])")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("document.documentElement.scrollHeight") <= 800, "the form stays in sight"
    assert tab.locator("#send").bounding_box()["height"] >= 40
    light = "e => getComputedStyle(e)[P].match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    ink, paper = (
        tab.locator("body").evaluate(light.replace("P", f"'{name}'")) for name in ("color", "backgroundColor")
    )
    assert (ink < paper) is (scheme == "light")
    assert abs(ink - paper) > 450


def test_every_origin_has_its_look_and_meaning():
    shown = page()
    for origin in Origin:
        assert f'title="{origin.meaning}">{origin}</span>' in shown.replace("&#x27;", "'")
        assert f".{origin.replace(' ', '-')} {{ {LOOKS[origin].css} }}" in shown
    assert "http" not in shown.replace("http-equiv", ""), "it needs nothing but its server"
