import asyncio
import gzip
import random
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_fakes import SlowExecutor, settle

from coordinator.core.errors import BadRequest, BodyTooLarge, InternalError, UnsupportedEncoding
from coordinator.server.body import Expander, Expansion, coding_of
from coordinator.server.pieces import Pieces

MIB = 1 << 20
PLAIN = bytes(range(256)) * 50


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def bomb(size_mib):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(b" " * MIB) for _ in range(size_mib)) + packer.flush()


def in_pieces(data, size=100000):
    pieces = Pieces()
    for at in range(0, len(data), size):
        pieces.add(data[at : at + size])
    return pieces


def squeezed(data):
    """The same bytes at any time of day, so that they can name a case."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ([], None),
        ([b""], None),
        ([b"identity"], None),
        ([b"GZip"], "gzip"),
        ([b" x-gzip "], "x-gzip"),
        ([b"identity, deflate"], "deflate"),
        ([b"identity", b"gzip"], "gzip"),
    ],
)
def test_codings_that_are_read(values, coding):
    assert coding_of(values) == coding


@pytest.mark.parametrize("values", [[b"br"], [b"zstd"], [b"compress"], [b"\xff"]])
def test_an_unknown_coding_is_named(values):
    with pytest.raises(UnsupportedEncoding) as caught:
        coding_of(values)
    assert caught.value.status == 415
    assert values[0].decode("latin-1") in caught.value.message


def test_a_long_name_is_cut():
    with pytest.raises(UnsupportedEncoding) as caught:
        coding_of([b"x" * 5000])
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("values", [[b"gzip, gzip"], [b"gzip", b"deflate"]])
def test_only_one_coding(values):
    with pytest.raises(UnsupportedEncoding):
        coding_of(values)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", squeezed(PLAIN)),
        ("x-gzip", squeezed(PLAIN)),
        ("gzip", squeezed(PLAIN[:100]) + squeezed(b"") + squeezed(PLAIN[100:])),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
    ],
)
def test_expansion(coding, data):
    assert Expander(coding, data, len(PLAIN)).run() == PLAIN


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_data_cut_anywhere_is_refused(coding):
    data = gzip.compress(b"hello") if coding == "gzip" else zlib.compress(b"hello")
    for end in range(len(data)):
        with pytest.raises(BadRequest):
            Expander(coding, data[:end], 100).run()


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", b"not gzip at all"),
        ("gzip", zlib.compress(PLAIN)),
        ("gzip", squeezed(PLAIN) + b"junk"),
        ("gzip", squeezed(PLAIN)[:-8] + bytes(8)),
        ("deflate", zlib.compress(PLAIN) + b"junk"),
        ("deflate", b"\xff\xff\xff"),
        ("gzip", squeezed(b"") * 1025),
    ],
)
def test_corrupt_data_is_refused(coding, data):
    with pytest.raises(BadRequest) as caught:
        Expander(coding, data, MIB).run()
    assert caught.value.status == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_the_limit_is_exact(coding):
    data = gzip.compress(PLAIN) if coding == "gzip" else zlib.compress(PLAIN)
    with pytest.raises(BodyTooLarge):
        Expander(coding, data, len(PLAIN) - 1).run()


def test_a_bomb_costs_little_more_than_the_limit():
    data = bomb(200)
    assert len(data) < MIB
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            Expander("gzip", data, 8 * MIB).run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * MIB


def test_memory_is_twice_the_body_even_where_nothing_is_gained_by_compression():
    body = random.Random(1).randbytes(4 * MIB)
    pieces = in_pieces(gzip.compress(body))
    assert len(pieces) > len(body)
    tracemalloc.start()
    try:
        expander = Expander("gzip", pieces, len(body))
        expanded = expander.run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert expanded == body
    assert peak < 2.2 * len(body)  # beside the pieces, which were there before


def test_it_can_be_run_in_parts_and_stopped():
    expander = Expander("gzip", bomb(10), 32 * MIB)
    assert expander.run(MIB) is None
    assert expander.run() == b" " * 10 * MIB
    expander = Expander("gzip", bomb(10), 32 * MIB)
    expander.stop()
    assert expander.run() is None


def test_a_body_in_pieces_is_put_together():
    assert Expander(None, in_pieces(PLAIN), MIB).run() == PLAIN
    assert Expander("gzip", in_pieces(gzip.compress(PLAIN), 3), MIB).run() == PLAIN
    expander = Expander(None, in_pieces(PLAIN), MIB)
    expander.stop()
    assert expander.run() is None


async def test_a_long_body_is_put_together_in_a_thread():
    done, executor = Done(), SlowExecutor()
    body = bytes(range(256)) * 8192
    Expansion(None, in_pieces(body), 4 * MIB, done).begin(executor)
    assert not done.calls
    executor.run()
    await settle()
    assert done.calls == [(body, None)]


class Done:
    def __init__(self):
        self.calls = []

    def __call__(self, body, refusal):
        self.calls.append((body, refusal))


def test_a_small_body_is_expanded_at_once():
    done = Done()
    Expansion("gzip", gzip.compress(PLAIN), MIB, done).begin(SlowExecutor())
    assert done.calls == [(PLAIN, None)]


def test_a_small_broken_body_is_refused_at_once():
    done = Done()
    Expansion("gzip", b"junk", MIB, done).begin(SlowExecutor())
    assert done.calls[0][0] == b""
    assert isinstance(done.calls[0][1], BadRequest)


async def test_a_small_bomb_goes_on_in_a_thread():
    done, executor = Done(), SlowExecutor()
    data = bomb(40)
    assert len(data) < 65536
    Expansion("gzip", data, 32 * MIB, done).begin(executor)
    assert not done.calls
    executor.run()
    await settle()
    assert isinstance(done.calls[0][1], BodyTooLarge)


async def test_a_large_body_is_expanded_in_a_thread_alone():
    data = gzip.compress(bytes(range(256)) * 4096, 0)
    done, threads = asyncio.Event(), []

    def finished(body, refusal):
        threads.append((len(body), refusal))
        done.set()

    with ThreadPoolExecutor(1, initializer=lambda: threads.append(threading.current_thread())) as executor:
        Expansion("gzip", data, 2 * MIB, finished).begin(executor)
        async with asyncio.timeout(10):
            await done.wait()
    assert threads[0] is not threading.main_thread()
    assert threads[1] == (MIB, None)


async def test_a_cancelled_expansion_reports_nothing():
    done, executor = Done(), SlowExecutor()
    expansion = Expansion("gzip", bomb(40), 32 * MIB, done)
    expansion.begin(executor)
    expansion.cancel()
    executor.run()
    await settle()
    assert not done.calls


async def test_a_cancelled_executor_reports_nothing():
    done, executor = Done(), SlowExecutor()
    Expansion("gzip", bomb(40), 32 * MIB, done).begin(executor)
    executor.jobs[0][0].cancel()
    executor.jobs[0][0].set_running_or_notify_cancel()
    await settle()
    assert not done.calls


async def test_a_fault_of_our_own_is_an_internal_error():
    done, executor = Done(), SlowExecutor()
    Expansion("gzip", bomb(40), 32 * MIB, done).begin(executor)
    executor.jobs[0][0].set_exception(MemoryError())
    await settle()
    refusal = done.calls[0][1]
    assert isinstance(refusal, InternalError)
    assert refusal.detail == "MemoryError"
