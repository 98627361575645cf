"""Prefill and decode, both legs driven by hand (vLLM protocol page §1)."""

import asyncio
import copy

import pytest
from openai_client import (
    CHAT,
    COMPLETIONS,
    WANTED,
    chat,
    clamped,
    completion,
    decode_leg,
    get,
    opened,
    post,
    prefill_leg,
    stream,
    until,
)

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

PROMPT = "the quiet river " * 80


def pair(timing=None, prefills=1, **settings):
    timing = timing or Timing()
    made = [
        Options(engine="vllm", role=role, timing=timing, block_tokens=16, prefix_blocks=64, settings=settings)
        for role in ("prefill",) * prefills + ("decode",)
    ]
    return Fleet(made)


async def expected(path, body):
    async with Fleet([Options(engine="vllm")]) as fleet:
        return (await post(fleet.hybrid[0], path, body)).json["choices"]


@pytest.mark.parametrize("shape", ["new", "plain", "old"])
async def test_the_two_legs_give_the_answer_of_one_instance(shape):
    async with pair(shape=shape) as fleet:
        prefill, decode = fleet.instances
        for path, body in ((CHAT, chat(PROMPT, max_tokens=20)), (COMPLETIONS, completion(PROMPT, max_tokens=20))):
            params = await prefill_leg(prefill, path, body)
            assert (
                prefill.ledger.count("pinned")
                == len(params["remote_block_ids"][0] if shape != "old" else params["remote_block_ids"])
                == 16
            )
            assert prefill.ledger.count("allocated") == 0
            answer = await decode_leg(decode, path, body, params)
            assert answer.json["choices"] == await expected(path, body)
            assert prefill.ledger.used_blocks == decode.ledger.used_blocks == 0
            assert prefill.ledger.released[-1]["why"] == "read by decode"
        assert decode.engine.state()["recomputed_locally"] == 0
        page = (await get(decode, "/metrics")).body.decode()
        assert 'vllm:nixl_xfer_time_seconds_count{engine="0",model_name="sim-model"} 2\n' in page
        assert 'source="local_compute"} 0\n' in page


async def test_the_params_are_opaque_on_purpose():
    async with pair() as fleet:
        prefill = fleet.prefill[0]
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert len(params["remote_block_ids"]) == 2
        assert len(params["remote_block_ids"][0]) == prefill.ledger.count("pinned")
        assert params["remote_engine_id"] == prefill.engine.handoffs.engine_id
        assert params["remote_port"] == prefill.engine.side_channel_port != prefill.port
        assert len(str(params["sim_sentinel"]["number"])) == 19
        assert params["sim_sentinel"]["none"] is None
        assert {"tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"} <= set(params)
    async with pair(shape="old", side_channel_port=-1) as fleet:
        params = await prefill_leg(fleet.prefill[0], CHAT, chat(PROMPT))
        assert all(isinstance(block, int) for block in params["remote_block_ids"])
        assert params["remote_port"] == fleet.prefill[0].port
        assert not {"remote_request_id", "dcp_size", "transfer_mode"} & set(params)


def set_deep(value):
    value["sim_sentinel"]["number"] = float(value["sim_sentinel"]["number"])


