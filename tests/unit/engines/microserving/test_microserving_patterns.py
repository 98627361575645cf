"""Patterns: routers of the user's own, and what the coordinator does for them."""

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest
from engine_world import held, turns, until
from microserving_pair import COMPLETIONS, GENERATE, PREPARE, SEND, WordTokenizer, World
from tutorial_seed import code_of, same_code, seed_page

from coordinator.core.errors import BadRequest, EngineFailed, EngineRefused, InternalError, NoInstance
from coordinator.core.ports import COMPLETED, Resume
from coordinator.engines.microserving import pattern_of
from coordinator.engines.table import load_engine
from coordinator.sdk import Router, microserving_entrypoints, openai_api_protocol
from coordinator.sdk.loading import load_file

PATTERNS = Path(__file__).parents[4] / "configs/patterns"
SAY = [" A", " B", " C", " D"]
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def named(name):
    file, _, attribute = name.partition(":")
    return getattr(load_file(PATTERNS / f"{file}.py"), attribute)


TUTORIAL = "tutorial:CustomRouter"
WORKED = (TUTORIAL, "balanced:BalancedRouter", "longest_prefix:LongestPrefixRouter")


class Ordinary(Router):
    """The base class as it is."""


def world_of(router, **given):
    given.setdefault("tokenizer", WordTokenizer())
    made = World(router=router, **given)
    for fake in made.decodes:
        fake.say = SAY
        fake.start = lambda prompt: max(0, len(prompt) - 3)  # what was generated stands behind three tokens
    return made


# --- the tutorial


def test_the_tutorials_code_is_the_published_one_but_for_its_imports():
    page = seed_page()
    if page is None:
        pytest.skip("the published page is not at hand")
    ours = (PATTERNS / "tutorial.py").read_text()
    assert same_code("\n".join(line.lstrip() for line in ours.splitlines()), code_of(page))


@both
@pytest.mark.parametrize("name", WORKED)
async def test_worked_patterns_serve(name, stream):
    async with world_of(named(name), prefills=2, decodes=2) as world:
        for number in range(4):
            run = await world.run(stream=stream, prompt="one two three", user=f"client {number}")
            assert run.result == COMPLETED, run.error
            assert run.text == " A B C D"
            assert run.finish == "stop"
            assert run.chunks[0]["id"].startswith("cmpl-")
        assert all(fake.calls for fake in (world.decodes if name != TUTORIAL else world.fakes))
        await world.leaves_nothing()


@pytest.mark.parametrize("name", WORKED)
async def test_worked_patterns_go_on_after_a_preempt(name):
    async with world_of(named(name), decodes=2) as world:
        for fake in world.decodes:
            fake.preempts = [2, 1]
        run = await world.to_its_end(max_tokens=4, stream_options={"include_usage": True})
        assert run.result == COMPLETED, run.error
        assert run.text == " A B C D"
        assert run.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert len({chunk["id"] for chunk in run.chunks}) == 1
        prepared = [body for fake in world.decodes for body in fake.bodies(PREPARE)]
        assert len({body["user"] for body in prepared}) == len(prepared) > 1
        await world.leaves_nothing()


@pytest.mark.parametrize("name", WORKED)
async def test_worked_patterns_leave_no_reservation(name):
    async with world_of(named(name)) as world:
        world.prefill.faults[SEND] = (500, b"")
        run = await world.run(prompt=" ".join("abcdefghij"))
        assert isinstance(run.error, EngineFailed)
        assert run.error.instance_id == "p0"
        await world.leaves_nothing()
        world.prefill.faults.clear()
        gate = world.prefill.gate(SEND)
        run = world.start(prompt=" ".join("abcdefghij"))
        await until(lambda: len(world.prefill.calls) == 2)
        run.task.cancel()
        await run.ended()
        assert held(world.scheduler) == {}
        gate.set()
        await world.leaves_nothing()


async def test_the_tutorials_windows_and_ranks():
    async with world_of(named(TUTORIAL)) as world:
        assert (await world.run(suffix=" fin", echo=True, stream_options={"include_usage": True})).error is None
        [prepared], [sent], [generated] = (
            world.decode.bodies(PREPARE), world.prefill.bodies(SEND), world.decode.bodies(GENERATE)
        )  # fmt: skip
        assert (prepared["end"], sent["begin"], sent["end"], generated["begin"]) == (2, 0, 2, 2)
        assert sent["recv_rank"] == 4
        assert not {"suffix", "echo"} & {*prepared, *sent}
        assert generated["suffix"] == " fin"


