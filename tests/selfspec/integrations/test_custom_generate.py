"""`model.generate(..., custom_generate=selfspec.hf(...))` gives what the same call gives without it."""

from __future__ import annotations

import threading

import pytest
import torch
from fields import FIELDS
from layouts import needs_native
from models import CONFIGS, tiny
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    pipeline,
    set_seed,
)
from transformers.generation import MaxLengthCriteria
from wants import needs

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import parse_controller
from selfspec.drafters import make_drafter
from selfspec.integrations.custom_generate import hf
from selfspec.llm.llm import LLM
from selfspec.models.half_storage import held_dtypes
from selfspec.models.loading import load_model
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import SkipSet, as_path

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3, 2, 3]]
PAD, NEW = 0, 14


@pytest.fixture(scope="module")
def model():
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    model.generation_config.eos_token_id = [1, 2, 40]
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture(scope="module")
def profile(model):
    """Always drafts four tokens, so that many of them are wrong."""
    identity = LLM(model, None).identity
    path = as_path(SkipSet(attention=(1,), mlp=(2,)))
    return Profile(model=identity, draft=LayerSkipSpec.from_path(path, parse_controller("fixed:k=4")))


@pytest.fixture(scope="module", autouse=True)
def unguarded():
    """What drafts always does, however slow it is."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("llm.llm", "integrations.custom_generate"):
            patch.setattr(
                f"selfspec.{module}.make_guarded", lambda runtime, profile, *_, **__: make_drafter(runtime, profile)
            )
        yield


@pytest.fixture(scope="module")
def drafted(profile):
    return hf(profile)


def batch(*prompts):
    """Prompts padded on the left, as a tokenizer gives them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(model, drafted, prompts, **given):
    asked = {"max_new_tokens": NEW, "do_sample": False, **given}
    theirs = model.generate(**batch(*prompts), **asked)
    return theirs, model.generate(**batch(*prompts), **asked, custom_generate=drafted)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "padded"])
@pytest.mark.parametrize("field", [{}, *FIELDS], ids=str)
def test_every_field_means_what_it_means_there(model, drafted, field, prompts):
    theirs, ours = both(model, drafted, prompts, **field)
    assert torch.equal(ours, theirs)


def test_it_drafts(model, drafted, monkeypatch):
    found = []
    take = selfspec.integrations.columns.Columns.take
    monkeypatch.setattr(
        "selfspec.integrations.columns.Columns.take",
        lambda self, outcomes: (found.extend(outcomes), take(self, outcomes)),
    )
    both(model, drafted, PROMPTS)
    assert any(outcome.accepted for _, outcome in found)
    assert any(outcome.accepted < len(outcome.draft) for _, outcome in found)


@pytest.mark.parametrize("of", ["kwargs", "config"])
def test_a_config_serves_as_keywords_do(model, drafted, of):
    given = {"max_new_tokens": 5, "repetition_penalty": 1.5}
    asked = given if of == "kwargs" else {"generation_config": GenerationConfig(**given, pad_token_id=PAD)}
    theirs = model.generate(**batch(PROMPTS[0]), **asked)
    assert torch.equal(model.generate(**batch(PROMPTS[0]), **asked, custom_generate=drafted), theirs)


def test_without_an_attention_mask(model, drafted):
    ids = torch.tensor([PROMPTS[0]])
    theirs = model.generate(ids, max_new_tokens=NEW)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, custom_generate=drafted), theirs)


def test_scores_and_logits(model, drafted):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.4}
    theirs, ours = both(model, drafted, PROMPTS, **asked)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores) == len(ours.logits)
    ended = torch.zeros(len(PROMPTS), dtype=torch.bool)
    new = ours.sequences[:, max(map(len, PROMPTS)) :]
    for i, column in enumerate(new.T):
        for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
            torch.testing.assert_close(mine[i][~ended], other[i][~ended], rtol=1e-4, atol=1e-4)
            assert not mine[i][ended].any()
        ended |= torch.isin(column, torch.tensor([1, 2, 40]))
    own = model.compute_transition_scores(ours.sequences, ours.scores)
    other = model.compute_transition_scores(theirs.sequences, theirs.scores)
    torch.testing.assert_close(own[0], other[0], rtol=1e-4, atol=1e-4)


class ByRow(LogitsProcessor):
    """Forbids in each sequence of a batch another token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, scores[row].argmax() if row == 1 else 10 + row] = -torch.inf
        return scores


def test_processors_see_which_sequence_it_is(model, drafted):
    for given in (
        {"logits_processor": [ByRow()]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row + i) % 61 for i in range(5)]},
        {"encoder_repetition_penalty": 1.8, "encoder_no_repeat_ngram_size": 2},
    ):
        theirs, ours = both(model, drafted, PROMPTS, **given)
        assert torch.equal(ours, theirs)


def trie(prompts):
    """A function of allowed tokens for each prompt: it has an answer for that prompt's texts of legal tokens alone."""

    def allowed(row, sequence):
        tokens = sequence.tolist()
        prompt = prompts[row]
        given = tokens[tokens.index(prompt[0]) :] if tokens[0] == PAD else tokens
        assert given[: len(prompt)] == prompt
        legal = [row + 10, row + 20, row + 30]
        return legal if all(token in legal for token in given[len(prompt) :]) else []

    return allowed


