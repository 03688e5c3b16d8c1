"""Which tokens two tokenizers share, and a text of one read by the other."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.models.vocabularies import TokenizerMap, token_bytes_of


def trained(size, *, bytelevel=True, special=("<eos>",)):
    """A tokenizer of so many tokens, of the built-in prompts."""
    own = Tokenizer(models.BPE(byte_fallback=not bytelevel))
    if bytelevel:
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # as SentencePiece's: a mark for each space, bytes for what has no token
        own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        own.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
        )
        alphabet = []
        special = (*special, *(f"<0x{byte:02X}>" for byte in range(256)))
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(builtin.prompts("calibration"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>")


@pytest.fixture(scope="module")
def ours(llm):
    return llm.tokenizer


@pytest.mark.parametrize("bytelevel", [True, False])
def test_shared_tokens_stand_for_the_same_text(ours, bytelevel):
    theirs = trained(900, bytelevel=bytelevel)
    words = TokenizerMap(ours, theirs, sizes=(len(ours), len(theirs)))
    assert len(words.ours) == len(words.theirs) == len(set(words.theirs.tolist())) > 300
    for a, b in zip(words.ours.tolist(), words.theirs.tolist(), strict=True):
        text = ours.decode([a])
        assert text in (theirs.decode([b]), "\ufffd")


@pytest.mark.parametrize("bytelevel", [True, False])
def test_texts_are_read_anew(ours, bytelevel, held_out):
    theirs = trained(900, bytelevel=bytelevel)
    words = TokenizerMap(ours, theirs, sizes=(len(ours), len(theirs)))
    for text in held_out[:5]:
        assert theirs.decode(words.read(ours(text).input_ids)) == text


def test_a_text_that_ends_within_a_character_waits(ours):
    words = TokenizerMap(ours, theirs := trained(600), sizes=(len(ours), len(theirs)))
    ids = ours("grün 雪").input_ids
    assert words.read(ids[:-1]) is None
    assert theirs.decode(words.read(ids)) == "grün 雪"


def test_the_same_tokens_are_left_as_they_are(ours):
    words = TokenizerMap(ours, ours, sizes=(len(ours), len(ours)))
    assert words.read([5, 3, 5]) == [5, 3, 5]
    assert words.ours.tolist() == words.theirs.tolist() == sorted(ours.get_vocab().values())


def test_tokens_beyond_a_models_own_are_not_shared(ours):
    words = TokenizerMap(ours, ours, sizes=(len(ours), 300))
    assert max(words.theirs.tolist()) < 300


def test_special_tokens_are_special_on_both_sides(ours):
    theirs = trained(600, special=("<eos>", "import"))  # a special token that is spelt as a word of ours
    theirs.add_special_tokens({"additional_special_tokens": ["import"]})
    words = TokenizerMap(ours, theirs, sizes=(len(ours), len(theirs)))
    assert theirs.convert_tokens_to_ids("import") not in words.theirs.tolist()


def test_nothing_in_common(ours):
    own = Tokenizer(models.WordLevel({"unheard-of": 0, "<eos>": 1}, unk_token="<eos>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>")
    with pytest.raises(SelfspecError, match="no token in common"):
        TokenizerMap(ours, theirs, sizes=(len(ours), 2))


def test_tokens_are_spelt_as_bytes(llm):
    spelt = token_bytes_of(llm.tokenizer)
    text = "def façade():\n\t# 漢字 \U0001f600"
    raw = b"".join(map(spelt, llm.encode(text)))
    assert raw.decode().lstrip() == text
    assert spelt(10**6) == b"", "a row of the head that no token has"
    end = llm.tokenizer.eos_token_id
    assert spelt(end).decode() == llm.tokenizer.convert_ids_to_tokens(end)