async def test_balanced_prefill_gives_decode_its_share():
    async with world_of(named("balanced:BalancedRouter")) as world:
        await world.run(prompt=" ".join(f"w{number}" for number in range(20)))
        assert world.decode.bodies(PREPARE)[0]["end"] == world.decode.bodies(GENERATE)[0]["begin"] == 18


async def test_the_longest_prefix_decides_who_prefills():
    async with world_of(named("longest_prefix:LongestPrefixRouter"), prefills=3, decodes=2) as world:
        first = " ".join(f"w{number}" for number in range(40))
        other = " ".join(f"x{number}" for number in range(40))
        for prompt in (first, other):
            await world.run(prompt=prompt)
        by_prompt = {}
        for prompt in (first, other):
            ids = await world.engine._tokenizer(None).encode(prompt, special=False)
            by_prompt[prompt] = next(
                fake for fake in world.prefills if any(b["prompt"] == ids for b in fake.bodies(SEND))
            )
        for _ in range(4):
            for prompt, home in by_prompt.items():
                before = len(home.calls)
                run = await world.run(prompt=f"{prompt} and more")
                assert run.error is None
                assert len(home.calls) == before + 1
                assert run.lease.prefill.id == f"p{world.prefills.index(home)}"
        assert all(fake.calls for fake in world.decodes), "decode engines share the work"
        assert held(world.scheduler) == {}
        await world.leaves_nothing()


# --- the base class


@both
@pytest.mark.parametrize("factor", [0.0, 0.5])
async def test_the_base_class_serves_as_the_engine_does(factor, stream):
    async with world_of(Ordinary, pd_balance_factor=factor) as world:
        world.decode.prefix = 1
        run = await world.run(stream=stream)
        assert run.text == " A B C D"
        end = 2 if not factor else 1
        assert world.decode.bodies(PREPARE)[0]["end"] == end
        assert [body["begin"] for body in world.prefill.bodies(SEND)] == ([1] if end > 1 else [])
        await world.leaves_nothing()


async def test_one_engine_alone():
    async with world_of(Ordinary, mode="round-robin") as world:
        world.decode.preempts = [2]
        run = await world.to_its_end(max_tokens=4)
        assert run.text == " A B C D"
        assert world.decode.paths() == ["completions"] * 2
    async with world_of(Ordinary, hybrid=True) as world:
        assert (await world.run()).text == " A B C D"
        assert world.decode.bodies(COMPLETIONS)


