import asyncio
import json
import logging

import pytest
from engine_world import held, scheduler
from vllm_pair import CHAT, COMPLETIONS, DONE, HOLD, Placement, event, reply, sse

from coordinator.config.errors import OptionError
from coordinator.core.errors import BadRequest, EngineFailed, EngineRefused, Side
from coordinator.engines.table import load_engine
from coordinator.engines.vllm import VllmEngine

ORDER = ["sent", "prefilled", "decoding"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prefill_then_decode_with_its_record(world, stream, path):
    body = {} if path == CHAT else {"prompt": "hi"}
    sink, placement = await world.serve(world.request(path, stream=stream, max_tokens=7, seed=2**60, **body))
    assert sink.ended
    assert placement.moments == ORDER
    [(p_headers, p_body)], [(d_headers, d_body)] = world.p.seen, world.d.seen
    assert p_headers["x-request-id"] == d_headers["x-request-id"] == placement.wire_ids[0]
    assert (p_body["max_tokens"], d_body["max_tokens"]) == (1, 7)
    assert p_body["kv_transfer_params"] == HOLD
    assert d_body["kv_transfer_params"]["s"] == 2**62
    assert p_body["seed"] == d_body["seed"] == 2**60
    assert world.fetched == placement.wire_ids
    assert not world.pinned


async def test_headers_of_both_legs(world):
    headers = [(b"authorization", b"Bearer t"), (b"content-type", b"text/plain"), (b"traceparent", b"00-1")]
    await world.serve(world.request(headers=headers))
    for seen, _ in (*world.p.seen, *world.d.seen):
        assert seen["authorization"] == "Bearer t"
        assert seen["content-type"] == "application/json"
        assert seen["traceparent"] == "00-1"


async def test_every_attempt_has_an_id_of_its_own(world):
    request = world.request()
    ids = [(await world.serve(request))[1].wire_ids[0] for _ in range(3)]
    assert len(set(ids)) == 3


async def test_the_stream_is_relayed_as_it_comes(world):
    sink, _ = await world.serve(world.request(stream=True))
    assert sink.text == b"".join(
        (event({"role": "assistant", "content": ""}), event({"content": "A"}), event({"content": "B"}, "length"), DONE)
    )
    assert sink.text.count(b"[DONE]") == 1
    assert sink.pacing


async def test_done_is_added_where_the_engine_does_not_send_it(world):
    world.d.events = [event({"content": "A"}, "stop")]
    sink, _ = await world.serve(world.request(stream=True))
    assert sink.text == event({"content": "A"}, "stop") + DONE


async def test_cached_tokens_are_prefills(world):
    world.p.extra = {"usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    world.d.extra = {"usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 9}}}
    sink, _ = await world.serve(world.request())
    assert json.loads(sink.answer)["usage"] == {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}
    sink, _ = await world.serve(world.request(stream=True, stream_options={"include_usage": True}))
    usage = json.loads(sink.text.split(b"\n\n")[3][len(b"data: ") :])["usage"]
    assert usage == {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}
    assert sink.text.count(b'"usage"') == 1
    assert sink.text.endswith(DONE)


async def test_prompt_logprobs_are_prefills(world):
    world.p.extra = {"prompt_logprobs": [None, {"5": {"logprob": -1.5}}]}
    sink, _ = await world.serve(world.request(prompt_logprobs=1))
    assert json.loads(sink.answer)["prompt_logprobs"] == world.p.extra["prompt_logprobs"]


# --- no record


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_record_decode_computes_the_prompt_and_it_is_told(world, stream, caplog):
    caplog.set_level(logging.INFO, "test.vllm")
    world.p.records = False
    for _ in range(3):
        sink, _ = await world.serve(world.request(stream=stream))
        assert sink.ended
    assert all("kv_transfer_params" not in body for body in world.d.bodies)
    assert world.count("missing_kv", "vllm") == 3
    [line] = [record.getMessage() for record in caplog.records]
    assert "p0" in line
    assert "kv_transfer_params" in line


