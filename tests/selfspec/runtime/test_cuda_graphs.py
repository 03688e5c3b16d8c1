"""Recorded passes, which a tape replays on a CPU as a CUDA graph does on a GPU."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from fake_cuda import fake_cuda as fake_cuda
from families import FAMILY_CONFIGS
from heads import random_head
from models import CONFIGS, chunked, plain, run, small, tiny, tokens_for
from natives import random_tree
from tape import Tape

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import clock
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafters.head_drafter import HeadDrafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.runtime.cuda_graphs import ROWS, CudaRecorder, recorder_for, rounded_up
from selfspec.runtime.forward import WARM_ROWS, LeanRuntime
from selfspec.runtime.paged import cache_of
from selfspec.speculation.drafts import Draft
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import DraftPath, SkipSet

VOCABULARY = 11
PROMPTS = [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2]]
SKIP = DraftPath(SkipSet((1,), (0, 2)))
LOW = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
WORDS = DraftPath(SkipSet((1,), ()), (1, 2, 4, 5, 8, 9))
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
WITHOUT_EXPERTS = {name: config for name, config in FAMILY_CONFIGS.items() if name not in EXPERTS}
DRAFTERS = {
    "plain": lambda runtime: PlainDrafter(),
    "layer skip": lambda runtime: LayerSkipDrafter(runtime, SKIP, FixedK(3)),
    "few bits, candidates": lambda runtime: LayerSkipDrafter(
        runtime, LOW, StaticThreshold(0.2, 4), candidates=3, confidence=Confidence(bias=0.2, probability=0.4, gap=0.8)
    ),
    "draft vocabulary": lambda runtime: LayerSkipDrafter(runtime, WORDS, FixedK(3)),
    "head": lambda runtime: HeadDrafter(random_head(runtime, range(10)), FixedK(4)),
}


@pytest.mark.parametrize(
    "config",
    [*CONFIGS.values(), *WITHOUT_EXPERTS.values()],
    ids=[*CONFIGS, *(f"family {name}" for name in WITHOUT_EXPERTS)],
)
def test_recorded_passes_give_what_others_give(config):
    """Far beyond windows, and where the slots that are seen are rounded up anew."""
    model = tiny(config)
    widths = [5, *(1, 3, 2, 4) * 8]
    tokens, tape = tokens_for(model, n=sum(widths)), Tape()
    ours = chunked(LeanRuntime(model, recorder=tape), tokens, widths)
    torch.testing.assert_close(ours, chunked(LeanRuntime(model), tokens, widths), atol=1e-9, rtol=1e-9)
    assert (tape.recorded, tape.replayed) == (5, 1 + 4 * 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recorded_passes_with_fused_attention(dtype):
    """As on a GPU: float16 on a CPU is computed neither natively nor by small products."""
    model = tiny(CONFIGS["llama"], dtype=dtype)
    widths = [5, *(1, 3, 2, 4) * 3]
    tokens, tape = tokens_for(model, n=sum(widths)), Tape()
    if dtype == torch.bfloat16:
        assert LeanRuntime(model).native is False  # its sizes are no multiples of a vector's
    ours, theirs = (
        chunked(one, tokens, widths).double() for one in (LeanRuntime(model, recorder=tape), LeanRuntime(model))
    )
    assert tape.replayed == 1 + 4 * 3
    assert float((ours - theirs).norm()) < 0.02 * float(theirs.norm())


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "match"])
def test_texts_are_the_same(make, temperature):
    model, tape = small(VOCABULARY, seed=2), Tape()
    recorded, others = LeanRuntime(model, kernel=fake, recorder=tape), LeanRuntime(model, kernel=fake)
    drafter = make(recorded)
    for prompt in PROMPTS:
        seed = 3 if temperature else None
        ours, theirs = (
            run(runtime, one, prompt, 30, sampler=Sampler(temperature=temperature, seed=seed))
            for runtime, one in ((recorded, drafter), (others, make(others)))
        )
        assert (
            ours[0]
            == theirs[0]
            == run(others, PlainDrafter(), prompt, 30, sampler=Sampler(temperature=temperature, seed=seed))[0]
        )
        assert [outcome.draft.tokens for outcome in ours[1]] == [outcome.draft.tokens for outcome in theirs[1]]
    assert tape.replayed > 3 * tape.recorded > 0


def test_prompts_are_not_recorded_however_short():
    tape = Tape()
    runtime = LeanRuntime(small(VOCABULARY, seed=2), recorder=tape)
    for n in range(2, 9):
        run(runtime, PlainDrafter(), [1] * n, 3)
    assert (tape.recorded, tape.replayed) == (1, 7 * 2)  # the decode step
    run(runtime, PlainDrafter(), [1], 3)
    assert (tape.recorded, tape.replayed) == (1, 7 * 2 + 3)  # a prompt of one token is a decode step


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_sequences_together(make):
    model, tape = small(VOCABULARY, seed=2), Tape()
    alone = [plain(LeanRuntime(model), prompt, 24) for prompt in PROMPTS]
    runtime = LeanRuntime(model, rows=3, kernel=fake, recorder=tape)
    seqs = [SequenceState(list(prompt), 24, Sampler(), frozenset()) for prompt in PROMPTS]
    waiting = list(seqs)
    with Engine(runtime, make(runtime)) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < 3:
                engine.join(waiting.pop(0))
            engine.step()
    assert [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, PROMPTS, strict=True)] == alone
    assert tape.replayed > 0


def test_trees_and_rows():
    """Random drafts for random rows, over and over, so that recordings meet other masks, places and lengths."""
    model, tape, chance = small(VOCABULARY, seed=2), Tape(), random.Random(0)
    ours, theirs = LeanRuntime(model, rows=3, recorder=tape), LeanRuntime(model, rows=3)
    known = torch.randint(VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(0))
    with ours.session(100), theirs.session(100):
        for runtime in (ours, theirs):
            runtime.forward(known, 0, logits=None)
        for _ in range(60):
            rows = sorted(chance.sample(range(3), chance.randint(1, 3)))
            nodes = chance.randint(0, 3)
            placed = []
            for row in rows:
                tree = random_tree(chance, nodes)
                draft = Draft(tuple(token % VOCABULARY for token in tree.tokens), tree.parents, None, tree.q_row)
                placed.append(PlacedDraft(row, chance.randrange(VOCABULARY), chance.randint(10, 59), draft))
            for one, other in zip(
                ours.forward_drafts(placed, hidden=(1, 3)), theirs.forward_drafts(placed, hidden=(1, 3)), strict=True
            ):
                torch.testing.assert_close(one.logits, other.logits, atol=1e-9, rtol=1e-9)
                for layer in (1, 3):
                    torch.testing.assert_close(one.hidden[layer], other.hidden[layer], atol=1e-9, rtol=1e-9)
    assert tape.replayed > 25


def test_what_a_pass_gave_stays():
    runtime = LeanRuntime(small(VOCABULARY), recorder=Tape())
    with runtime.session(20):
        steps = [runtime.forward(torch.tensor([[i]]), i, hidden=(1,)) for i in range(8)]
        kept = [(step.logits.clone(), step.hidden[1].clone()) for step in steps]
        for i in range(8, 12):
            runtime.forward(torch.tensor([[i % VOCABULARY]]), i, hidden=(1,))
    for step, (logits, stream) in zip(steps, kept, strict=True):
        assert torch.equal(step.logits, logits)
        assert torch.equal(step.hidden[1], stream)


def test_longer_texts_record_nothing_anew():
    """The cache has slots for the whole context at once, and what is seen is rounded up to 1,024 slots."""
    model, tape = small(VOCABULARY, seed=2), Tape()
    model.config.max_position_embeddings = 900
    runtime, others = LeanRuntime(model, recorder=tape), LeanRuntime(model)
    for room in (20, 600, 20):
        assert plain(runtime, [1, 2], room) == plain(others, [1, 2], room)
        assert tape.recorded == 1


@pytest.mark.parametrize(("asked", "slots"), [(0, 0), (20, 512), (512, 512), (513, 1536), (1000, 2048), (9000, 4352)])
def test_a_cache_is_sized_once_where_passes_are_recorded(monkeypatch, asked, slots):
    """Within the memory for it, else doubled; elsewhere it grows with the texts."""
    model = small(VOCABULARY, seed=2)
    model.config.max_position_embeddings = 4200
    runtime = LeanRuntime(model, recorder=Tape())
    slot_bytes = 2 * sum(t.nbytes for t in LeanRuntime(model, recorder=Tape()).cache.keys) // 16  # 16 spare slots
    monkeypatch.setattr("selfspec.runtime.forward._CAPTURED", 600 * slot_bytes)
    assert runtime._rounded_up(asked) == max(slots, -(-asked // 256) * 256)
    assert LeanRuntime(model)._rounded_up(asked) == -(-asked // 256) * 256
    runtime.grows = False  # as a batch's cache, whose memory is given
    assert runtime._rounded_up(asked) == -(-asked // 256) * 256


def test_without_memory_for_a_larger_cache_it_is_as_large_as_asked_for(monkeypatch):
    def limited(*given, slots, **options):
        if slots > 512:
            raise RuntimeError("out of memory")
        return cache_of(*given, slots=slots, **options)

    monkeypatch.setattr("selfspec.runtime.forward.cache_of", limited)
    model = small(VOCABULARY, seed=2)
    model.config.max_position_embeddings = 4200
    runtime = LeanRuntime(model, recorder=Tape())
    with runtime.session(300):
        assert runtime.cache.slots == 512
    with pytest.raises(SelfspecError, match="KV cache of 600 slots per sequence: cannot be allocated"):
        runtime.reserve(600)
    assert runtime.cache.slots == 0


@pytest.mark.parametrize("slots", [1, 255, 256, 257, 1024, 1025, 1300, 4096, 4097, 100_000])
def test_rounding_up(slots):
    found = rounded_up(slots)
    assert slots <= found
    assert found % 1024 == 0
    assert found <= max(1024, slots * 1.26) or found - slots < 1024
    assert rounded_up(found) == found


def test_what_is_recorded_is_not_charged_to_drafts(monkeypatch):
    """The clock that times rounds stands still."""
    now = [0.0]
    monkeypatch.setattr("selfspec.basics.machine.time.perf_counter", lambda: now[0])

    class Slow(Tape):
        def record(self, body, pool):
            now[0] += 5
            return super().record(body, pool)

    tape, begun = Slow(), clock()
    runtime = LeanRuntime(small(VOCABULARY), recorder=tape)
    with runtime.session(20):
        for position in range(2):
            runtime.forward(torch.tensor([[1]]), position)
    assert (tape.recorded, tape.replayed) == (1, 2)
    assert (now[0], clock() - begun) == (5.0, 0.0)


def test_what_rounds_run_is_recorded_before_the_first_one():
    """Draft steps, and verification of up to nine rows; the text is what it was, and a second one records nothing."""
    model, tape = small(VOCABULARY, seed=2), Tape()
    runtime = LeanRuntime(model, recorder=tape)
    drafter = LayerSkipDrafter(runtime, SKIP, FixedK(4))
    with Engine(runtime, drafter) as engine:
        engine.join(SequenceState([1, 4, 2, 9], 24, Sampler(), frozenset()))
        assert tape.recorded == WARM_ROWS + 1
        while engine.running:
            engine.step()
    assert run(runtime, drafter, [1, 4, 2, 9], 24)[0] == plain(LeanRuntime(model), [1, 4, 2, 9], 24)
    assert tape.recorded == WARM_ROWS + 1


def test_cuda_graphs_are_captured_on_one_side_stream(fake_cuda):
    recorder, x = CudaRecorder(torch.device("cuda", 0)), torch.ones(3)
    for _ in range(3):
        step, replay = recorder.record(lambda: ForwardOutput(x + 1, {}), recorder.pool())
        replay()
        assert torch.equal(step.logits, x + 1)
    (side,) = fake_cuda.streams
    assert fake_cuda.captures == [(side, "pool")] * 3
    assert fake_cuda.replays == 3


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor(1.0),
        lambda x: x.to("meta"),
        lambda x: torch.empty(3, device="meta").copy_(x),
    ],
    ids=["item", "nonzero", "a number", "a copy", "into another device"],
)
def test_what_reads_values_is_refused_before_anything_is_captured(fake_cuda, body):
    recorder, x = CudaRecorder(torch.device("cuda", 0)), torch.ones(3)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="cannot be captured"):
        recorder.record(lambda: body(x), recorder.pool())
    assert not fake_cuda.captures
    assert torch.cuda.current_stream() is before
    recorder.record(lambda: ForwardOutput(x * 2, {}), recorder.pool())
    assert len(fake_cuda.captures) == 1


def test_wide_passes_are_not_recorded():
    model, tape = small(VOCABULARY), Tape()
    runtime = LeanRuntime(model, recorder=tape)
    with runtime.session(4 * ROWS):
        for start in range(3):
            runtime.forward(torch.ones(1, ROWS + 1, dtype=torch.long), start)
    assert tape.recorded == 0


def test_a_path_that_is_gone_takes_its_recordings_along():
    runtime = LeanRuntime(small(VOCABULARY), kernel=fake, recorder=Tape())
    drafter = LayerSkipDrafter(runtime, LOW, FixedK(3))
    run(runtime, drafter, [1, 2], 20)
    assert len(runtime._graphs._made) == 2
    del drafter
    gc.collect()
    assert len(runtime._graphs._made) == 1


def test_where_nothing_can_be_recorded_a_word_is_said_and_texts_are_right(caplog):
    model, tape = small(VOCABULARY), Tape(fails=True)
    runtime = LeanRuntime(model, kernel=fake, recorder=tape)
    with caplog.at_level(logging.WARNING, "selfspec"):
        for prompt in PROMPTS:
            text = run(runtime, LayerSkipDrafter(runtime, SKIP, FixedK(3)), prompt, 20)[0]
            assert text == plain(LeanRuntime(model), prompt, 20)
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graph capture failed; passes run eagerly (operation not permitted when stream is capturing)"
    ]
    assert tape.replayed == 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_are_chosen_by_reading_values_are_not_recorded(name, caplog):
    model, tape = tiny(FAMILY_CONFIGS[name]), Tape()
    widths = [5, *(1, 3) * 4]
    tokens = tokens_for(model, n=sum(widths))
    with caplog.at_level(logging.WARNING, "selfspec"):
        ours = chunked(LeanRuntime(model, recorder=tape), tokens, widths)
    torch.testing.assert_close(ours, chunked(LeanRuntime(model), tokens, widths), atol=1e-9, rtol=1e-9)
    assert tape.replayed == 0
    assert len(caplog.records) == 1


def test_hooks_see_every_pass():
    model, tape, seen = small(VOCABULARY), Tape(), []
    runtime = LeanRuntime(model, recorder=tape)
    text = plain(runtime, [1, 2], 10)
    replayed = tape.replayed
    assert replayed > 0
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    watched = LeanRuntime(model, recorder=tape)
    assert plain(watched, [1, 2], 10) == text
    assert len(seen) == 10
    assert tape.replayed == replayed
    handle.remove()
    assert plain(watched, [1, 2], 10) == text
    assert tape.replayed > replayed


def test_weights_that_are_changed_in_place_count():
    model = small(VOCABULARY)
    runtime = LeanRuntime(model, recorder=Tape())
    before = plain(runtime, [1, 2], 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            )
    after = plain(runtime, [1, 2], 20)
    assert after == plain(LeanRuntime(model), [1, 2], 20)
    assert after != before


def test_runtimes_beside_each_other_have_recordings_of_their_own():
    model, tape = small(VOCABULARY), Tape()
    one = LeanRuntime(model, recorder=tape)
    other = one.with_new_cache(rows=2)
    texts = [plain(runtime, [1, 2], 20) for runtime in (one, other, one)]
    assert texts == [plain(LeanRuntime(model), [1, 2], 20)] * 3
    assert tape.recorded == 2


def test_processors_have_no_recordings():
    runtime = LeanRuntime(small(VOCABULARY))
    assert recorder_for(runtime.model, runtime.skeleton) is None


def test_recordings_can_be_switched_off(monkeypatch):
    runtime = LeanRuntime(small(VOCABULARY))
    there = replace(runtime.skeleton, device=torch.device("cuda", 0), blocks=())
    assert isinstance(recorder_for(runtime.model, there), CudaRecorder)
    runtime.model.peft_config = {}  # a replay would be of the adapter that was active when it was recorded
    assert recorder_for(runtime.model, there) is None
    del runtime.model.peft_config
    monkeypatch.setenv("SELFSPEC_GRAPHS", "0")
    assert recorder_for(runtime.model, there) is None


@pytest.mark.gpu
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_cuda_graphs_give_the_same_texts(make, monkeypatch, caplog):
    model = small(VOCABULARY, seed=2).cuda()
    with caplog.at_level(logging.WARNING, "selfspec"):
        runtime = LeanRuntime(model, kernel=fake)
        texts = [run(runtime, make(runtime), prompt, 40)[0] for prompt in PROMPTS]
    assert not caplog.records
    assert runtime._graphs is not None
    assert runtime._graphs._made
    monkeypatch.setenv("SELFSPEC_GRAPHS", "0")
    assert texts == [plain(LeanRuntime(model), prompt, 40) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_graphs_are_near_what_others_give(dtype, monkeypatch):
    model = tiny(CONFIGS["llama"], dtype=dtype).cuda()
    widths = [5, *(1, 3, 2, 4) * 8]
    tokens = tokens_for(model, n=sum(widths)).cuda()
    ours = chunked(LeanRuntime(model), tokens, widths).double()
    monkeypatch.setenv("SELFSPEC_GRAPHS", "0")
    theirs = chunked(LeanRuntime(model), tokens, widths).double()
    assert float((ours - theirs).norm()) < (1e-4 if dtype == torch.float32 else 0.02) * float(theirs.norm())


_REFUSAL = """
import torch
from selfspec.runtime.cuda_graphs import CudaRecorder
device = torch.device("cuda", 0)
recorder, x = CudaRecorder(device), torch.ones(8, device=device)
try:
    recorder.record(lambda: x[0].item(), recorder.pool())
except RuntimeError as error:
    assert "cannot be captured" in str(error), error
else:
    raise AssertionError("it was captured")
assert bool(torch.rand(8, device=device).isfinite().all())
step, replay = recorder.record(lambda: x + 1, recorder.pool())
replay()
assert step.tolist() == [2.0] * 8
"""


@pytest.mark.gpu
def test_a_refused_capture_leaves_the_device_usable():
    """In a process of its own: one that is not would fail all other tests."""
    done = subprocess.run([sys.executable, "-c", _REFUSAL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
