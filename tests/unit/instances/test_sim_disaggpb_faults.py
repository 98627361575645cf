"""What can go wrong with disaggpb workers (disaggpb protocol page §6, §7), over real gRPC."""

import asyncio
import subprocess

import grpc
import pytest
from disaggpb_client import (
    DEADLINE_S,
    blocks_of,
    channel_to,
    decode_call,
    decoded,
    ids_of,
    kv_of,
    messages,
    pair,
    prefill_call,
    prefilled,
    until_open,
)
from openai_client import get, post, until

from instances.disaggpb import vocabulary
from instances.options import Options
from instances.run import Fleet

OK, UNKNOWN, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE


def shown(got):
    """Layers in their order, `done` where it is."""
    return [message.block.layer_idx if message.HasField("block") else "done" for message in got]


@pytest.mark.parametrize(
    ("fault", "sent"),
    [
        ("zero_layers", ["done"]),
        ("done_first", ["done", 0, 1, 2, 3]),
        ("no_done", [0, 1, 2, 3]),
        ("no_done@2", [0, 1]),
        ("block_after_done", [0, 1, 2, 3, "done", 4]),
        ("out_of_order", [1, 0, 2, 3, "done"]),
        ("duplicate", [0, 0, 1, 2, 3, "done"]),
        ("skip_layer", [0, 1, 2, "done"]),
    ],
)
async def test_streams_of_blocks_that_are_not_right(fault, sent):
    async with pair(prefill=[fault]) as fleet:
        got, code, _ = await prefilled(fleet.prefill[0])
        assert (shown(got), code) == (sent, OK)
        assert await fleet.kv_empty()


async def test_blocks_that_are_not_right():
    async with pair(prefill=["#1:wrong_id", "#2:odd_length@2", "#3:odd_length", "#4:wrong_kv"]) as fleet:
        prefill, decode = fleet.instances
        assert {block.request_id for block in await kv_of(prefill)} == {"somebody-else"}
        for odd in (2, 0):
            lengths = [len(block.k_data) % 2 for block in await kv_of(prefill)]
            assert lengths == [int(layer == odd) for layer in range(4)]
        got, _, _ = await decoded(decode, await kv_of(prefill))
        assert set(ids_of(got)) == {vocabulary.LOST}
        assert decode.engine.wrong_kv == {"content": 1}
        assert (await decoded(decode, await kv_of(prefill)))[0][-1].finish_reason == "stop"


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize(
    ("fault", "code", "details"),
    [("prefill_unavailable", UNAVAILABLE, "injected failure"), ("prefill_fail", UNKNOWN, "injected failure")],
)
async def test_prefill_fails_on_the_way(fault, code, details, after):
    async with pair(prefill=[f"{fault}@{after}"]) as fleet:
        got, *end = await prefilled(fleet.prefill[0])
        assert (shown(got), end) == (list(range(after)), [code, details])
        assert await fleet.kv_empty()
        assert (await get(fleet.prefill[0], "/sim/requests")).json["requests"][0]["outcome"] == code.name


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize(
    ("fault", "code", "details"),
    [("decode_unavailable", UNAVAILABLE, "injected failure"), ("decode_fail={}", UNKNOWN, "out of luck")],
)
async def test_decode_fails_on_the_way(fault, code, details, after):
    name, _, value = fault.partition("=")
    async with pair(decode=[f"{name}@{after}" + ("=out of luck" if value else "")]) as fleet:
        got, *end = await decoded(fleet.decode[0], await kv_of(fleet.prefill[0]))
        assert (len(got), end, any(message.done for message in got)) == (after, [code, details], False)
        assert await fleet.kv_empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_connections_that_break_on_the_way(role):
    async with pair(**{role: [f"#1:{role}_cut@2"]}) as fleet:
        prefill, decode = fleet.instances
        if role == "prefill":
            got, code, _ = await prefilled(prefill)
        else:
            got, code, _ = await decoded(decode, await kv_of(prefill))
        assert (code, len(got) <= 2) == (UNAVAILABLE, True)
        assert await fleet.kv_empty()
        # the worker goes on
        assert (await decoded(decode, await kv_of(prefill)))[1] is OK


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_workers_that_stall_or_are_slow(role):
    async with pair(**{role: [f"#1:{role}_stall@1", f"#2:{role}_slow=0.01"]}) as fleet:
        prefill, decode = fleet.instances
        kv = [] if role == "prefill" else await kv_of(prefill)
        instance = prefill if role == "prefill" else decode
        async with channel_to(instance) as channel:
            call = prefill_call(channel) if role == "prefill" else decode_call(channel, kv)
            stream = aiter(call)
            await anext(stream)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
            call.cancel()
        assert await fleet.kv_empty()
        again = prefilled(prefill) if role == "prefill" else decoded(decode, kv)
        assert (await again)[1] is OK