@pytest.mark.parametrize("count", [1, 3])
def test_a_prefix_function_sees_its_rows_legal_texts_alone(model, drafted, count):
    """Its answer for any other text is an error in `transformers`."""
    prompts = [[n, *PROMPTS[n], 10 + n, 20 + n] for n in range(count)]
    for method in (drafted, hf(method="lookup", profile="none")):
        theirs, ours = both(model, method, prompts, prefix_allowed_tokens_fn=trie(prompts), eos_token_id=None)
        assert torch.equal(ours, theirs)


class Seen(StoppingCriteria):
    """Remembers what it was shown; ends sequence `row` after `n` tokens, or all of them."""

    def __init__(self, n, row=None):
        self.n, self.row, self.shown = n, row, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        over = input_ids.shape[1] >= max(map(len, PROMPTS)) + self.n
        if self.row is None:
            return over
        return torch.tensor([over and row == self.row for row in range(len(input_ids))])


@pytest.mark.parametrize("row", [0, 1, None])
def test_criteria_see_what_they_see_there(model, drafted, row):
    seen = [Seen(4, row), Seen(4, row)]
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 60}
    theirs = model.generate(**batch(*PROMPTS), **asked, stopping_criteria=[seen[0]])
    ours = model.generate(**batch(*PROMPTS), **asked, stopping_criteria=[seen[1]], custom_generate=drafted)
    assert torch.equal(ours, theirs)
    assert seen[1].shown == seen[0].shown


def test_a_shorter_length_of_the_callers(model, drafted):
    theirs, ours = both(model, drafted, PROMPTS, stopping_criteria=[MaxLengthCriteria(11)])
    assert torch.equal(ours, theirs)


class Collects:
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "padded"])
def test_streamers_are_told_what_they_are_told_there(model, drafted, profile, prompts):
    told = [Collects() for _ in range(3)]
    asked = {**batch(*prompts), "max_new_tokens": NEW, "do_sample": False}
    model.generate(**asked, streamer=told[0])
    model.generate(**asked, streamer=told[1], custom_generate=drafted)
    assert told[1].ended
    assert told[1].got == told[0].got
    model.generate(**asked, custom_generate=hf(profile, streamer=told[2]))
    assert told[2].got == told[0].got


