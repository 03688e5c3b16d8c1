"""`selfspec report`: one page that holds everything, looked at in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from studies import small_study

from selfspec.cli import main
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet

BENCH = Path(__file__).parents[2] / "scripts" / "bench.json"
SCRIPT = "<script>document.title = 'owned'</script>"
SECTIONS = ["conditions", "skip-map", "search", "acceptance", "bench", "texts"]
PROMPTS = [f"# {SCRIPT}\ndef main(args):\n    ", 'import os\n\nNAME = "<b>&amp;</b>"\n']


def files(folder: Path) -> None:
    """One file of each kind, with what a page should not take for its own."""
    small_study(folder / "trials.jsonl")
    shutil.copy(BENCH, folder / "b.json")
    fixed = ControllerSpec(name="fixed", options={"k": 3})
    profile = find_profile_file("stdlib-llama-3.7m").with_controller(fixed).model_copy(update={"note": SCRIPT})
    write_profile(profile, folder / "p.yaml")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))


@pytest.fixture
def cli(cli, tmp_path):
    """`selfspec report` in a folder with files of each kind: exit code, standard error, the page."""
    files(tmp_path)

    def run(*args):
        code, _, err = cli("report", *args)
        page = tmp_path / "report.html"
        return code, err, page.read_text() if page.exists() else None

    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with all that a page can show, made once."""
    folder = tmp_path_factory.mktemp("page")
    files(folder)
    given = ["--profile", "p.yaml", "--study", "trials.jsonl", "--bench", "b.json", "--prompts", "prompts.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr(sys, "argv", ["selfspec", "report", *given, "--max-new-tokens", "16", "--num-prompts", "2"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    return folder / "report.html"


@pytest.fixture
def opened(browser, page):
    """Opens the page at a width: the tab, what it asked for, and what went wrong."""
    contexts = []

    def at(width, **how):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **how))
        tab, asked, wrong = contexts[-1].new_page(), [], []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(page.as_uri())
        return tab, asked, wrong

    yield at
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_asks_for_nothing(opened, page, width):
    tab, asked, wrong = opened(width)
    assert asked == [page.as_uri()]
    assert wrong == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width, "nothing to be scrolled sideways"
    assert tab.eval_on_selector_all("main > section", "all => all.map(one => one.id)") == SECTIONS
    assert tab.eval_on_selector_all("nav a", "all => all.map(one => one.hash.slice(1))") == SECTIONS
    for card in tab.locator(".plot").all():
        assert card.bounding_box()["width"] <= width
        assert card.locator("svg").bounding_box()["width"] >= 500, "large enough to be read, or scrolled in its card"
    if width == 1280:
        assert tab.evaluate("[...document.querySelectorAll('.plot')].every(c => c.scrollWidth <= c.clientWidth)")


def test_what_came_from_outside_is_text(opened):
    tab, _, _ = opened(1280)
    assert tab.locator("script").count() == 0
    assert tab.title() == "selfspec: builtin"
    assert SCRIPT in tab.locator("#conditions").inner_text()
    assert "a <script>alert(1)</script> model" in tab.locator("#conditions").inner_text(), "the study's model"
    tab.locator("summary").nth(1).click()
    shown = tab.eval_on_selector_all(".prompt", "all => all.map(one => one.textContent)")
    assert shown == PROMPTS


def test_a_token_says_what_is_known_of_it(opened):
    tab, _, _ = opened(1280)
    tokens = tab.locator("#texts .tokens").first.locator("[data-said]")
    assert tokens.count() > 5
    said = tokens.evaluate_all("all => all.map(one => one.dataset.said)")
    assert all(re.search(r"; round \d+; .*the model's probability \d\.\d+", text) for text in said)
    assert any(text.startswith("accepted draft; round") for text in said)
    shown = "one => getComputedStyle(one, '::after').content"
    token = tokens.nth(3)
    assert token.evaluate(shown) == "none"
    token.hover()
    assert said[3] in token.evaluate(shown).replace('\\"', '"')
    tab.mouse.move(0, 0)
    assert token.evaluate(shown) == "none"
    tokens.nth(2).focus()
    tab.keyboard.press("Tab")
    assert said[3] in token.evaluate(shown).replace('\\"', '"'), "by keyboard, too"


