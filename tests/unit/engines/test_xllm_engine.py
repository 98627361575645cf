"""One xLLM request: what prefill is asked, and what the client gets of what instances push."""

import gc
import json
import weakref

import pytest
from engine_world import chat, count, turns, until
from xllm_pair import Pair, generation, output

from coordinator.core.errors import BadRequest, EngineFailed, EngineRefused, Side
from coordinator.core.ports import Completed

DONE = b"data: [DONE]\n\n"


def completion(prompt, *, stream=True, **more):
    return json.dumps({"model": "m", "prompt": prompt, "stream": stream, **more}).encode()


def at_completions(prompt="hello", *, stream=True, **more):
    return {"path": "/v1/completions", "body": completion(prompt, stream=stream, **more), "stream": stream}


def text_of(body):
    """(texts by index, finish reasons by index) of a completions stream."""
    texts, reasons = {}, {}
    for event in body.split(b"\n\n"):
        if event and event != b"data: [DONE]":
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons


async def test_prefill_is_asked_with_ids_and_the_way_back():
    async with Pair() as pair:
        served = pair.serve(**at_completions("hello world", max_tokens=7, temperature=0.5, stop=["x"]))
        body = await served.body()
        tokenizer = pair.context.tokenizers.for_model("m")
        assert body.pop("token_ids") == await tokenizer.encode("hello world")
        assert body == {
            "model": "m",
            "prompt": "hello world",
            "stream": True,
            "max_tokens": 7,
            "temperature": 0.5,
            "n": 1,
            "skip_special_tokens": True,
            "ignore_eos": False,
            "stop": ["x"],
            "service_request_id": served.wire_id,
            "source_xservice_addr": pair.address,
            "routing": {"prefill_name": pair.p.name, "decode_name": pair.d.name},
        }
        served.task.cancel()
        assert await served.result() == "cancelled"


async def test_a_stream_runs_from_prefills_token_to_decodes_end():
    async with Pair() as pair:
        served = pair.serve(**at_completions(stream_options={"include_usage": True}))
        await served.body()
        assert await pair.p.push(served.told(output("A"), first=True)) == [True]
        assert served.placed.names == ["sent", "prefilled"]
        assert await pair.d.push(served.told(output("B"))) == [True]
        assert served.placed.names == ["sent", "prefilled", "decoding"]
        assert await pair.d.push(served.told()) == [True], "a step without output"
        assert await pair.d.push(served.told(output("C"))) == [True]
        assert await pair.d.push(served.told(output(finish="stop"), finished=True, usage=(5, 3))) == [True]
        assert await served.result() == Completed()
        assert text_of(served.out.body.replace(b"\n\n" + DONE, b"\n\n")) == ({0: "ABC"}, {0: "stop"})
        usage = json.loads(served.out.body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 3)
        assert served.out.body.endswith(DONE)
        assert len(served.out.tokens) >= 3


async def test_a_whole_answer_is_that_of_the_last_message():
    async with Pair() as pair:
        served = pair.serve(body=chat("hi", stream=False), stream=False)
        body = await served.body()
        assert body["stream"] is False
        assert "[user] hi" in body["prompt"]
        assert await pair.p.push(served.told(output("A"), first=True, usage=(5, 1))) == [True]
        assert served.placed.names == ["sent", "prefilled"]
        assert served.out.events == []
        assert await pair.d.push(served.told(output("ABC", finish="length"), finished=True, usage=(5, 3))) == [True]
        assert await served.result() == Completed()
        answer = json.loads(served.out.body)
        assert answer["choices"][0]["message"]["content"] == "ABC"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 8


async def test_token_ids_go_as_they_are():
    async with Pair() as pair:
        served = pair.serve(**at_completions([5, 6, 7]))
        body = await served.body()
        assert body["token_ids"] == [5, 6, 7]
        assert body["prompt"]
        served.task.cancel()
        await served.result()


async def test_the_answer_of_max_tokens_1_is_prefills():
    async with Pair() as pair:
        for stream in (True, False):
            served = pair.serve(**at_completions(max_tokens=1, stream=stream))
            await served.body()
            told = served.told(output("A", finish="length"), first=True, finished=True, usage=(5, 1))
            assert await pair.p.push(told) == [True]
            assert await served.result() == Completed()
            if stream:
                assert text_of(served.out.body) == ({0: "A"}, {0: "length"})
            else:
                assert json.loads(served.out.body)["choices"][0]["text"] == "A"
            assert await pair.d.push(told) == [False], "decode says it again"