async def test_without_a_record_a_strict_prefill_has_failed(world):
    world.p.records = False
    placement = Placement(world.p.instance(on_missing_kv="error"), world.decode)
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(), placement=placement)
    assert (caught.value.side, caught.value.instance_id, caught.value.reason) == (Side.PREFILL, "p0", "missing_kv")
    assert not world.d.seen
    world.p.finish = "stop"  # nothing was left to hand over: no failure
    sink, _ = await world.serve(world.request(), placement=placement)
    assert sink.ended


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"], "stream": True}, {"echo": True, "logprobs": 1}]
)
async def test_what_needs_several_consumers_runs_on_decode_alone(world, body):
    sink, placement = await world.serve(world.request(COMPLETIONS, **{"prompt": "a", **body}))
    assert sink.ended
    assert not world.p.seen
    assert world.d.bodies == [{"prompt": "a", **body}]
    assert len(placement.wire_ids) == 1
    assert placement.moments == ["skipped", "sent", "decoding"]
    assert world.count("missing_kv", "vllm") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_alone_holds_no_share_of_prefill(world, stream):
    made = scheduler(world.prefill, world.decode)
    request = world.request(COMPLETIONS, prompt="a", n=2, stream=stream)
    lease = made.try_place(request)
    world.d.gate.clear()
    with lease:
        task = asyncio.create_task(world.serve(request, placement=lease))
        await world.until(lambda: world.d.seen)
        assert held(made) == {"d0": (1, 0)}
        world.d.gate.set()
        await task
        assert held(made) == {"d0": (1, 0)}
        assert lease.prefilled_s is None
        assert lease.decoding_s is not None
    assert held(made) == {}


# --- API families and other instances


@pytest.mark.parametrize(
    ("path", "api", "body"),
    [("/generate", "tgi", {"inputs": "x"}), ("/v2/models/m/generate", "triton", {"text_input": "x"})],
)
async def test_a_family_that_the_engine_does_not_speak(world, path, api, body):
    with pytest.raises(BadRequest, match=f"do not speak the {api} API"):
        await world.serve(world.request(path, api=api, **body))
    with pytest.raises(BadRequest):
        await world.engine.call(world.request(path, api=api, **body), world.decode)
    assert world.p.seen + world.d.seen == []


async def test_vllms_own_generate_runs_on_decode(world):
    pieces = b'{"text":"a"}\0{"error":"b"}\0'  # the word is no error there

    async def answer(headers, body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(pieces), pieces))

    world.d.answer = answer
    request = world.request("/generate", api="vllm", raw=b'{"prompt":"x","stream":true,"kv_transfer_params":{}}')
    sink, _ = await world.serve(request)
    assert sink.text == pieces
    assert world.d.bodies == [{"prompt": "x", "stream": True}]
    assert not world.p.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_one_instance_for_both_gets_the_clients_request(world, stream):
    placement = Placement(world.decode, world.decode)
    given = {"max_tokens": 7, "n": 2, "kv_transfer_params": {"remote_host": "evil"}}
    sink, _ = await world.serve(world.request(stream=stream, **given), placement=placement)
    assert sink.ended
    [body] = world.d.bodies
    assert body.get("n") == 2
    assert "kv_transfer_params" not in body
    assert world.count("missing_kv", "vllm") == 0


async def test_a_name_that_cannot_be_read_is_the_clients_fault(world):
    with pytest.raises(BadRequest):
        await world.serve(world.request(raw=b'{"messages":[],"\\ud800":1}'))


async def test_call_is_passed_to_one_instance(world):
    async def answer(headers, body, writer):
        await reply(writer, {"tokens": [1]} if body.get("prompt") == "x" else {"error": "odd"}, 200 if body else 422)

    world.d.answer = answer
    found = await world.engine.call(world.request("/generate", api="vllm", raw=b'{"prompt":"x"}'), world.decode)
    assert (found.status, json.loads(found.body)) == (200, {"tokens": [1]})


# --- failures