def test_everyone_can_read_it(opened):
    tab, _, _ = opened(1280)
    assert tab.evaluate("document.documentElement.lang") == "en"
    assert [tab.locator(name).count() for name in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    described = tab.eval_on_selector_all(".plot svg", "all => all.map(one => one.getAttribute('aria-label') || '')")
    assert len(described) == 9
    assert all(len(text) > 40 for text in described)
    assert tab.locator("figcaption").count() == len(described)
    ids = tab.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(set(ids)) == len(ids)


def test_it_is_readable_in_the_dark(opened):
    light, dark = (opened(1280, color_scheme=scheme)[0] for scheme in ("light", "dark"))
    brightness = (
        "s => getComputedStyle(document.querySelector(s))[P].match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    for tab, ink_is_darker in ((light, True), (dark, False)):
        ink, paper = (
            tab.evaluate(brightness.replace("[P]", f"['{name}']"), "body") for name in ("color", "backgroundColor")
        )
        assert abs(ink - paper) > 450
        assert (ink < paper) is ink_is_darker
        assert tab.evaluate(brightness.replace("[P]", "['backgroundColor']"), ".plot") == 3 * 255, "plots stay on white"


def test_a_profile_alone(cli):
    code, err, page = cli("--profile", "stdlib-llama-3.7m", "--no-sample")
    assert (code, err) == (0, "saved report.html\n")
    assert "skipped: 9 of 16 attentions and 10 of 16 MLPs" not in page
    assert "9 of 16 attentions and 10 of 16 MLPs" in page
    assert "Skip map. Skipped while drafting: attention of layers 2, 3, 6, 8, 10" in page
    for option in ("--study FILE", "--bench FILE", "without --no-sample"):
        assert option in page
    assert page.count("<svg") == 2, "the skip map, and acceptance by confidence"
    assert "<td>0.935 (0.892 to 0.966)</td><td>16 x 64, held out</td>" in page
    assert "Intel(R) Xeon(R) Processor @ 2.50GHz, 2 cores" in page


def test_a_study_alone_shows_its_best_trial(cli):
    code, _, page = cli("--study", "selfspec", "--storage", "trials.jsonl", "--no-sample")
    assert code == 0
    assert "Skip map. Skipped while drafting: attention of layers 0, 1; MLP of layers none." in page
    assert "predicted 1.2 times plain decoding" in page
    assert "4 trials of trials.jsonl" in page
    assert "<script>" not in page
    assert "The profile holds no acceptance by confidence" in page


def test_modes_are_told(cli, tmp_path):
    path = DraftPath(SkipSet((3,)), int8=SkipSet((1, 2), (7,)), head="int4")
    model = find_profile_file("stdlib-llama-3.7m").model
    write_profile(Profile(model=model, draft=LayerSkipSpec.from_path(path)), tmp_path / "modes.yaml")
    code, _, page = cli("--profile", "modes.yaml", "--no-sample")
    assert code == 0
    said = "1 of the model&#39;s 32 attention and MLP sub-layers are skipped, 3 run in int8, the head runs in int4"
    assert f"{said}; a draft step reads " in page
    assert "How drafts run" in page
    assert "attention of layers 3; MLP of layers none. In int8: attention of layers 1, 2; MLP of layers 7." in page


def test_a_benchmark_alone_shows_no_profile(cli):
    code, _, page = cli("--bench", "b.json")
    assert code == 0
    assert "No profile was given" in page
    assert "0.935 (0.891 to 0.956)" in page
    assert page.count("<svg") == 2


def test_a_profile_that_skips_nothing_is_not_decoded_with(cli, tmp_path):
    (tmp_path / "none.yaml").write_text("version: 2\nmodel: {layers: 16, name: builtin}\n")
    code, _, page = cli("--profile", "none.yaml")
    assert code == 0
    assert "The profile drafts nothing" in page


WRONG = {
    "a model that is not here": (
        ["--profile", "llama-2-13b-draft-verify"],
        "; --no-sample writes the page without loading the model",
    ),
    "no model": (
        ["--profile", "p.yaml", "--model", "./no-model"],
        "model ./no-model: no such folder; expected a folder, a GGUF file, a hub id, smollm2-135m, or 'builtin'; "
        "--no-sample writes the page without",
    ),
    "another model": (
        ["--profile", "small.yaml", "--model", "builtin"],
        "layers 4 in the profile, 16 in the model (builtin); ",
    ),
    "a model alone": (["--model", "my/model"], "nothing to report on; expected --profile, --study or --bench"),
    "storage alone": (["--storage", "trials.jsonl"], "--storage trials.jsonl: given without --study"),
    "no study": (["--study", "no.jsonl"], "no.jsonl: no such file; expected a file of trials"),
    "no trials": (["--study", "empty.jsonl"], "study: not named; the storage holds no study"),
    "a study of little": (
        ["--study", "little.jsonl"],
        "(ValidationError); delete it to start anew, or give --profile",
    ),
    "no bench": (["--bench", "p.yaml"], "p.yaml: not valid JSON"),
    "no profile": (["--profile", "nothing"], "no shipped profile of that name"),
    "over the bench": (["--bench", "b.json", "--out", "b.json"], "--out b.json would write over a file to be shown"),
    "over the prompts": (["--prompts", "prompts.jsonl", "--out", "prompts.jsonl"], "would write over the data file"),
    "no folder": (["--out", "no/report.html"], "the folder no does not exist"),
    "no prompts": (["--profile", "stdlib-llama-3.7m", "--prompts", "no.jsonl"], "no.jsonl: no such file"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens"),
    "too many tokens": (["--profile", "stdlib-llama-3.7m", "--max-new-tokens", "5000"], "outgrow the model's context"),
    "dtype": (["--dtype", "float3"], "float3"),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_clear_line(cli, tmp_path, args, said):
    (tmp_path / "small.yaml").write_text(
        "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {attention: [1]}}\n"
    )
    (tmp_path / "empty.jsonl").write_text("")
    small_study(tmp_path / "little.jsonl", **{"calibration text": None})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, err, page = cli(*args)
    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert page is None
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