ALTERATIONS = {
    "float for integer": set_deep,
    "key lost": lambda value: value.pop("sim_sentinel"),
    "null dropped": lambda value: value["sim_sentinel"].pop("none"),
    "key added": lambda value: value.update(aborted_request=[]),
    "flattened": lambda value: value.update(tp_size="1"),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
async def test_altered_params_are_refused(alter):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        altered = copy.deepcopy(params)
        alter(altered)
        answer = await decode_leg(decode, CHAT, chat(PROMPT), altered)
        assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
        assert decode.engine.load_failures == {"altered": 1}
        # what was made is still there, for those who name it rightly; the order of keys does not matter
        answer = await decode_leg(decode, CHAT, chat(PROMPT), dict(reversed(params.items())))
        assert answer.status == 200
        assert await fleet.kv_empty()


async def test_params_hold_once_and_for_their_engine_only():
    async with pair(prefills=2) as fleet:
        first, second, decode = fleet.instances
        body = chat(PROMPT)
        params = await prefill_leg(first, CHAT, body)
        assert (await decode_leg(decode, CHAT, body, params)).status == 200
        assert (await decode_leg(decode, CHAT, body, params)).status == 500
        assert decode.engine.load_failures == {"used": 1}
        params = await prefill_leg(first, CHAT, body)
        foreign = {**params, "remote_port": second.engine.side_channel_port}
        assert (await decode_leg(decode, CHAT, body, foreign)).status == 500
        assert decode.engine.load_failures["engine id"] == 1
        nowhere = {key: value for key, value in params.items() if key != "remote_host"}
        assert (await decode_leg(decode, CHAT, body, nowhere)).status == 500
        assert decode.engine.load_failures["unreachable"] == 1
        first.engine.act("restart", "")
        assert (await decode_leg(decode, CHAT, body, params)).status == 500
        assert decode.engine.load_failures["engine id"] == 2
        assert await fleet.kv_empty()


async def test_a_restart_on_the_same_port_has_another_engine_id():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        prefill.crash(0.01)
        await until(lambda: prefill.engine.handoffs.engine_id != params["remote_engine_id"])
        assert prefill.ledger.used_blocks == 0
        async with asyncio.timeout(5):
            while True:
                try:
                    fresh = await prefill_leg(prefill, CHAT, chat(PROMPT))
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        assert fresh["remote_port"] == params["remote_port"]
        assert (await decode_leg(decode, CHAT, chat(PROMPT), params)).status == 500
        assert (await decode_leg(decode, CHAT, chat(PROMPT), fresh)).status == 200
        assert await fleet.kv_empty()


async def test_an_expired_lease_gives_the_blocks_back():
    async with pair(kv_lease_s=0.2) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        assert prefill.ledger.count("pinned") > 0
        assert await fleet.kv_empty()
        assert prefill.ledger.released[-1]["why"] == "expired"
        events = await stream(decode, CHAT, {**chat(PROMPT), "kv_transfer_params": params})
        # the header of a stream is out before the KV is wanted
        assert (events.text(), events.error["code"], events.done) == ("", 500, 1)
        assert decode.engine.load_failures == {"expired": 1}
        assert "vllm:nixl_num_kv_expired_reqs_total{" in (await get(prefill, "/metrics")).body.decode()


async def test_recompute_instead_of_failure():
    body = chat(PROMPT, max_tokens=9)
    async with pair(kv_load_failure_policy="recompute") as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, body)
        await decode_leg(decode, CHAT, body, params)
        answer = await decode_leg(decode, CHAT, body, params)
        assert answer.json["choices"] == await expected(CHAT, body)
        assert decode.engine.recomputed_locally == 1
        assert await fleet.kv_empty()


async def test_decode_without_params_pays_for_the_prefill():
    async with pair(Timing(prefill_ms=40)) as fleet:
        decode = fleet.decode[0]
        for number, params in enumerate((None, {}, {"do_remote_prefill": False}), 1):
            began_s = asyncio.get_running_loop().time()
            answer = await decode_leg(decode, CHAT, chat(PROMPT), params)
            assert asyncio.get_running_loop().time() - began_s > 0.035
            assert answer.json["choices"][0]["message"]["content"]
            assert decode.engine.recomputed_locally == number
        params = await prefill_leg(fleet.prefill[0], CHAT, chat(PROMPT))
        await decode_leg(decode, CHAT, chat(PROMPT), params)
        assert decode.engine.recomputed_locally == 3


async def test_the_kv_of_another_prompt_shows_in_the_text():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat("something else"))
        answer = await decode_leg(decode, CHAT, chat(PROMPT), params)
        assert set(answer.json["choices"][0]["message"]["content"].split()) == {"<KV-LOST>"}
        assert decode.engine.wrong_kv == 1


async def test_same_request_id_before_0_13():
    async with pair(same_request_id=1, kv_lease_s=60) as fleet:
        prefill, decode = fleet.instances
        body = chat(PROMPT)
        params = await prefill_leg(prefill, CHAT, body, "a")
        # the id is taken as long as prefill has its KV
        assert (
            "already running"
            in (await post(prefill, CHAT, clamped(body), {"X-Request-Id": "a"})).json["error"]["message"]
        )
        assert (await decode_leg(decode, CHAT, body, params, "b")).status == 500
        assert decode.engine.load_failures == {"request id": 1}
        assert (await decode_leg(decode, CHAT, body, params, "a")).status == 200
        assert await fleet.kv_empty()
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, body, "a")
        await prefill_leg(prefill, CHAT, body, "a")
        assert (await decode_leg(decode, CHAT, body, params, "b")).status == 200


async def test_cached_tokens():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        body = chat(PROMPT)
        first = (await post(prefill, CHAT, clamped(body))).json
        again = (await post(prefill, CHAT, clamped(body))).json
        details = [whole["usage"]["prompt_tokens_details"]["cached_tokens"] for whole in (first, again)]
        prompt = first["usage"]["prompt_tokens"]
        assert details == [0, prompt // 16 * 16]
        whole = (await decode_leg(decode, CHAT, body, again["kv_transfer_params"])).json
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt}


async def test_no_params_for_short_prompts_and_full_hits():
    async with pair(min_kv_tokens=20, params_on_hit=0) as fleet:
        prefill = fleet.prefill[0]
        assert await prefill_leg(prefill, COMPLETIONS, completion("short")) is None
        assert await prefill_leg(prefill, COMPLETIONS, completion(PROMPT)) is not None
        pinned = prefill.ledger.count("pinned")
        assert await prefill_leg(prefill, COMPLETIONS, completion(PROMPT)) is None
        assert prefill.ledger.count("pinned") == pinned
        assert prefill.ledger.count("allocated") == 0