async def test_decode_that_overtakes_prefill_is_held():
    async with Pair(order_wait_s=60) as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.d.push(served.told(output("B")), served.told(output("C")))
        await pair.d.push(served.told(output(finish="stop"), finished=True, usage=(5, 3)))
        await turns(5)
        assert served.out.events == []
        await pair.p.push(served.told(output("A"), first=True))
        assert await served.result() == Completed()
        assert text_of(served.out.body) == ({0: "ABC"}, {0: "stop"})


async def test_a_first_token_that_is_half_a_character_releases_decode():
    async with Pair(order_wait_s=60) as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.d.push(served.told(output("\N{GREEK SMALL LETTER ALPHA}B")))
        await turns(5)
        assert served.out.events == []
        for fake in (pair.p, pair.d):
            assert await fake.channel.beat(fake.name, "one")
        await pair.d.push(served.told())
        await turns(5)
        assert served.out.events == [], "a step of decode's says nothing about prefill"
        await pair.p.push(served.told())
        await until(lambda: served.out.events)
        await pair.d.push(served.told(output(finish="stop"), finished=True))
        assert await served.result() == Completed()
        assert text_of(served.out.body)[0] == {0: "\N{GREEK SMALL LETTER ALPHA}B"}


async def test_decode_waits_no_longer_than_it_may():
    async with Pair(order_wait_s=0.01) as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.d.push(served.told(output("B")))
        await until(lambda: served.out.events)
        assert served.placed.names == ["sent", "prefilled", "decoding"]
        await pair.p.push(served.told(output("A"), first=True))
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert error.reason == "out_of_order"
        assert not served.out.over, "an answer with its tokens in disorder is no answer"


async def test_the_same_first_token_twice_counts_once():
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        first = served.told(output("A"), first=True)
        assert await pair.p.push(first, first) == [True, True]
        await pair.d.push(served.told(output("B", finish="stop"), finished=True))
        await served.result()
        assert text_of(served.out.body)[0] == {0: "AB"}


async def test_a_batch_of_many_requests_is_answered_in_its_order():
    async with Pair() as pair:
        one, other = (pair.serve(**at_completions()) for _ in range(2))
        await one.body()
        await other.body()
        told = [
            one.told(output("A"), first=True),
            generation("12345678901234567890", output("?")),
            other.told(output("X"), first=True),
            generation("no id at all", output("?")),
        ]
        assert await pair.p.push(*told) == [True, False, True, False]
        assert await pair.p.push() == []
        assert count(pair.context.metrics.late_frames) == 2
        ended = [served.told(output(finish="stop"), finished=True) for served in (other, one)]
        assert await pair.d.push(*ended, *ended) == [True, True, False, False], "a duplicate end is late"
        assert [await served.result() for served in (one, other)] == [Completed()] * 2


async def test_several_sequences_each_have_their_text_and_end():
    async with Pair() as pair:
        served = pair.serve(**at_completions(n=2))
        assert (await served.body())["n"] == 2
        await pair.p.push(served.told(output("A", 0), output("X", 1), first=True))
        await pair.d.push(served.told(output("Y", 1)))
        await pair.d.push(served.told(output("B", 0, finish="length"), output("Z", 1)))
        await pair.d.push(served.told(output("", 1, finish="stop"), output("?", 5), finished=True, usage=(5, 5)))
        assert await served.result() == Completed()
        assert text_of(served.out.body) == ({0: "AB", 1: "XYZ"}, {0: "length", 1: "stop"})


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_stream_tells_usage_only_where_it_is_wanted(wanted):
    """Instances tell it at the end of every stream (protocol page §6)."""
    async with Pair() as pair:
        served = pair.serve(**at_completions(stream_options={"include_usage": wanted}))
        await served.body()
        await pair.p.push(served.told(output("A"), first=True))
        await pair.d.push(served.told(output(finish="stop"), finished=True, usage=(5, 3)))
        assert await served.result() == Completed()
        told = [json.loads(event.removeprefix(b"data: ")) for event in served.out.body.split(b"\n\n")[:-2]]
        usages = [event["usage"] for event in told if event.get("usage")]
        assert [usage["completion_tokens"] for usage in usages] == ([3] if wanted else [])