def failing(body=b'{"error":{"message":"boom"}}', status=500, extra=b""):
    async def answer(headers, request, writer):
        await reply(writer, body, status, extra)

    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_prefill_is_the_clients_answer(world, stream):
    world.p.answer = failing(status=422, extra=b"retry-after: 7\r\n")
    with pytest.raises(EngineRefused) as caught:
        await world.serve(world.request(stream=stream))
    assert (caught.value.status, caught.value.message, caught.value.retry_after_s) == (422, "boom", 7)
    assert not world.d.seen


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failing(), "http_5xx"),
        (failing(b"{}", 200), "bad_reply"),
        (failing(b'{"choices":[', 200), "bad_reply"),
        (failing(b'{"error":{"message":"boom"}}', 200), "engine_error"),
        (failing(b"", 302), "bad_reply"),
    ],
)
async def test_a_failure_of_prefill(world, answer, reason):
    world.p.answer = answer
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request())
    assert (caught.value.side, caught.value.instance_id, caught.value.reason) == (Side.PREFILL, "p0", reason)
    assert not world.d.seen


@pytest.mark.parametrize(
    ("answer", "reason", "doubted"),
    [
        (failing(b"{}", 503), "http_5xx", "p0"),
        (failing(b"", 200), "bad_reply", ""),
        (failing(b'{"choices":[', 200), "bad_reply", ""),
        (failing(b'{"error":{"message":"boom"}}', 200), "engine_error", "p0"),
    ],
)
@pytest.mark.parametrize("prompts", ["one", ["several", "of them"]])
async def test_a_failure_of_decode(world, answer, reason, doubted, prompts):
    """It may be prefill's KV that nobody can read: decode says no more than that it has failed."""
    world.d.answer = answer
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(COMPLETIONS, prompt=prompts))
    assert (caught.value.side, caught.value.instance_id, caught.value.reason) == (Side.DECODE, "d0", reason)
    assert caught.value.doubted == doubted


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_listens_at_decode(world, stream):
    world.d.close()
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(stream=stream))
    assert (caught.value.side, caught.value.reason, caught.value.connecting) == (Side.DECODE, "connect_refused", True)


async def test_an_answer_of_decode_that_breaks_off(world):
    world.d.cut = True
    sink_pieces = []
    with pytest.raises(EngineFailed) as caught:
        sink_pieces.append(await world.serve(world.request(stream=True)))
    assert (caught.value.side, caught.value.reason) == (Side.DECODE, "closed")
    await world.settled()
    assert not world.orphans


async def test_an_error_event_fails_the_request_with_the_engines_words(world):
    world.d.events = [event({"content": "A"}), sse({"error": {"message": "out of room", "code": 500}}), DONE]
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(stream=True))
    assert (caught.value.side, caught.value.reason) == (Side.DECODE, "engine_error")
    assert caught.value.message == "the decode instance failed: out of room"
    assert not caught.value.doubted  # a token is out, so decode has read prefill's KV


async def test_an_error_event_before_the_first_token_may_be_for_want_of_the_kv(world):
    world.d.events = [sse({"error": {"message": "boom", "code": 500}}), DONE]
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(stream=True))
    assert (caught.value.side, caught.value.doubted) == (Side.DECODE, "p0")


# --- instances


def test_options():
    assert VllmEngine.options({}) == {}
    assert VllmEngine.options({"on_missing_kv": "error"}) == {"on_missing_kv": "error"}
    for given, words in (({"on_missing": "error"}, "unknown key"), ({"on_missing_kv": True}, "recompute or error")):
        with pytest.raises(OptionError, match=words):
            VllmEngine.options(given)
    assert load_engine("vllm") is VllmEngine


async def test_probe_asks_for_health_and_now_and_then_for_the_model(world):
    assert [await world.engine.probe(world.decode) for _ in range(3)] == ["the-model"] * 3
    assert world.model_calls == 1
    world.d.health = 503
    with pytest.raises(EngineFailed) as caught:
        await world.engine.probe(world.decode)
    assert caught.value.reason == "http_5xx"
    world.d.health = 404  # it answers, so it is there
    assert await world.engine.probe(world.decode) == "the-model"


async def test_an_engine_without_a_list_of_models_is_alive(world):
    world.models_status = 404
    assert await world.engine.probe(world.decode) is None


async def test_probe_of_nobody(world):
    world.d.close()
    with pytest.raises(EngineFailed) as caught:
        await world.engine.probe(world.decode)
    assert caught.value.connecting


async def test_attach_and_detach(world):
    assert world.watcher.links == ["up", "up"]
    await world.serve(world.request())
    await world.engine.detach(world.decode)
    await world.until(lambda: not world.d.writers)
