"""Text that comes token by token is the text of the whole, and is never half a character."""

import functools
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_folders import CORPUS, KINDS, library, write_folder

from coordinator.tokens import Tokenizer
from coordinator.tokens.decoding import Pieces

BROKEN = "\ufffd"
WHOLE_RUNS = sorted(set(KINDS) - {"byte_fallback", "gemma", "odd"})  # whose decoders do not take shown text back
TEXTS = st.one_of(
    st.text(st.sampled_from("hello the quick世界こ😀é👩‍👧🇫🇷!, \n\t"), max_size=40),
    st.text(max_size=20),
    st.sampled_from(CORPUS),
)


@functools.cache
def loaded(kind):
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder(Path(folder), kind))


def ids_of(kind):
    return st.lists(st.integers(-3, library(kind).get_vocab_size() + 3), max_size=30)


def cut(data, ids):
    """The ids in pieces of any length."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def known(kind, ids):
    return [one for one in ids if one >= 0 and library(kind).id_to_token(one) is not None]


@pytest.mark.parametrize("kind", WHOLE_RUNS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_pieces_give_the_librarys_text(kind, data, skip):
    ids = data.draw(ids_of(kind))
    text = loaded(kind).detokenizer(skip_special=skip)
    pushed = "".join([text.push(piece) for piece in cut(data, ids)]) + text.end()
    assert pushed == library(kind).decode(known(kind, ids), skip_special_tokens=skip)
    assert loaded(kind).decode(ids, skip_special=skip) == pushed


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_a_text_survives_in_any_pieces(kind, data, text):
    ids = library(kind).encode(text, add_special_tokens=False).ids
    whole = library(kind).decode(ids)
    stream = loaded(kind).detokenizer()
    pieces = [stream.push(piece) for piece in cut(data, ids)]
    assert "".join(pieces) + stream.end() == whole
    if BROKEN not in whole:
        assert BROKEN not in "".join(pieces)
    if kind in ("byte_level", "byte_fallback"):
        assert whole == text


@pytest.mark.parametrize("kind", ["byte_fallback", "gemma"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_make_no_difference_where_bytes_are_no_characters(kind, data):
    ids = data.draw(ids_of(kind))
    text = loaded(kind).detokenizer()
    pushed = "".join([text.push(piece) for piece in cut(data, ids)]) + text.end()
    assert pushed == loaded(kind).decode(ids)
    library_text = library(kind).decode(known(kind, ids))
    assert BROKEN in pushed or pushed == library_text
    assert BROKEN not in pushed or BROKEN in library_text


def test_a_run_of_bytes_that_breaks_keeps_the_characters_that_were_shown():
    made = library("byte_fallback")
    ids = [made.token_to_id(f"<0x{byte:02X}>") for byte in "世".encode()[:3] + b"\xff\x80"] + [made.token_to_id("a")]
    text = loaded("byte_fallback").detokenizer()
    assert [text.push([one]) for one in ids] == ["", "", "世", BROKEN, BROKEN, "a"]
    assert made.decode(ids) == BROKEN * 5 + "a"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "odd"])
def test_no_half_of_a_character_is_ever_shown(kind):
    ids = library(kind).encode("a😀é世b", add_special_tokens=False).ids
    stream = loaded(kind).detokenizer()
    shown = [stream.push([one]) for one in ids]
    assert "".join(shown) + stream.end() == library(kind).decode(ids)
    assert "" in shown
    assert not any(BROKEN in piece for piece in shown)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "odd"])
def test_a_character_that_is_never_completed_is_told_at_the_end(kind):
    byte = library(kind).encode("😀", add_special_tokens=False).ids[-4:]
    stream = loaded(kind).detokenizer([library(kind).encode("ab", add_special_tokens=False).ids[-1]])
    assert stream.push(byte[:1]) == ""
    assert set(stream.end()) == {BROKEN}
    assert stream.end() == ""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_follows_a_prompt_is_what_it_adds_to_it(kind):
    made = library(kind)
    ids = made.encode("hello world hello the quick", add_special_tokens=False).ids
    whole = made.decode(ids)
    for at in range(1, len(ids)):
        stream = loaded(kind).detokenizer(ids[:at])
        assert made.decode(ids[:at]) + "".join([stream.push([one]) for one in ids[at:]]) + stream.end() == whole


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_the_space_before_a_first_word_is_left_out_unless_a_prompt_stands_before_it(kind):
    made = loaded(kind)
    ids = library(kind).encode("hello", add_special_tokens=False).ids
    bos = library(kind).token_to_id("<s>")
    assert made.decode(ids) == made.detokenizer([bos]).push(ids) == "hello"
    assert made.detokenizer(ids).push(ids) == " hello"


def test_a_character_that_began_in_the_prompt_is_completed():
    ids = library("byte_level").encode("😀", add_special_tokens=False).ids
    assert len(ids) > 1
    assert loaded("byte_level").detokenizer(ids[:-1]).push(ids[-1:]) == "😀"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_special_tokens_are_shown_only_where_they_are_wanted(kind):
    made = library(kind)
    ids = [made.token_to_id("<s>"), *made.encode("hello", add_special_tokens=False).ids, made.token_to_id("</s>")]
    assert "<s>" not in loaded(kind).decode(ids)
    assert loaded(kind).decode(ids, skip_special=False) == made.decode(ids, skip_special_tokens=False)
    assert "</s>" in loaded(kind).decode(ids, skip_special=False)


def test_a_skipped_token_between_two_bytes_does_not_part_them():
    made = library("byte_fallback")
    first, *rest = [made.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    ids = [first, made.token_to_id("</s>"), *rest]
    assert loaded("byte_fallback").decode(ids) == made.decode(ids) == "é"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ids_of_no_token_have_no_text_and_leave_nothing_behind(kind):
    made = loaded(kind)
    stream = made.detokenizer()
    for token in (-1, 10**6, 2**32, 2**40):
        assert stream.push([token]) == made.token_text(token) == ""
    pieces = [table for tables in (made._bytes, made._mixed) for table in tables]
    assert all(isinstance(table, Pieces) and max(table, default=0) <= made.highest_id for table in pieces)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_answer_costs_as_much_for_each_token_as_a_short_one(kind):
    ids = library(kind).encode("hello the quick world ", add_special_tokens=False).ids
    hard = library(kind).encode("😀", add_special_tokens=False).ids[:1]  # may never become a character

    def seconds(rounds):
        stream = loaded(kind).detokenizer()
        began_s = time.process_time()
        for _ in range(rounds):
            for token in ids + hard:
                stream.push((token,))
        return time.process_time() - began_s

    seconds(100)
    assert seconds(4000) < 40 * 4 * min(seconds(100) for _ in range(3)) + 0.05