def test_an_iterating_streamer(llm, held_out):
    streamer = TextIteratorStreamer(llm.tokenizer, skip_prompt=True)
    asked = {**llm.tokenizer(held_out[0], return_tensors="pt"), "max_new_tokens": 20, "do_sample": False}
    drafted = hf("stdlib-llama-3.7m")
    thread = threading.Thread(
        target=lambda: llm.model.generate(**asked, streamer=streamer, custom_generate=drafted), daemon=True
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    ids = llm.model.generate(**asked)[0, asked["input_ids"].shape[1] :]
    assert text == llm.tokenizer.decode(ids)


def test_sampling_follows_torchs_seed(model, drafted):
    asked = {**batch(*PROMPTS), "do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 3}
    found = []
    for seed in (5, 5, 6):
        set_seed(seed)
        found.append(model.generate(**asked, custom_generate=drafted))
    assert found[0].shape[0] == 9
    assert torch.equal(found[0], found[1])
    assert found[0].shape != found[2].shape or not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) > 3  # of one prompt, too


@pytest.mark.parametrize("rule", [None, "match", "block", "token"])
def test_sampled_texts_are_the_samplers(model, profile, rule):
    """Drawn with a sampler that is shown elsewhere to have the distribution, seeded from torch's generator."""
    drafted = hf(profile, rule=rule)
    set_seed(11)
    ours = model.generate(
        **batch(PROMPTS[0]), do_sample=True, temperature=0.9, max_new_tokens=NEW, custom_generate=drafted
    )
    set_seed(11)
    seed = int(torch.randint(2**62, ()))
    llm = LLM(model, Silent(), profile=profile)
    config = model.generation_config
    expected = llm.generate(PROMPTS[0], config, temperature=0.9, max_new_tokens=NEW, seed=seed, rule=rule).tokens
    assert ours[0, len(PROMPTS[0]) :].tolist() == expected


class Silent:
    """Just enough of a tokenizer."""

    def decode(self, ids, **_):
        return ""


def test_the_first_tokens_have_the_models_distribution(model, drafted):
    """A chi-square test of two tokens in a row against the model's own probabilities."""
    asked = {"do_sample": True, "top_k": 3, "max_new_tokens": 2, "eos_token_id": 60}
    set_seed(0)
    drawn = model.generate(**batch(PROMPTS[0]), **asked, num_return_sequences=400, custom_generate=drafted)[
        :, len(PROMPTS[0]) :
    ]

    def probabilities(ids):
        with torch.no_grad():
            values, tokens = model(torch.tensor([ids])).logits[0, -1].topk(3)
        return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

    expected = {
        (one, two): p * q
        for one, p in probabilities(PROMPTS[0]).items()
        for two, q in probabilities([*PROMPTS[0], one]).items()
    }
    counts = dict.fromkeys(expected, 0)
    for pair in drawn.tolist():
        counts[tuple(pair)] += 1  # nothing outside of the three best
    likely = {pair: p for pair, p in expected.items() if 400 * p >= 5}
    chi = sum((counts[pair] - 400 * p) ** 2 / (400 * p) for pair, p in likely.items())
    assert chi < 26.2, (counts, expected)  # 1 in 1000 at 8 degrees of freedom, and the seed is fixed


def test_stop_strings(llm, held_out):
    asked = {**llm.tokenizer(held_out[1], return_tensors="pt"), "max_new_tokens": 60, "do_sample": False}
    drafted = hf("stdlib-llama-3.7m")
    text = llm.tokenizer.decode(llm.model.generate(**asked)[0, asked["input_ids"].shape[1] :])
    stop = text[len(text) // 2 :][:3]
    theirs = llm.model.generate(**asked, stop_strings=[stop], tokenizer=llm.tokenizer)
    assert theirs.shape[1] < asked["input_ids"].shape[1] + 60
    for given in ({"stop_strings": [stop]}, {"generation_config": GenerationConfig(stop_strings=[stop])}):
        assert torch.equal(drafted.generate(llm.model, **asked, **given, tokenizer=llm.tokenizer), theirs)


def test_a_pipeline(llm, held_out):
    generator = pipeline("text-generation", model=llm.model, tokenizer=llm.tokenizer)
    asked = {"max_new_tokens": 20, "do_sample": False}
    theirs = generator(held_out[:2], **asked)
    assert generator(held_out[:2], **asked, custom_generate=hf("stdlib-llama-3.7m")) == theirs


def test_what_is_prepared_serves_until_the_weights_move(model, profile, monkeypatch):
    made = []
    wrap = selfspec.integrations.custom_generate.wrap
    monkeypatch.setattr(
        "selfspec.integrations.custom_generate.wrap", lambda *a, **k: (made.append(1), wrap(*a, **k))[1]
    )
    drafted, other = hf(profile), tiny(CONFIGS["llama"], dtype=torch.float64, seed=3)
    for one, moves, count in ((model, "", 1), (model, "", 1), (other, "", 2), (other, "float", 3), (other, "", 3)):
        if moves:
            getattr(one, moves)()
        theirs = one.generate(**batch(*PROMPTS), max_new_tokens=6, pad_token_id=PAD, do_sample=False)
        ours = one.generate(
            **batch(*PROMPTS), max_new_tokens=6, pad_token_id=PAD, do_sample=False, custom_generate=drafted
        )
        assert torch.equal(ours, theirs)
        assert len(made) == count


@needs("peft", "PEFT")
def test_adapters_that_are_put_into_the_model():
    """By `transformers`, also between two calls, or by PEFT, whose own generate calls the model's."""
    from peft import LoraConfig, get_peft_model

    asked = {**batch(*PROMPTS), "max_new_tokens": 6, "pad_token_id": PAD, "do_sample": False}
    changed = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, method = tiny(CONFIGS["llama"], dtype=torch.float64), hf(method="lookup", profile="none")
    plainly = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=method), plainly)
    torch.manual_seed(0)
    model.add_adapter(changed, adapter_name="one")
    theirs = model.generate(**asked)
    assert not torch.equal(theirs, plainly)
    assert torch.equal(model.generate(**asked, custom_generate=method), theirs)
    llm = selfspec.wrap(model, None, profile="none")
    for name, expected in (("base", plainly), ("one", theirs), (None, theirs)):
        assert llm.generate(PROMPTS[0], max_new_tokens=6, adapter=name).tokens == expected[0, -6:].tolist()
    wrapped = get_peft_model(tiny(CONFIGS["llama"], dtype=torch.float64), changed)
    assert torch.equal(wrapped.generate(**asked, custom_generate=hf(profile="none")), wrapped.generate(**asked))


def test_a_method_by_its_name(model):
    for method in ("lookup", "recycle"):
        theirs, ours = both(model, hf(method=method, profile="none"), PROMPTS)
        assert torch.equal(ours, theirs)