async def test_logprobs_travel():
    async with Pair() as pair:
        served = pair.serve(**at_completions(logprobs=1, stream=False))
        assert (await served.body())["logprobs"] == 1
        told = {"log_prob_data": {"token": "A", "token_id": 65, "logprob": -0.5},
                "top_logprobs": [{"token": "A", "token_id": 65, "logprob": -0.5}]}  # fmt: skip
        last = served.told(output("A", finish="stop", logprobs=[told]), finished=True, usage=(5, 1))
        await pair.d.push(last)
        assert await served.result() == Completed()
        assert json.loads(served.out.body)["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]


async def test_a_whole_answer_without_its_outputs_is_none():
    async with Pair() as pair:
        served = pair.serve(**at_completions(stream=False))
        await served.body()
        await pair.d.push(served.told(finished=True, usage=(5, 1)))
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert error.reason == "bad_reply"
        assert served.out.events == []


# --- errors


@pytest.mark.parametrize(
    ("code", "message", "kind", "status"),
    [
        (1, "cancelled", EngineFailed, 503),
        (2, "boom", EngineFailed, 502),
        (2, "Model not supported", EngineRefused, 404),
        (3, "Prompt is too long", EngineRefused, 400),
        (3, "decode instance x is incompatible", EngineFailed, 502),
        (4, "too late", EngineFailed, 504),
        (5, "rate limit", EngineFailed, 429),
        (6, "sleeping", EngineFailed, 503),
        (7, "sleeping", EngineFailed, 503),
        (99, "", EngineFailed, 502),
    ],
)
async def test_status_codes_become_errors(code, message, kind, status):
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.p.push(served.told(status=(code, message)))
        error = await served.result()
        assert isinstance(error, kind)
        assert error.status == status
        if kind is EngineFailed:
            assert error.side is Side.PREFILL
            assert error.instance_id == "p0"
            assert (error.retry_after_s is not None) == (status in (429, 503))
        else:
            assert error.message == message
        assert await pair.p.push(served.told(output("A"), first=True)) == [False]


@pytest.mark.parametrize(
    ("told", "charged", "doubted"),
    [
        ((2, "Failed to add new requests to decode instance"), (Side.DECODE, "d0", "handoff_failed"), "p0"),
        ((3, "decode instance d0 is incompatible"), (Side.PREFILL, "p0", "engine_error"), "d0"),
        ((2, "boom"), (Side.PREFILL, "p0", "engine_error"), ""),
    ],
)
async def test_who_is_charged_and_who_is_avoided_for_what_prefill_says_of_the_pair(told, charged, doubted):
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.p.push(served.told(status=told))
        error = await served.result()
        assert (error.side, error.instance_id, error.reason) == charged
        assert error.doubted == doubted


async def test_an_error_in_the_middle_is_decodes_and_no_refusal():
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        await pair.p.push(served.told(output("A"), first=True))
        await pair.d.push(served.told(output("B")))
        await pair.d.push(served.told(status=(3, "invalid all of a sudden")))
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert (error.side, error.instance_id) == (Side.DECODE, "d0")
        assert not served.out.over


@pytest.mark.parametrize("how", ["refused", "failed", "cancelled"])
async def test_a_request_that_fails_is_freed_with_its_error(how):
    """Its prompt may be as long as a model's context: it must not wait for the garbage collector."""
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        (box,) = pair.engine._boxes._boxes.values()
        answer = weakref.ref(box._answer)
        del box
        gc.collect()
        gc.disable()
        try:
            if how == "cancelled":
                served.task.cancel()
            else:
                await pair.p.push(served.told(status=(3, "too long") if how == "refused" else (2, "broken")))
            error = await served.result()
            assert (error == "cancelled") == (how == "cancelled")
            del error, served
            await turns(5)
            assert answer() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["a", "b", "c", "d", "e"]},
        {"temperature": 2.5},
        {"frequency_penalty": -0.5},
        {"echo": True, "logprobs": 1},
        {"best_of": 2, "n": 1},
        {"n": 0},
        {"top_p": 1.5},
        {"presence_penalty": 3},
    ],
    ids=str,
)
async def test_what_engines_would_refuse_is_refused_here(more):
    async with Pair() as pair:
        served = pair.serve(**at_completions(**more))
        assert isinstance(await served.result(), BadRequest)
        assert pair.p.calls == []


async def test_an_empty_prompt_never_reaches_prefill():
    async with Pair() as pair:
        for prompt in ("", []):
            served = pair.serve(**at_completions(prompt, add_special_tokens=False))
            assert isinstance(await served.result(), BadRequest)
        assert pair.p.calls == []