async def test_answers_that_are_not_right():
    faults = ["#1:decode_no_done", "#2:decode_no_done@3", "#3:decode_wrong_id", "#4:after_done", "#5:token_zero@2",
              "#6:token_zero", "#7:eos_first", "#8:length=3"]  # fmt: skip
    async with pair(decode=faults) as fleet:
        kv = await kv_of(fleet.prefill[0])

        async def answer():
            got, code, _ = await decoded(fleet.decode[0], kv)
            assert code is OK
            return got

        right = ids_of(await answer())
        assert len(right) == 9  # all but the last, which would have been done
        assert ids_of(await answer()) == right[:3]
        assert {message.request_id for message in await answer()} == {"somebody-else"}
        late = await answer()
        assert [message.done for message in late] == [False] * 9 + [True, False]
        assert ids_of(await answer())[:4] == [*right[:2], 0, right[3]]
        assert ids_of(await answer())[:2] == [0, right[1]]
        got = await answer()
        assert [(m.token_id, m.done, m.finish_reason) for m in got] == [(2, True, "stop")]
        assert ids_of(await answer())[3:] == [2]


async def test_faults_in_the_prompt():
    async with pair() as fleet:
        prompt = vocabulary.encode("hello [[fault:decode_fail@1=marked]] [[length:5]]")
        kv = await kv_of(fleet.prefill[0], prompt=prompt)
        got, code, details = await decoded(fleet.decode[0], kv, prompt=prompt)
        assert (len(got), code, details) == (1, UNKNOWN, "marked")
        prompt = vocabulary.encode("hello [[fault:decode_fial]]")
        _, code, details = await prefilled(fleet.prefill[0], prompt=prompt)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "did you mean 'decode_fail'" in details


@pytest.mark.parametrize(
    ("fault", "code", "details"),
    [
        ("status", UNAVAILABLE, "injected failure"),
        ("status=8", grpc.StatusCode.RESOURCE_EXHAUSTED, "injected failure"),
        ("status=99", UNKNOWN, "injected failure"),
        ("close", UNAVAILABLE, None),
        ("reset", UNAVAILABLE, None),
    ],
)
async def test_faults_of_all_engines_at_once(fault, code, details):
    async with pair(prefill=[f"first=1:{fault}"]) as fleet:
        got, *end = await prefilled(fleet.prefill[0])
        assert (got, end[0]) == ([], code)
        assert details in (None, end[1])
        assert (await prefilled(fleet.prefill[0]))[1] is OK


async def test_a_text_for_the_status():
    async with pair(prefill=["status=5", "body=no such thing"]) as fleet:
        assert (await prefilled(fleet.prefill[0]))[1:] == (grpc.StatusCode.NOT_FOUND, "no such thing")


async def test_a_call_that_hangs_and_one_that_is_late():
    async with pair(prefill=["#1:hang", "#2:delay=0.05"]) as fleet:
        prefill = fleet.prefill[0]
        async with channel_to(prefill) as channel:
            call = prefill_call(channel)
            await until(lambda: prefill.live == 1)
            call.cancel()
        await until(lambda: prefill.live == 0)
        assert (await prefilled(prefill))[1] is OK


async def test_a_worker_that_dies_and_comes_back():
    async with pair(decode=["#1:crash=0.02"]) as fleet:
        decode = fleet.decode[0]
        kv = await kv_of(fleet.prefill[0])
        assert (await decoded(decode, kv))[1] is UNAVAILABLE
        await until_open(decode)
        assert (await decoded(decode, kv))[1] is OK
        decode.crash()
        await until(lambda: not decode._sites)
        got, code, _ = await decoded(decode, kv)
        assert (got, code) == ([], UNAVAILABLE)
        assert await fleet.kv_empty()


async def test_acts():
    async with pair(decode=["decode_stall@1"]) as fleet:
        decode = fleet.decode[0]
        kv = await kv_of(fleet.prefill[0])
        for act, code in (("cut", UNAVAILABLE), ("cancel", grpc.StatusCode.CANCELLED)):
            async with channel_to(decode) as channel:
                call = decode_call(channel, kv)
                await anext(aiter(call))
                await until(lambda: decode.engine.door.connections == 1)
                assert (await post(decode, "/sim/act", {"do": act})).status == 200
                async with asyncio.timeout(DEADLINE_S):
                    assert await call.code() is code
            assert await fleet.kv_empty()
        assert (await post(decode, "/sim/act", {"do": "dance"})).status == 400


