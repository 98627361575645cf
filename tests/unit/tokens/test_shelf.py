"""Which tokenizer an instance has, and what happens while it is loaded."""

import threading
from pathlib import Path

import pytest
from token_folders import write_folder

from coordinator.core.errors import InternalError, NoInstance
from coordinator.core.instance import Address, Instance, Role
from coordinator.tokens import Tokenizers, shelf


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def folders(tmp_path):
    return [write_folder(tmp_path / name, kind) for name, kind in (("a", "byte_level"), ("b", "word_piece"))]


def instance(folder=None, model=None):
    options = {} if folder is None else {"tokenizer": str(folder)}
    return Instance("p", Role.PREFILL, Address("127.0.0.1", 9), "xllm", model=model, options=options)


def when_done(shelf_, folder):
    shelf_._loading[Path(folder)].exception(timeout=30)


async def test_the_instances_own_goes_before_the_default(folders):
    first, second = folders
    made = Tokenizers(first)
    made.load(folders)
    assert made.of(instance()) is made.of(instance(first)) is not made.of(instance(second))
    assert made.of(instance()) is made.of(instance())
    await made.aclose()


def test_without_a_folder_there_is_none_and_no_thread():
    made = Tokenizers()
    assert made.of(instance()) is None
    assert made.for_model("m") is made.for_model(None) is None
    assert made._pool is None


async def test_by_model(folders):
    first, second = folders
    made = Tokenizers(first, {"m": second})
    made.load(folders)
    assert made.for_model("m") is made.of(instance(second, "m"))
    assert made.for_model("other") is made.for_model(None) is made.of(instance())
    await made.aclose()


async def test_by_model_without_a_default(folders):
    first, second = folders
    made = Tokenizers(None, {"m": first})
    made.load(folders)
    assert made.for_model("m") is made.for_model(None)
    assert made.for_model("other") is None
    one = made.of(instance(second, "later"))
    assert made.for_model("later") is one
    assert made.for_model(None) is None
    await made.aclose()


async def test_any_name_where_the_one_model_has_none(folders):
    made = Tokenizers(None, {None: folders[0]})
    made.load(folders[:1])
    assert made.for_model("any") is made.for_model(None) is not None
    await made.aclose()


async def test_one_that_comes_later_is_loaded_in_a_thread(folders):
    made = Tokenizers()
    with pytest.raises(NoInstance, match="is being loaded") as caught:
        made.of(instance(folders[0]))
    assert caught.value.retry_after_s == 1
    when_done(made, folders[0])
    found = made.of(instance(folders[0]))
    assert found is made.of(instance(folders[0]))
    assert await found.encode("hello " * 1000)
    await made.aclose()


async def test_one_can_be_expected(folders, tmp_path):
    made = Tokenizers()
    made.expect(instance())
    made.expect(instance(folders[1]))
    when_done(made, folders[1])
    assert made.of(instance(folders[1])) is not None
    made.expect(instance(folders[1]))
    await made.aclose()


async def test_one_that_cannot_be_loaded_is_told_once_and_tried_again_later(folders, tmp_path, caplog):
    clock = Clock()
    made = Tokenizers(clock=clock)
    late = instance(tmp_path / "late")
    with pytest.raises(NoInstance):
        made.of(late)
    when_done(made, tmp_path / "late")
    with pytest.raises(InternalError) as caught:
        made.of(late)
    assert str(tmp_path) not in caught.value.message
    made.expect(late)
    for _ in range(3):
        with pytest.raises(InternalError):
            made.of(late)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    write_folder(tmp_path / "late")
    clock.now_s += shelf.RETRY_S
    with pytest.raises(NoInstance):
        made.of(late)
    when_done(made, tmp_path / "late")
    assert made.of(late) is not None
    await made.aclose()


def test_at_the_start_a_faulty_one_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizers(tmp_path).load([tmp_path])


async def test_closing_waits_for_nobody(folders):
    made = Tokenizers(folders[0])
    made.load(folders[:1])
    pool, go = made._threads(), threading.Event()
    *running, queued = [pool.submit(go.wait, 60) for _ in range(pool._max_workers + 1)]
    try:
        await made.aclose()
        assert queued.cancelled()
        assert not any(one.done() for one in running)
    finally:
        go.set()