async def test_a_budget_above_one_is_spent_and_seen():
    async with pair() as fleet:
        prefill = fleet.prefill[0]
        body = {**clamped(chat(PROMPT)), "max_completion_tokens": 30, "ignore_eos": True}
        whole = (await post(prefill, CHAT, body)).json
        assert whole["usage"]["completion_tokens"] == 30
        assert next(iter(prefill.records)).note == "prefill: 30 tokens, params given"
        await prefill_leg(prefill, CHAT, chat(PROMPT))
        assert list(prefill.records)[1].note == "prefill: 1 tokens, params given"
        assert prefill.engine.state()["generated_tokens"] == 31


async def test_a_streamed_prefill_keeps_kv_that_nobody_is_told_of():
    async with pair(kv_lease_s=0.3) as fleet:
        prefill = fleet.prefill[0]
        body = {**chat(PROMPT, max_tokens=1), "kv_transfer_params": WANTED}
        events = await stream(prefill, CHAT, body)
        assert events.finish() == "length"
        assert all("kv_transfer_params" not in value for value in events.values)
        assert prefill.ledger.count("pinned") > 0
        assert await fleet.kv_empty()


async def test_a_first_token_that_ends_the_answer():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        body = chat("[[length:0]]")
        whole = (await post(prefill, CHAT, clamped(body))).json
        assert whole["choices"][0]["finish_reason"] == "stop"
        answer = await decode_leg(decode, CHAT, body, whole["kv_transfer_params"])
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert answer.json["usage"]["completion_tokens"] == 1
        assert await fleet.kv_empty()


@pytest.mark.parametrize("body", [completion(["one two", "three"]), completion("one two", n=2)])
async def test_one_record_serves_one_sequence(body):
    async with pair(kv_lease_s=0.5) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, COMPLETIONS, body)
        # of the two sequences' KV, one is told of
        assert prefill.engine.handoffs.state()["offered"] == 2
        assert (await decode_leg(decode, COMPLETIONS, body, params)).status == 500
        assert decode.engine.load_failures == {"used": 1}
        assert await fleet.kv_empty()


async def test_roles_do_not_bind_but_are_noted_and_a_hybrid_has_no_connector():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(decode, CHAT, chat(PROMPT))
        assert (await decode_leg(prefill, CHAT, chat(PROMPT), params)).status == 200
        assert (prefill.engine.wrong_role, decode.engine.wrong_role) == (1, 1)
    async with Fleet([Options(engine="vllm")]) as fleet:
        assert await prefill_leg(fleet.hybrid[0], CHAT, chat(PROMPT)) is None
        assert fleet.hybrid[0].ledger.used_blocks == 0


async def test_a_caller_who_leaves_prefill_frees_its_kv():
    async with pair(Timing(prefill_ms=60_000)) as fleet:
        prefill = fleet.prefill[0]
        async with opened(prefill, CHAT, clamped(chat(PROMPT))) as request:
            await until(lambda: prefill.ledger.count("allocated") > 0)
            request.leave()
            assert await fleet.kv_empty()
        await until(lambda: next(iter(prefill.records)).outcome == "cut off")


async def test_a_caller_who_leaves_decode_during_the_transfer_frees_both_sides():
    async with pair(Timing(transfer_ms=60_000), kv_lease_s=60) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT), "stream": True, "kv_transfer_params": await prefill_leg(prefill, CHAT, chat(PROMPT))}
        async with opened(decode, CHAT, body) as request:
            await request.head()
            await until(lambda: prefill.engine.handoffs.state()["reading"] == 1)
            request.leave()
            assert await fleet.kv_empty()
        assert prefill.ledger.released[-1]["why"] == "given up by decode"
        assert decode.engine.serving.live == set()


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_caller_who_leaves_decode_ends_its_request(streaming):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        body = {**chat(PROMPT + "[[fault:stall@3]]"), "stream": streaming}
        params = await prefill_leg(prefill, CHAT, body)
        async with opened(decode, CHAT, {**body, "kv_transfer_params": params}) as request:
            await until(lambda: decode.engine.meters.generated_tokens == 3)
            assert decode.ledger.count("allocated") > 0
            request.leave()
            assert await fleet.kv_empty()
        assert decode.engine.meters.ended == {"abort": 1}


async def test_transfer_time_is_paid():
    async with pair(Timing(transfer_ms=40)) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        began_s = asyncio.get_running_loop().time()
        assert (await decode_leg(decode, CHAT, chat(PROMPT), params)).status == 200
        assert asyncio.get_running_loop().time() - began_s > 0.035
        assert decode.engine.transfer_s.total > 0.035


async def test_prefill_dies_during_the_transfer():
    async with pair(Timing(transfer_ms=50)) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(PROMPT))
        async with opened(decode, CHAT, {**chat(PROMPT), "kv_transfer_params": params}) as request:
            await until(lambda: prefill.engine.handoffs.state()["reading"] == 1)
            prefill.crash()
            status, _, _ = await request.head()
        assert status == 500
        assert decode.engine.load_failures == {"unreachable": 1}
        assert await fleet.kv_empty()