async def test_it_starts_late_and_has_too_few_blocks():
    async with pair(more={"startup_s": 60}) as fleet:
        assert (await prefilled(fleet.prefill[0]))[1:] == (UNAVAILABLE, "the model is not loaded yet")
    async with pair(more={"blocks": 1, "block_tokens": 4}) as fleet:
        _, code, details = await prefilled(fleet.prefill[0])
        assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "5 KV blocks wanted, 1 exist")


# --- health


async def _health(instance, service=b""):
    async with channel_to(instance) as channel:
        asked = b"\x0a" + bytes([len(service)]) + service if service else b""
        return await channel.unary_unary("/grpc.health.v1.Health/Check")(asked, timeout=DEADLINE_S)


async def test_health():
    async with pair(health=1) as fleet:
        prefill, decode = fleet.instances
        assert await _health(prefill) == await _health(prefill, b"disagg.PrefillWorker") == b"\x08\x01"
        assert await _health(decode, b"disagg.DecodeWorker") == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await _health(prefill, b"disagg.DecodeWorker")
        assert prefill.ordinal == 0
        for fault in ("health_status", "health_fail_after=0"):
            await post(prefill, "/sim/faults", {"set": [fault]})
            assert await _health(prefill) == b"\x08\x02"
            assert (await prefilled(prefill))[1] is OK
        await post(prefill, "/sim/faults", {"set": ["health_hang"]})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await _health(prefill)
    async with pair() as fleet:  # the real one has none
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await _health(fleet.prefill[0])


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=worker",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return key, cert


async def test_tls(certificate):
    key, cert = certificate
    async with pair(tls_key=str(key), tls_cert=str(cert)) as fleet:
        prefill = fleet.prefill[0]
        assert prefill.engine.announce() == "gRPC with TLS"
        async with channel_to(prefill, credentials=grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            got, code, _ = await messages(prefill_call(channel))
        assert (len(blocks_of(got)), code) == (4, OK)
        assert (await get(prefill, "/sim/state")).json["inference_requests"] == 1
        assert (await prefilled(prefill))[1] is UNAVAILABLE  # without TLS


async def test_tls_with_client_certificates(certificate):
    key, cert = certificate
    root = cert.read_bytes()
    async with pair(tls_key=str(key), tls_cert=str(cert), tls_client_ca=str(cert)) as fleet:
        async with channel_to(fleet.prefill[0], credentials=grpc.ssl_channel_credentials(root)) as channel:
            assert (await messages(prefill_call(channel)))[1] is UNAVAILABLE
        own = grpc.ssl_channel_credentials(root, key.read_bytes(), root)
        async with channel_to(fleet.prefill[0], credentials=own) as channel:
            assert (await messages(prefill_call(channel)))[1] is OK


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tls_cert": "x"}, "go together"),
        ({"tls_client_ca": "x"}, "go together"),
        ({"tls_cert": "/no/such/file", "tls_key": "/no/such/file"}, "cannot read /no/such/file"),
        ({"layers": "0"}, "layers must be at least 1"),
        ({"colour": "red"}, "no setting 'colour'"),
    ],
)
async def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        await Fleet([Options(engine="disaggpb", settings=settings)]).__aenter__()


# --- connections


async def test_connections_of_both_kinds_on_one_port():
    async with pair() as fleet:
        prefill = fleet.prefill[0]
        reader, writer = await asyncio.open_connection(prefill.host, prefill.port)
        writer.write(b"GE")  # not enough to tell
        await asyncio.sleep(0)
        writer.write(b"T /sim/state HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        async with channel_to(prefill) as channel:
            assert (await messages(prefill_call(channel)))[1] is OK
            assert (prefill.engine.door.connections, prefill.engine.door.accepted) == (1, 1)
        await until(lambda: prefill.engine.door.connections == 0)
        _, silent = await asyncio.open_connection(prefill.host, prefill.port)
        silent.close()  # without a word
        await silent.wait_closed()


async def test_many_bytes_each_way():
    shape = {"layers": 2, "kv_heads": 64, "head_dim": 256, "max_message_bytes": -1}
    async with pair(**shape) as fleet:
        prompt = [7] * 256
        kv = await kv_of(fleet.prefill[0], prompt=prompt)
        assert sum(len(block.k_data) for block in kv) == 16 << 20
        got, code, _ = await decoded(fleet.decode[0], kv, prompt=prompt, max_new_tokens=1)
        assert (len(got), code, fleet.decode[0].engine.wrong_kv) == (1, OK, {})