async def test_chat_is_served_by_patterns_too():
    async with world_of(named(TUTORIAL)) as world:
        run = await world.run(path="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert run.text == " A B C D"
        assert run.chunks[0]["object"] == "chat.completion.chunk"


async def test_a_text_prompt_without_a_tokenizer():
    async with world_of(named(TUTORIAL), tokenizer=None) as world:
        run = await world.run()
        assert isinstance(run.error, BadRequest)
        assert "token ids" in run.error.message
        assert (await world.run(prompt=[1, 2, 3])).text == " A B C D"


class OnText(Router):
    tokenize_prompts = False

    async def translate_request(self, request, request_id):
        given = request.model_dump()
        prepare = microserving_entrypoints.PrepRecvRequest(**given, end=-1)
        address, cached = await self.send_prepare_receive(None, prepare, self.decode.url)
        send = microserving_entrypoints.RemoteSendRequest(
            **given, begin=cached, end=-1, kv_addr_info=address, recv_rank=self.decode.recv_rank
        )
        await self.send_remote_send(None, send, self.prefill.url)
        generate = microserving_entrypoints.StartGenerateRequest(**given, begin=-1)
        async for response in self.send_start_generate(None, generate, self.decode.url):
            yield response  # that decode has given it back is noticed all the same


async def test_a_pattern_on_text_needs_no_tokenizer():
    async with world_of(OnText, tokenizer=None) as world:
        world.decode.preempts = [1]
        world.decode.start = lambda prompt: len(prompt) - 3
        run = await world.to_its_end(max_tokens=4)
        assert run.text == " A B C D"
        assert b"token_logprobs" not in run.out.body


# --- what patterns see


class Looks(Router):
    async def translate_request(self, request, request_id):
        self.shared["seen"] = {
            "urls": self.server_urls,
            "starts": self.device_id_starts,
            "servers": self.num_servers,
            "headers": self.headers,
            "factor": self.pd_balance_factor,
            "tokenizer": self.tokenizer,
            "prefills": [server.id for server in self.servers("prefill")],
            "user": request.user == request_id,
            "debug": request.debug_config,
        }
        yield openai_api_protocol.CompletionResponse(
            choices=[openai_api_protocol.CompletionResponseChoice(text="x", finish_reason="stop")]
        )


@both
async def test_what_a_router_is_given(stream):
    async with world_of(Looks, prefills=2, pd_balance_factor=0.25) as world:
        run = await world.run(stream=stream)
        assert run.text == "x"
        seen = world.engine._around.shared["seen"]
        placed = [run.lease.prefill.url, run.lease.decode.url]
        assert (seen["urls"], seen["starts"], seen["servers"]) == (placed, [0, 4], 2)
        assert seen["headers"]["Content-Type"] == "application/json"
        assert seen["factor"] == 0.25
        assert seen["tokenizer"] is not None
        assert seen["prefills"] == ["p1", "p0"], "the least busy one first"
        assert seen["user"]
        assert seen["debug"] is not None
        assert world.decode.calls == []


class Chooses(Router):
    async def translate_request(self, request, request_id):
        async with self.place("decode", prefer=lambda server: server.recv_rank):
            pass
        async with self.place("prefill") as prefill:
            self.shared["prefill"] = prefill
        async for response in Router.translate_request(self, request, request_id):
            yield response


async def test_a_role_goes_to_the_preferred_one():
    async with world_of(Chooses, decodes=3, prefills=2) as world:
        run = await world.run()
        assert run.text == " A B C D"
        assert run.lease.decode.id == "d2"
        assert run.lease.prefill.id == world.engine._around.shared["prefill"].id == "p0"
        await world.leaves_nothing()


# --- faults of patterns


def pattern(body):
    """A router whose translate_request is this coroutine function."""
    return type("Made", (Router,), {"translate_request": body})


async def raises(self, request, request_id):
    yield openai_api_protocol.CompletionResponse(choices=[openai_api_protocol.CompletionResponseChoice(text="half")])
    raise KeyError("a secret prompt")


async def raises_at_once(self, request, request_id):
    raise ZeroDivisionError
    yield


async def yields_nonsense(self, request, request_id):
    yield "text"


async def yields_nothing(self, request, request_id):
    return
    yield


async def ends_too_early(self, request, request_id):
    yield openai_api_protocol.CompletionResponse(choices=[openai_api_protocol.CompletionResponseChoice(text="half")])


async def calls_a_stranger(self, request, request_id):
    ask = microserving_entrypoints.PrepRecvRequest(**request.model_dump(), end=-1)
    await self.send_prepare_receive(None, ask, "http://somebody-else:1")
    yield


async def swallows_the_end(self, request, request_id):
    try:
        yield None
    except GeneratorExit:
        yield None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (raises, "KeyError"), (raises_at_once, "ZeroDivisionError"), (yields_nonsense, "TypeError"),
        (yields_nothing, "ValueError"), (ends_too_early, "ValueError"), (calls_a_stranger, "LookupError"),
        (swallows_the_end, "RuntimeError"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
async def test_a_fault_of_a_pattern_is_that_requests_own(body, kind, caplog):
    async with world_of(pattern(body)) as world:
        with caplog.at_level(logging.ERROR, "test.engine"):
            run = await world.run()
        assert isinstance(run.error, InternalError)
        assert not run.out.over
        [line] = [record.getMessage() for record in caplog.records if record.name == "test.engine"]
        assert line.startswith(f"request client-id: pattern Made failed: {kind}")
        assert "line " in line
        assert "secret" not in line
        await world.leaves_nothing()


async def test_the_log_names_the_file_and_line_of_the_pattern(caplog, tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(
        "import json\n"
        "from coordinator.sdk import Router\n"
        "class Faulty(Router):\n"
        "    async def translate_request(self, request, request_id):\n"
        "        json.loads('{')\n"
        "        yield\n"
    )
    async with world_of(load_engine(f"{path}:Faulty").router) as world:
        with caplog.at_level(logging.ERROR, "test.engine"):
            run = await world.run()
        assert isinstance(run.error, InternalError)
        assert f"JSONDecodeError in {path}, line 5" in caplog.text


async def test_a_router_without_a_generator(caplog):
    async with world_of(
        type("Made", (Router,), {"translate_request": lambda self, request, request_id: None})
    ) as world:
        run = await world.run()
        assert isinstance(run.error, InternalError)
        assert "TypeError" in caplog.text


async def test_a_faulty_request_hurts_no_other():
    async def by_prompt(self, request, request_id):
        if len(request.prompt) == 1:
            raise RuntimeError
        async for response in Router.translate_request(self, request, request_id):
            yield response

    async with world_of(pattern(by_prompt)) as world:
        runs = [world.start(prompt="x" if number % 2 else "one two three") for number in range(10)]
        for number, run in enumerate(runs):
            await run.ended()
            assert (run.error is None) == (number % 2 == 0)
        await world.leaves_nothing()


async def test_calls_that_fail_count_as_the_engines():
    async with world_of(Ordinary) as world:
        for path, fault, kind in (
            (PREPARE, (500, b""), EngineFailed),
            (PREPARE, (400, b'"{\\"message\\": \\"too long\\"}"'), EngineRefused),
            (GENERATE, (400, b"{}"), EngineRefused),
            (GENERATE, "reset", EngineFailed),
            (SEND, (200, b"nonsense"), EngineFailed),
        ):
            fake = world.prefill if path == SEND else world.decode
            fake.faults[path] = fault
            run = await world.run()
            assert isinstance(run.error, kind), (path, fault, run.error)
            fake.faults.clear()
            await until(lambda: not world.engine.pinned())
        world.decode.reserved.clear()


async def test_a_preempt_without_an_end():
    async with world_of(named(TUTORIAL), max_preempts=2) as world:
        world.decode.preempts = [0] * 9
        run = await world.to_its_end()
        assert isinstance(run.error, NoInstance)
        assert len(world.decode.bodies(GENERATE)) == 3


async def test_none_before_any_output_starts_anew():
    async with world_of(named(TUTORIAL)) as world:
        world.decode.preempts = [0]
        first = await world.run()
        assert isinstance(first.result, Resume)
        assert first.result.avoid == "d0"
        assert first.out.events == []


# --- cancellation


class Holds(Router):
    async def translate_request(self, request, request_id):
        self.shared["open"] = True
        try:
            async with aiohttp.ClientSession() as session:
                self.shared["session"] = session
                async for response in Router.translate_request(self, request, request_id):
                    yield response
        finally:
            self.shared["open"] = False


@both
@pytest.mark.parametrize("path", [PREPARE, SEND, GENERATE])
async def test_a_client_that_leaves_ends_the_pattern_where_it_waits(path, stream):
    async with world_of(Holds) as world:
        fake = world.prefill if path == SEND else world.decode
        gate = fake.gate(path)
        run = world.start(stream=stream)
        await until(lambda: any(call.target == path for call in fake.calls))
        shared = world.engine._around.shared
        assert shared["open"]
        run.task.cancel()
        await run.ended()
        assert run.task.cancelled()
        assert not shared["open"]
        assert shared["session"].closed
        assert held(world.scheduler) == {}
        await turns(20)
        gate.set()
        await world.leaves_nothing()


async def test_a_slow_client_slows_the_engine_down():
    async with world_of(Ordinary) as world:
        world.decode.after.clear()
        run = world.start()
        await until(lambda: len(run.out.events) == 4)
        pause, resume = run.out.pace
        pause()
        world.decode.after.set()
        await asyncio.sleep(0.05)
        assert not run.task.done()
        resume()
        await run.ended()
        assert run.text == " A B C D"


# --- names


@pytest.mark.parametrize("name", WORKED)
def test_a_pattern_is_named_by_its_file(name):
    file, _, attribute = name.partition(":")
    made = load_engine(f"{PATTERNS / file}.py:{attribute}")
    assert made.router.__name__ == attribute
    assert made.options({"recv_rank": 3}) == {"recv_rank": 3}
    assert made.settings({})["mode"] == "disagg"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Mine: pass\n", "neither a Router"),
        ("Mine = 7\n", "is not a class"),
        ("", "cannot be loaded"),
        (
            "from coordinator.sdk import Router\nclass Mine(Router):\n    def __init__(self, model): pass\n",
            "without arguments",
        ),
    ],
)
def test_what_is_no_pattern_is_told(tmp_path, text, says):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        load_engine(f"{path}:Mine")


def test_a_router_class_is_wrapped_once_per_use():
    assert pattern_of(Ordinary).__name__ == "OrdinaryEngine"


async def test_another_candidate_can_be_called_and_its_failure_charges_nobody():
    async def elsewhere(self, request, request_id):
        other = next(one for one in self.servers("decode") if one.id != self.decode.id)
        ask = microserving_entrypoints.PrepRecvRequest(**request.model_dump(), end=-1)
        address, _ = await self.send_prepare_receive(None, ask, other.url)
        self.shared["address"] = address
        yield openai_api_protocol.CompletionResponse(
            choices=[openai_api_protocol.CompletionResponseChoice(text="x", finish_reason="stop")]
        )

    async with world_of(pattern(elsewhere), decodes=2) as world:
        run = await world.run()
        assert run.error is None
        assert world.engine._around.shared["address"]
        await world.leaves_nothing()
        for fake in world.decodes:
            fake.faults[PREPARE] = (500, b"")
        run = await world.run()
        assert isinstance(run.error, NoInstance)