@pytest.mark.parametrize(("status", "kind"), [(404, EngineRefused), (500, EngineFailed), (503, EngineFailed)])
async def test_a_call_that_prefill_does_not_take(status, kind):
    async with Pair() as pair:

        async def infer(call):
            call.reply(b"[E1002]no such method", status, ("x-bd-error-code", "1002"))

        pair.p.infer = infer
        served = pair.serve(**at_completions())
        error = await served.result()
        assert isinstance(error, kind)
        assert len(pair.engine._boxes) == 0


async def test_a_prefill_that_cannot_be_reached():
    async with Pair() as pair:
        await pair.p.refuse()
        served = pair.serve(**at_completions())
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert error.connecting
        assert error.instance_id == "p0"


async def test_a_prefill_that_does_not_answer_the_call_fails_in_time():
    async with Pair(call_timeout_s=0.1) as pair:

        async def infer(call):
            await call.left()

        pair.p.infer = infer
        error = await pair.serve(**at_completions()).result()
        assert isinstance(error, EngineFailed)
        assert error.reason == "timeout"


async def test_results_count_although_prefill_has_not_answered_the_call():
    async with Pair(call_timeout_s=60) as pair:

        async def infer(call):
            pair.p.took_on(json.loads(call.body))
            await call.left()

        pair.p.infer = infer
        served = pair.serve(**at_completions())
        await served.body()
        await pair.p.push(served.told(output("A"), first=True))
        await pair.d.push(served.told(output("B", finish="stop"), finished=True))
        assert await served.result() == Completed()


async def test_a_client_that_leaves_ends_the_request_at_the_instance():
    async with Pair() as pair:
        served = pair.serve(**at_completions())
        await served.body()
        assert await pair.p.push(served.told(output("A"), first=True)) == [True]
        served.task.cancel()
        assert await served.result() == "cancelled"
        assert await pair.d.push(served.told(output("B"))) == [False]
        assert count(pair.context.metrics.late_frames) == 1
        assert len(pair.engine._boxes) == 0


async def test_a_fault_of_one_request_spares_the_batch(caplog):
    async with Pair() as pair:
        bad, good = pair.serve(**at_completions()), pair.serve(**at_completions())
        await bad.body()
        await good.body()

        pair.engine._boxes._boxes[bad.wire_id]._answer = None
        told = [served.told(output("A"), first=True) for served in (bad, good)]
        assert await pair.p.push(*told) == [False, True]
        assert (await bad.result()).status == 500
        await pair.d.push(good.told(finished=True))
        assert await good.result() == Completed()
        assert "failed inside the coordinator" in caplog.text


async def test_without_a_tokenizer_ids_are_taken_and_text_is_not():
    async with Pair() as pair:
        object.__setattr__(pair.context, "tokenizers", type(pair.context.tokenizers)())
        served = pair.serve(**at_completions([1, 2]))
        assert (await served.body())["token_ids"] == [1, 2]
        await pair.p.push(served.told(output("A"), first=True))
        await pair.d.push(served.told(output(finish="stop"), finished=True))
        assert await served.result() == Completed()
        error = await pair.serve(**at_completions("text")).result()
        assert isinstance(error, BadRequest)
        assert "token ids" in error.message


async def test_echo_is_ours():
    async with Pair() as pair:
        served = pair.serve(**at_completions("hello", echo=True))
        assert "echo" not in await served.body()
        await pair.p.push(served.told(output(" A"), first=True))
        await pair.d.push(served.told(output(finish="stop"), finished=True))
        await served.result()
        assert text_of(served.out.body)[0] == {0: "hello A"}


async def test_other_families_get_their_own_shapes():
    async with Pair() as pair:
        body = b'{"inputs":"hello","parameters":{"max_new_tokens":5}}'
        served = pair.serve(family="tgi", path="/generate", body=body, stream=False)
        await served.body()
        await pair.d.push(served.told(output("AB", finish="stop"), finished=True, usage=(3, 2)))
        assert await served.result() == Completed()
        assert json.loads(served.out.body)["generated_text"] == "AB"


async def test_hybrid_instances_speak_for_themselves():
    async with Pair(0, 0) as pair:
        fake = await pair.add("h0")
        await pair.up()

        async def infer(call):
            assert call.target == "/v1/completions"
            call.reply(b'{"choices":[{"text":"whole"}]}')

        fake.infer = infer
        served = pair.serve("h0", "h0", **at_completions(stream=False))
        assert await served.result() == Completed()
        assert b"whole" in served.out.body


async def test_probes_ask_for_health_and_the_model():
    async with Pair() as pair:
        assert await pair.engine.probe(pair.instances["p0"]) == "m"
        pair.p.sick = True
        with pytest.raises(EngineFailed):
            await pair.engine.probe(pair.instances["p0"])
