from hypothesis import given
from hypothesis import strategies as st

from instances import tokens
from instances.answers import Wish, kv_digest, marked_length, plan, wrong_plan

PROMPT = tokens.encode("What is the light of the city?")


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_encode_and_decode_give_the_text_back(text):
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert "".join(tokens.pieces(ids)) == text
    assert all(0 <= token <= tokens.MAX_TOKEN for token in ids)


def test_known_words_are_one_token_each_and_unknown_ones_three_bytes_a_token():
    assert len(tokens.encode("the light of the city")) == 5
    assert len(tokens.encode("zzzzzzz")) == 3


def test_a_token_that_ends_inside_a_character_has_no_text():
    assert tokens.pieces(tokens.split_character("🙂")) == ("", "🙂")


def test_an_unfinished_character_at_the_end_shows_as_replacement():
    assert tokens.pieces(tokens.split_character("🙂")[:1]) == ("\ufffd",)


def test_lone_surrogates_do_not_break_the_tokenizer():
    assert "\ufffd" in tokens.decode(tokens.encode("a\ud800b"))


def test_foreign_ids_have_a_text():
    assert tokens.decode([77_777]) == " #77777"


def test_the_answer_depends_on_prompt_and_seeds_and_on_nothing_else():
    first = plan(Wish(PROMPT, 30), 0, (20, 20))
    assert plan(Wish(PROMPT, 30), 0, (20, 20)) == first
    assert plan(Wish(PROMPT, 30), 1, (20, 20)) != first
    assert plan(Wish(PROMPT, 30, seed=5), 0, (20, 20)) != first
    assert plan(Wish(PROMPT[1:], 30), 0, (20, 20)) != first


def test_a_shorter_limit_gives_the_beginning_of_the_same_answer():
    long = plan(Wish(PROMPT, 30), 0, (20, 20))
    short = plan(Wish(PROMPT, 7), 0, (20, 20))
    assert short.tokens == long.tokens[:7]
    assert (short.finish, long.finish) == ("length", "stop")


def test_an_answer_ends_with_the_end_token_unless_told_otherwise():
    ended = plan(Wish(PROMPT, 30), 0, (5, 5))
    assert ended.tokens[-1] == tokens.EOS
    assert (len(ended), ended.texts[-1]) == (6, "")
    forced = plan(Wish(PROMPT, 30, ignore_eos=True), 0, (5, 5))
    assert (len(forced), forced.finish) == (30, "length")


def test_the_end_token_may_be_the_first():
    assert plan(Wish(PROMPT, 30, natural_length=0), 0, (5, 5)).tokens == (tokens.EOS,)
    assert marked_length("say [[length:12]] words") == 12


def test_stop_texts_cut_the_answer():
    whole = plan(Wish(PROMPT, 30), 0, (20, 20))
    stop = whole.texts[4].strip()
    cut = plan(Wish(PROMPT, 30, stop=(stop,)), 0, (20, 20))
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    kept = plan(Wish(PROMPT, 30, stop=(stop,), keep_stop=True), 0, (20, 20))
    assert kept.text == cut.text + stop


def test_stop_tokens_end_the_answer():
    whole = plan(Wish(PROMPT, 30), 0, (20, 20))
    cut = plan(Wish(PROMPT, 30, stop_tokens=(whole.tokens[3],)), 0, (20, 20))
    assert (cut.tokens, cut.finish) == (whole.tokens[:4], "stop")


def test_answers_read_like_words():
    text = plan(Wish(PROMPT, 400, ignore_eos=True), 0, (5, 5)).text
    assert 40 < text.count(" ") < 400
    assert text[0].isupper()
    assert any(ord(character) > 0xFFFF for character in text)


def test_wrong_kv_shows():
    right = plan(Wish(PROMPT, 30), 0, (20, 20))
    wrong = wrong_plan(right, 1)
    assert wrong.text.startswith(right.texts[0])
    assert wrong.text.count("<KV-LOST>") == len(right) - 1


def test_kv_of_different_prompts_differs():
    assert kv_digest(PROMPT, 0) != kv_digest(PROMPT[:-1], 0) != kv_digest(PROMPT, 1)
