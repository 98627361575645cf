"""The vocabulary on the wire, and that the folder's tokenizer agrees with it."""

import argparse
import json

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import answers, tokens
from instances.answers import Wish
from instances.cli import add_arguments, read_options
from instances.openai.bodies import chat_text
from instances.xllm import vocabulary
from instances.xllm.settings import Settings

TEXTS = [
    "The quiet river, under 東京; naïve façade. 🙂🚀 the\u0301 and",
    "a  b   c\n\n.  the ,  . end <KV-LOST> ",
    "",
    "\x00\x01\x7f\u2028\u00a0the",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "deep" / "folder"
    vocabulary.write_tokenizer(folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_both_give_the_same_ids(tokenizer, text):
    ids = vocabulary.encode(text)
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == text == vocabulary.decode(ids)
    assert all(0 < token < vocabulary.SIZE for token in ids)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_both_give_the_same_ids_for_anything(tokenizer, text):
    ids = vocabulary.encode(text)
    assert tokenizer.encode(text).ids == ids
    assert vocabulary.decode(ids) == text


def test_words_are_one_token(tokenizer):
    assert len(vocabulary.encode("The quiet river")) == 3
    assert tokenizer.get_vocab_size() == vocabulary.SIZE


def test_every_token_of_an_answer_is_in_it(tokenizer):
    for number in range(50):
        plan = answers.plan(Wish(tuple(tokens.encode(f"story {number}")), 400), 0, (100, 300))
        wire = [vocabulary.to_wire(token) for token in plan.tokens]
        assert [vocabulary.from_wire(token) for token in wire] == list(plan.tokens)
        if not plan.text.endswith("\ufffd"):
            assert tokenizer.decode(wire) == plan.text


def test_a_lost_kv_can_be_read_from_the_ids_too(tokenizer):
    lost = vocabulary.to_wire(vocabulary.LOST)
    assert tokenizer.decode([lost, lost]) == answers.WRONG_TEXT * 2
    assert lost not in vocabulary.encode(answers.WRONG_TEXT)


def test_the_end_and_strange_ids(tokenizer):
    assert tokenizer.decode([vocabulary.EOS]) == ""
    assert vocabulary.decode([vocabulary.EOS]) == ""
    strange = vocabulary.from_wire(50_000)
    assert vocabulary.to_wire(strange) == 50_000
    assert str(strange) in vocabulary.decode([50_000])


def test_the_chat_template_is_what_prefill_renders(tmp_path):
    vocabulary.write_tokenizer(tmp_path)
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    shown = (
        jinja2.Environment(autoescape=False).from_string(template).render(messages=messages, add_generation_prompt=True)
    )
    assert shown == chat_text({"messages": messages}) == "system: short\nuser: hello\nassistant:"


def test_the_command_writes_the_folder(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--engine", "xllm", "--write-tokenizer", str(tmp_path / "made")])
    assert left.value.code == 0
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json")).encode("the river").ids
    assert json.loads((tmp_path / "made" / "config.json").read_text())["eos_token_id"] == 0


def test_the_command_knows_the_settings_of_xllm():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--engine xllm --role decode --port 0 --type MIX --pd-port 7777 --etcd http://e:2379 --set dp_size=2"
    options = read_options(parser.parse_args(words.split()))
    settings = Settings.read(options.settings)
    assert (settings.type, settings.pd_port, settings.etcd, settings.dp_size) == ("MIX", 7777, "http://e:2379", 2)
    assert settings.type_for("decode") == "MIX"


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "BOTH"},
        {"kv_cache_transfer_mode": "push"},
        {"proto": "older"},
        {"etcd": "http://e", "service": "1.2.3.4:5"},
        {"etcd_username": "root"},
        {"pd_ports": 1},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=r"must be|exclude|both or|no setting"):
        Settings.read(wrong)


def test_a_type_that_does_not_go_with_the_role():
    assert Settings().type_for("hybrid") == "DEFAULT"
    with pytest.raises(ValueError, match="role prefill is PREFILL or MIX"):
        Settings(type="DECODE").type_for("prefill")