def test_weights_laid_out_give_the_same(held_out, each_layout):
    """Drafted, and by the model's own generate, whatever lay fastest."""
    model, tokenizer = load_model("builtin")
    asked = {**tokenizer(held_out[0], return_tensors="pt"), "max_new_tokens": 24, "do_sample": False}
    theirs = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=hf("stdlib-llama-3.7m", layout="auto")), theirs)
    assert torch.equal(model.generate(**asked), theirs)


@needs_native
@pytest.mark.parametrize("layout", [None, "auto"])
def test_without_a_profile_drafts_are_in_int8(layout):
    model, ours = tiny(CONFIGS["llama"], dtype=torch.float64), hf(layout=layout)
    theirs, found = both(model, ours, PROMPTS)
    assert torch.equal(found, theirs)
    assert ours._llm.has_default_profile
    assert ours._llm.profile.path.head == "int8"
    lookup = hf(layout=layout, extra_memory=0)
    assert torch.equal(both(model, lookup, PROMPTS)[1], theirs)
    assert lookup._llm.profile.draft.kind == "lookup"


@needs_native
def test_a_model_held_in_16_bits_is_prepared_once():
    """Its embedding is converted at each read, so where it lies changes; its stored values do not."""
    model, tokenizer = load_model("builtin", device="cpu", dtype="float32")
    ours = hf(profile="none", layout="native")
    asked = {**tokenizer("def", return_tensors="pt"), "max_new_tokens": 4, "do_sample": False, "custom_generate": ours}
    model.generate(**asked)
    assert held_dtypes(model) == "bfloat16"
    first = ours._llm
    model.generate(**asked)
    assert ours._llm is first


WRONG = {
    "num_beams 2 is not served": {"num_beams": 2},
    "output_attentions is not served": {"output_attentions": True, "return_dict_in_generate": True},
    "inputs_embeds is not served": {"input_ids": None, "attention_mask": None, "inputs_embeds": torch.zeros(1, 4, 32)},
    "a prompt is empty": {"attention_mask": torch.zeros(1, len(PROMPTS[0]), dtype=torch.long)},
    "padding must come before the prompts": {
        "input_ids": torch.tensor([[3, 4, 0, 5]]),
        "attention_mask": torch.tensor([[1, 1, 0, 1]]),
    },
    "position_ids: expected 0, 1": {"position_ids": torch.arange(3, 3 + len(PROMPTS[0])).unsqueeze(0)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_had(model, drafted, message):
    asked = {**batch(PROMPTS[0]), "max_new_tokens": NEW, "do_sample": False, **WRONG[message]}
    with pytest.raises(SelfspecError, match=message):
        model.generate(**{name: value for name, value in asked.items() if value is not None}, custom_generate=drafted)
    theirs, ours = both(model, drafted, PROMPTS)  # and the next call works
    assert torch.equal(ours, theirs)


def test_beyond_the_context_it_warns_and_decodes_to_the_last_position(model, drafted):
    with pytest.warns(UserWarning, match="max_new_tokens 500 exceeds the context of 128 positions: at most"):
        out = model.generate(
            **batch(PROMPTS[0]), max_new_tokens=500, do_sample=False, eos_token_id=None, custom_generate=drafted
        )
    assert out.shape[1] == 129
    theirs = model.generate(
        **batch(PROMPTS[0]), max_new_tokens=129 - len(PROMPTS[0]), do_sample=False, eos_token_id=None
    )
    assert torch.equal(out, theirs)


def test_a_cache_of_the_callers_is_refused(model, drafted):
    with torch.no_grad():
        cache = model(torch.tensor([PROMPTS[0][:-1]]), use_cache=True).past_key_values
    with pytest.raises(SelfspecError, match="past_key_values is not served"):
        model.generate(**batch(PROMPTS[0]), past_key_values=cache, custom_generate=drafted)


def test_an_error_on_the_way_leaves_it_usable(model, drafted):
    class Fails(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        both(model, drafted, PROMPTS[:1], stopping_criteria=[Fails()])
    theirs, ours = both(model, drafted, PROMPTS)
    assert torch.equal(ours, theirs)


def test_wrong_arguments():
    with pytest.raises(SelfspecError, match="no such file"):
        hf("nothing.yaml")
    with pytest.raises(SelfspecError, match="rule"):
        hf(rule="guess")
    with pytest.raises(SelfspecError, match="layout 'diagonal' is not known"):
        hf(layout="diagonal")


def test_it_is_public():
    assert selfspec.hf is hf


def test_a_function_around_it_keeps_the_streamer(model, drafted):
    class Noting:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    def wrapped(*args, **kwargs):
        return drafted(*args, **kwargs)

    streamer = Noting()
    out = model.generate(
        **batch(PROMPTS[0]), max_new_tokens=NEW, do_sample=False, streamer=streamer, custom_generate=wrapped
    )
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended
