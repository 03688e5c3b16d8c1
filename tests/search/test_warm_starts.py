from __future__ import annotations

import pytest
import torch
from models import plain, small
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.space import Space
from selfspec.search.warm_starts import by_cosines, every_second, first_k, likely, mostly_int4, programme

from selfspec.runtime.forward import LeanRuntime
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import MODES, DraftPath, SkipSet

COSTS = CostModel(context=9, base=0.1, attention=1.0, mlp=2.0, widths=[1], verify=[1.0], round=0.0)
LAYERS = 3


@pytest.fixture(scope="module")
def replay():
    model = small(layers=LAYERS)
    runtime = LeanRuntime(model)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    texts = [TargetText((*p, *plain(runtime, p, 6)), len(p), 6) for p in prompts]
    with Replay(model, texts, depth=2) as replay:
        yield replay


def test_the_first_k():
    space = Space(4)
    paths = first_k(space, [(0, gain) for gain in (0, 7, 6, 5, 4, 3, 2, 1)])
    assert [len(path.skip) for path in paths] == [2, 3, 4, 5]
    assert paths[0] == DraftPath.skipping((1,), (0,))  # variables: attention 0, MLP 0, attention 1, ...


def test_likely_paths_begin_with_few_bits():
    """Then a few of what is left out or reads still less, the rest in int8; then Draft & Verify's."""
    space = Space(10, modes=MODES, head=("full", "int8"))
    gains = tuple(
        (0.0, 1.0, *((0.9 - i / 100, 0.8 - i / 100) if len(of) > 2 else ())) for i, of in enumerate(space.choices)
    )
    paths = likely(space, gains)
    maps = [path.rows(10) for path in paths]
    assert maps[:2] == [("8" * 10, "8" * 10), ("4" * 10, "4" * 10)]
    assert maps[2:5] == [("4" * 10, mlp) for mlp in ("4" * 9 + "8", "8" * 10, "4" * 8 + "88")]
    assert maps[5] == ("4" + "8" * 9, "8" * 10)
    assert any("." in row and "8" in row for rows in maps for row in rows)
    assert maps[-1][0].startswith(".")
    assert "#" in maps[-1][0]
    assert all(path.head == "int8" for path in paths[:9])


@pytest.mark.parametrize(
    ("given", "mlps"),
    [
        ({"modes": ("full", "int4", "skip")}, ["444#", "####", "444#"]),
        ({"modes": ("full", "int8", "int4"), "fixed": SkipSet((), (3,))}, ["448#", "888#"]),  # no MLP of the last layer
        ({"modes": ("full", "int8", "int4"), "granularity": "layer"}, ["4448", "8888", "4448"]),
        ({"modes": ("full", "int8", "skip")}, []),
    ],
)
def test_int4_but_for_some_mlps(given, mlps):
    """They run in the next better mode that the space has."""
    paths = mostly_int4(Space(4, **given))
    assert [path.rows(4)[1] for path in paths] == mlps
    attention = mlps if given.get("granularity") == "layer" else ["4444"] * len(mlps)
    assert [path.rows(4)[0] for path in paths] == attention


def test_every_second_layer():
    assert every_second(Space(6)) == DraftPath.skipping((1, 3), (1, 3))
    assert every_second(Space(6, keep=(3,))) == DraftPath.skipping((1,), (1,))


def test_streams_are_the_whole_models(replay):
    """At every place, what a full pass over the text has there."""
    streams = replay.streams(4)
    assert streams.real.tolist() == [[True] * 4] * 3
    for row, text in enumerate(replay.texts):
        runtime = replay._runtime
        fresh = LeanRuntime(runtime.model)
        with fresh.session(len(text.tokens)):
            step = fresh.forward(
                torch.tensor([text.tokens]), 0, hidden=range(LAYERS + 1), between=range(LAYERS), logits=None
            )
        places = slice(text.prompt_length - 1, text.prompt_length + 3)
        for layer in range(LAYERS + 1):
            assert torch.allclose(streams.entering[layer][row], step.hidden[layer][0, places], atol=1e-10)
        for layer in range(LAYERS):
            assert torch.allclose(streams.between[layer][row], step.between[layer][0, places], atol=1e-10)


def test_sub_layers_run_on_their_own_give_the_forward(replay):
    streams = replay.streams(3)
    x = streams.entering[0]
    for layer in range(LAYERS):
        x = x + streams.branch(layer, "attention", x)
        assert torch.allclose(x, streams.between[layer], atol=1e-10)
        x = x + streams.branch(layer, "mlp", x)
        assert torch.allclose(x, streams.entering[layer + 1], atol=1e-10)


def test_cosines_are_one_for_what_changes_nothing(replay):
    space, streams = Space(LAYERS), replay.streams(3)
    values = [1 + skipped for whole, skipped in by_cosines(space, streams) if whole == 0]
    assert len(values) == 6
    assert all(-1 <= value < 1 for value in values)
    expected = torch.cosine_similarity(streams.entering[0].float(), streams.between[0].float(), dim=-1).mean()
    assert values[0] == pytest.approx(float(expected))


def test_the_programme_skips_what_does_nothing():
    """Sub-layers that write nothing are skipped first, and cost no likeness to the whole model."""
    model = small(layers=LAYERS)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    runtime = LeanRuntime(model)
    texts = [TargetText((*p, *plain(runtime, p, 6)), len(p), 6) for p in ([1, 2, 3], [4, 5])]
    space = Space(LAYERS)
    with Replay(model, texts, depth=2) as replay:
        planned = programme(space, replay.streams(4), COSTS)
    by_price = {len(skip.attention) * 1.0 + len(skip.mlp) * 2.0: skip for skip in (path.skip for path in planned)}
    assert by_price[1.0] == SkipSet((2,), ())
    assert by_price[2.0] == SkipSet((), (1,))
    assert by_price[3.0] == SkipSet((2,), (1,))
    assert all(skip.attention and skip.mlp for price, skip in by_price.items() if price > 4)
    middle = [abs(price / (3.0 * LAYERS) - 0.5) for price in by_price]
    assert middle[0] == min(middle)


def test_the_programme_keeps_what_is_to_be_kept(replay):
    streams = replay.streams(3)
    for granularity in ("sublayer", "layer"):
        space = Space(LAYERS, keep=(0,), granularity=granularity)
        for skip in (path.skip for path in programme(space, streams, COSTS)):
            assert 0 not in skip.attention
            assert 0 not in skip.mlp
            assert granularity == "sublayer" or skip.attention == skip.mlp
