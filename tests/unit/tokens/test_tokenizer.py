"""A tokenizer of a folder: encoding, threads, tokens for log probabilities, chats, and folders that cannot be used."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from token_folders import KINDS, library, write_folder

from coordinator.core.errors import BadRequest
from coordinator.tokens import Tokenizer, folder, tokenizer

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def pool():
    made = ThreadPoolExecutor(1, thread_name_prefix="test-tokens")
    yield made
    made.shutdown()


@pytest.fixture
def make(tmp_path, pool):
    def made(kind="byte_level", **more):
        return Tokenizer.load(write_folder(tmp_path / "model", kind, **more), pool)

    return made


async def test_ids_are_the_librarys(make):
    text = "hello 世界 😀"
    made = make()
    assert await made.encode(text) == library("byte_level").encode(text).ids
    assert await made.encode(text, special=False) == library("byte_level").encode(text, add_special_tokens=False).ids
    assert (await made.encode(text))[0] == library("byte_level").token_to_id("<s>")
    assert made.highest_id == library("byte_level").get_vocab_size() - 1


def test_ids_may_have_gaps(tmp_path):
    write_folder(tmp_path)
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 900}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).highest_id == 900


async def test_a_folders_padding_and_truncation_are_not_for_prompts(tmp_path, pool):
    made = KINDS["byte_level"]()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    write_folder(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = await Tokenizer.load(tmp_path, pool).encode("hello world, hello tokens")
    assert 4 < len(ids) < 64


async def test_long_texts_leave_the_loop_free_and_short_ones_need_no_thread(make, monkeypatch):
    made = make()
    where = []
    whole = Tokenizer._encode

    def noted(self, text, *, special):
        where.append(threading.current_thread().name)
        return whole(self, text, special=special)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    await made.encode("x" * tokenizer.SHORT_CHARS)
    long = "hello " * tokenizer.SHORT_CHARS
    assert await made.encode(long) == library("byte_level").encode(long).ids
    assert where == ["MainThread", "test-tokens_0"]
    assert await made.text(await made.encode(long)) == made.decode(await made.encode(long)) == long


async def test_the_loop_goes_on_while_a_long_text_is_worked_on(make):
    """A thread alone does not help: the library's `encode` keeps the interpreter's lock to its end."""
    encoding = asyncio.create_task(make().encode("hello world, " * 50_000), name="encode")
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) > 50_000
    assert turns > 10


async def test_a_text_that_is_too_long_for_any_memory_is_refused(make, monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_CHARS", 5000)
    assert await make().encode("x" * 5000)
    with pytest.raises(BadRequest, match="at most 5000 characters"):
        await make().encode("x" * 5001)


async def test_halves_of_surrogate_pairs_are_no_reason_to_fail(make):
    assert make().decode(await make().encode("a\ud83db", special=False)) == "a?b"


async def test_whoever_waits_for_a_thread_can_be_cancelled(make, pool):
    made, go = make(), threading.Event()
    pool.submit(go.wait, 30)
    waiting = asyncio.create_task(made.encode("x" * 5000))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert await made.encode("x" * 5000)


async def test_nobody_waits_for_a_thread_for_ever(make, pool, monkeypatch):
    made, go = make(), threading.Event()
    pool.submit(go.wait, 30)
    monkeypatch.setattr(tokenizer, "WAIT_S", 0.01)
    with pytest.raises(tokenizer.DeadlineExceeded):
        await made.encode("x" * 5000)
    go.set()


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_texts_of_single_tokens_make_up_the_text(make, kind):
    made = make(kind)
    ids = await made.encode("hello the quick 😀é", special=False)
    together = b"".join([made.token_bytes(one) for one in ids]).decode("utf-8", "replace")
    if kind != "odd":
        assert together.strip() == made.decode(ids, skip_special=False).strip()
    assert [made.token_text(one) for one in ids] == [made.token_bytes(one).decode("utf-8", "replace") for one in ids]


def test_a_token_inside_of_a_word_and_one_that_begins_one(make):
    made, lib = make("byte_fallback"), library("byte_fallback")
    assert made.token_text(lib.token_to_id("▁the")) == " the"
    assert made.token_text(lib.token_to_id("the")) == "the"
    assert made.token_bytes(lib.token_to_id("<0xE4>")) == b"\xe4"
    assert made.token_text(lib.token_to_id("<0xE4>")) == "\ufffd"


@pytest.mark.parametrize(("eos", "expected"), [(None, {1}), (7, {1, 7}), ([1, 8, 9], {1, 8, 9})])
def test_tokens_that_end_an_answer(make, eos, expected):
    assert make(eos=eos).eos_ids == expected


# --- chats


async def test_a_chat_is_written_by_the_models_template(make):
    chat = [{"role": "system", "content": "be brief"}, *USER]
    assert await make().chat(chat) == "<s>[system] be brief\n[user] hello\n[assistant] "
    assert await make().chat(USER, add_generation_prompt=False) == "<s>[user] hello\n"


async def test_the_template_of_tokenizer_config_is_used_where_there_is_no_file(make):
    assert await make(template=None, config={"chat_template": "{{ messages[0].content }}!"}).chat(USER) == "hello!"


async def test_named_templates_are_for_tools_and_for_all_else(make):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    made = make(template=None, config={"chat_template": named})
    assert await made.chat(USER) == "plain"
    assert await made.chat(USER, tools=[{"name": "clock"}]) == "clock"


async def test_a_model_without_a_template_takes_no_chat(make):
    with pytest.raises(BadRequest, match="this model has no chat template: use /v1/completions"):
        await make(template=None).chat(USER)


async def test_what_the_client_gives_for_the_template_replaces_no_message(make):
    made = make(template="{{ messages[0].content }} {{ thinking }} {{ tools is none }}")
    extra = {"thinking": "off", "messages": [], "tools": [1]}
    assert await made.chat(USER, extra=extra) == "hello off True"


# --- folders that cannot be used


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "", "tokenizer.json cannot be read"),
        ("tokenizer.json", "[]", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("generation_config.json", "[]", "generation_config.json cannot be read"),
        ("chat_template.jinja", "{% for %}", "model: the chat template is faulty: line 1: "),
        ("chat_template.jinja", "\n{{ x | nosuchfilter }}", "the chat template is faulty: line 2: "),
    ],
)
def test_a_faulty_file_is_named(tmp_path, name, content, reason):
    write_folder(tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(ValueError, match=reason):
        Tokenizer.load(tmp_path / "model")


def test_a_template_that_is_no_text_is_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.load(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/tokenizer\.json cannot be read: No such file"):
        Tokenizer.load(tmp_path / "nowhere")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.importlib.util, "find_spec", lambda name: None if name == "jinja2" else name)
    with pytest.raises(ValueError, match=r"pip install 'pd-coordinator\[tokens\]'"):
        Tokenizer.load(write_folder(tmp_path))


def test_odd_values_in_the_files_are_passed_over(make):
    config = {"chat_template": 5, "unk_token": None, "pad_token": {"content": 3}, "eos_token": "nowhere"}
    made = make(template=None, config=config, eos="x")
    assert made.eos_ids == frozenset()


def test_the_extra_is_not_imported_with_the_package():
    import subprocess
    import sys

    code = (
        "import coordinator.tokens, coordinator.engines.token_answers, sys;"
        "print('tokenizers' in sys.modules, 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_folders_are_what_the_library_writes(tmp_path):
    written = json.loads((write_folder(tmp_path) / "tokenizer.json").read_text())
    assert written["decoder"]["type"] == "ByteLevel"
