"""Decode gives a request back: nothing is said twice, nothing is lost, and it comes to an end."""

import pytest
from engine_world import until
from microserving_pair import GENERATE, PREPARE, WordTokenizer, World

from coordinator.core.errors import NoInstance
from coordinator.core.ports import COMPLETED, Resume
from coordinator.engines.microserving import engine as engine_module

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
CHAT = "/v1/chat/completions"
# a first piece that is glued to the prompt's last word keeps the count of words what the engine's tokens are
SAY = [" A", " B", " C", " D"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSES_S", (0.0, 0.0, 0.001))


def speaks(world):
    for fake in world.decodes:
        fake.say = SAY


@both
async def test_before_anything_was_sent_it_starts_anew_elsewhere(stream):
    async with World(decodes=2) as world:
        speaks(world)
        for fake in world.decodes:
            fake.preempts = [0]
        first = await world.run(stream=stream)
        assert isinstance(first.result, Resume)
        assert first.out.events == []
        assert first.result.avoid == first.lease.decode.id
        [other] = [fake for fake, name in zip(world.decodes, ("d0", "d1"), strict=True) if name != first.result.avoid]
        other.preempts = []
        second = await world.run(stream=stream, resume=first.result)
        assert second.lease.decode.id != first.lease.decode.id
        assert second.text == " A B C D"
        users = [body["user"] for fake in world.decodes for body in fake.bodies(PREPARE)]
        assert len(set(users)) == 2
        await world.leaves_nothing()


@pytest.mark.parametrize("tokenizer", [None, WordTokenizer()], ids=["no-tokenizer", "tokenizer"])
@pytest.mark.parametrize("preempts", [[1], [3], [2, 1], [1, 1, 1], [0, 2, 0, 1]])
async def test_it_goes_on_where_it_broke_off(preempts, tokenizer):
    async with World(tokenizer=tokenizer) as world:
        speaks(world)
        world.decode.preempts = list(preempts)
        run = await world.to_its_end(max_tokens=4, stream_options={"include_usage": True})
        assert run.result == COMPLETED
        assert run.text == " A B C D"
        assert run.finish == "stop"
        assert run.usage == USAGE
        assert len({chunk["id"] for chunk in run.chunks}) == 1
        assert b'logprobs":null' in run.out.body.replace(b" ", b"")
        assert b"token_logprobs" not in run.out.body
        prepared = world.decode.bodies(PREPARE)
        assert prepared[-1]["prompt"].startswith("one two three A")
        generated = [len(body["prompt"].split()) - 3 for body in prepared]
        assert [body["max_tokens"] for body in prepared] == [4 - number for number in generated]
        assert generated == [sum(preempts[:number]) for number in range(len(prepared))]
        await world.leaves_nothing()


async def test_what_is_left_of_max_tokens_is_kept():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [1]
        run = await world.to_its_end(max_tokens=3)
        assert run.text == " A B C"
        assert run.finish == "length"
        assert [body["max_tokens"] for body in world.decode.bodies(PREPARE)] == [3, 2]
        assert world.decode.bodies(PREPARE)[0]["logprobs"] == 0


async def test_without_a_limit_nothing_need_be_counted():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [2, 1]
        run = await world.to_its_end(stream_options={"include_usage": True})
        assert run.text == " A B C D"
        assert "logprobs" not in world.decode.bodies(PREPARE)[0]
        assert run.usage == USAGE, "by what decode says of the length of its prompts"


async def test_log_probabilities_of_the_client_are_answered_all_through():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [1, 2]
        run = await world.to_its_end(max_tokens=4, logprobs=1)
        tokens = [
            token
            for chunk in run.chunks
            for choice in chunk["choices"]
            for token in (choice["logprobs"] or {}).get("tokens", [])
        ]
        assert tokens == SAY
        assert [body["max_tokens"] for body in world.decode.bodies(PREPARE)] == [4, 3, 1]
        offsets = [
            choice["logprobs"]["text_offset"]
            for chunk in run.chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
        ]
        assert [numbers[0] for numbers in offsets if numbers] == [0, 2, 2, 6]


async def test_token_ids_go_on_with_a_tokenizer_only():
    tokenizer = WordTokenizer()
    ids = await tokenizer.encode("one two three", special=False)
    async with World(tokenizer=tokenizer) as world:
        speaks(world)
        world.decode.start = lambda prompt: len(prompt) - 3
        world.decode.preempts = [2]
        run = await world.to_its_end(prompt=ids, max_tokens=4)
        assert run.text == " A B C D"
        assert world.decode.bodies(PREPARE)[1]["prompt"] == [0, 1, 2, 3, 4]
    async with World() as world:
        speaks(world)
        world.decode.preempts = [2]
        run = await world.run(prompt=[1, 2, 3])
        assert isinstance(run.error, NoInstance)
        assert run.text == " A B"
        assert not run.out.over
        await world.leaves_nothing()


@pytest.mark.parametrize("given", [{"n": 2}, {"response_format": {"type": "json_object"}}])
async def test_what_cannot_go_on_ends_in_an_error(given):
    async with World() as world:
        speaks(world)
        world.decode.preempts = [2]
        run = await world.run(**given)
        assert isinstance(run.error, NoInstance)
        assert not run.out.over
        world.decode.preempts = [0]
        run = await world.to_its_end(**given)
        assert run.result == COMPLETED, "nothing was sent, so it starts anew"


async def test_more_than_one_choice_starts_anew_where_nothing_was_sent():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [1]
        run = await world.to_its_end(n=2, stream=False)
        assert run.text == " A B C D"


@both
async def test_it_is_given_up_after_so_many_times(stream):
    async with World(max_preempts=2) as world:
        speaks(world)
        world.decode.preempts = [0] * 9
        run = await world.to_its_end(stream=stream)
        assert isinstance(run.error, NoInstance)
        assert "preempted too often" in run.error.message
        assert run.error.retry_after_s
        assert len(world.decode.bodies(GENERATE)) == 3
        await world.leaves_nothing()


async def test_an_echo_is_not_said_twice_and_no_part_of_what_was_generated():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [1]
        run = await world.to_its_end(echo=True, max_tokens=4)
        assert run.text == "one two three A B C D"
        assert [body.get("echo") for body in world.decode.bodies(GENERATE)] == [True, None]
        assert world.decode.bodies(PREPARE)[1]["prompt"] == "one two three A"


async def test_a_suffix_comes_once_at_the_end():
    async with World() as world:
        speaks(world)
        world.decode.preempts = [2]
        run = await world.to_its_end(suffix=" fin")
        assert run.text.endswith(" fin")
        assert run.text.count(" A") == run.text.count(" D") == 1


async def test_all_of_max_tokens_was_there_when_it_was_preempted():
    """Nothing is left to generate: the answer ends here, and no engine is asked for none."""
    async with World(tokenizer=WordTokenizer()) as world:
        speaks(world)
        world.decode.preempts = [3]
        run = await world.to_its_end(max_tokens=3, stream_options={"include_usage": True})
        assert run.text == " A B C"
        assert run.out.over
        assert run.finish_reasons[-1] == "length"
        assert run.usage == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert len(world.decode.bodies(PREPARE)) == 1


async def test_texts_with_quotes_and_other_scripts_go_on():
    async with World() as world:
        for fake in world.decodes:
            fake.say = [' "a\\', "\n\u4f60", "\U0001f30d", ' "preempt" ', "extra"]
        world.decode.preempts = [3, 1]
        run = await world.to_its_end()
        assert run.text == "".join(world.decode.say)
        assert world.decode.bodies(PREPARE)[1]["prompt"] == "one two three" + "".join(world.decode.say[:3])


async def test_a_client_that_leaves_between_two_attempts(monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSES_S", (0.0, 60.0))
    async with World() as world:
        speaks(world)
        world.decode.preempts = [1]
        first = await world.run()
        second = world.start(resume=first.result, out=first.out)
        second.task.cancel()
        await second.ended()
        second.lease.end()
        await world.leaves_nothing()
        assert len(world.decode.bodies(PREPARE)) == 1


# --- chat


async def test_chat_goes_through_the_template_and_keeps_its_shapes():
    async with World(tokenizer=WordTokenizer()) as world:
        speaks(world)
        world.decode.preempts = [2]
        run = await world.to_its_end(
            path=CHAT,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=4,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True},
        )
        assert run.text == " A B C D"
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in run.chunks)
        deltas = [choice["delta"] for chunk in run.chunks for choice in chunk["choices"]]
        assert [delta for delta in deltas if "role" in delta] == [{"role": "assistant", "content": " A"}]
        logprobs = [choice["logprobs"] for chunk in run.chunks for choice in chunk["choices"] if choice["logprobs"]]
        said = [entry for one in logprobs for entry in one["content"]]
        assert [entry["token"] for entry in said] == SAY
        assert said[0]["top_logprobs"] == [{"token": "x}", "logprob": -1.0, "bytes": [120, 125]}]
        assert run.chunks[0]["id"].startswith("chatcmpl-")
        prepared = world.decode.bodies(PREPARE)
        assert prepared[0]["prompt"] == "<chat> hi <answer>"
        assert (prepared[0]["max_tokens"], prepared[0]["logprobs"]) == (4, 1)
        assert prepared[1]["prompt"] == "<chat> hi <answer> A B"
        assert prepared[1]["max_tokens"] == 2
        assert not {"messages", "top_logprobs", "max_completion_tokens"} & {*prepared[0]}
        assert run.usage == USAGE


async def test_a_whole_chat():
    async with World(tokenizer=WordTokenizer()) as world:
        run = await world.run(path=CHAT, messages=[{"role": "user", "content": "hi"}], stream=False)
        [answer] = run.chunks
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "A B C D"}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "extra" not in answer["usage"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [{}]}, "tools"),
        ({"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": 7}, "chat_template_kwargs"),
    ],
)
async def test_chats_that_are_refused(given, says):
    async with World(tokenizer=WordTokenizer()) as world:
        run = await world.run(path=CHAT, **given)
        assert says in run.error.message
        assert run.error.status == 400


async def test_chat_without_a_tokenizer_is_refused_in_plain_words():
    async with World() as world:
        run = await world.run(path=CHAT, messages=[{"role": "user", "content": "hi"}])
        assert run.error.status == 400
        assert "tokenizer" in run.error.message


# --- one engine alone


@both
@pytest.mark.parametrize("hybrid", [True, False])
async def test_round_robin(hybrid, stream):
    async with World(mode="round-robin", hybrid=hybrid) as world:
        speaks(world)
        world.decode.preempts = [2]
        run = await world.to_its_end(
            stream=stream, user="me", max_tokens=4, suffix=" fin", stream_options={"include_usage": True}
        )
        assert run.text == " A B C D fin" if stream else " A B C D"
        bodies = world.decode.bodies("/v1/completions")
        assert len(bodies) == 2
        assert all(body["user"] != "me" for body in bodies)
        assert len({body["user"] for body in bodies}) == 2
        assert run.usage == USAGE
        assert world.decode.paths() == ["completions"] * 2
        await world.leaves_nothing()


async def test_a_chat_of_one_engine_is_its_own():
    async with World(mode="round-robin", hybrid=True) as world:
        seen = []

        async def completions(call, body):
            seen.append(body)
            call.open_stream()
            event = b'data: {"id":"%b","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
            call.chunk(event % body["user"].encode())
            call.chunk(b"data: [DONE]\n\n")
            call.end()

        world.decode.completions = completions
        run = await world.run(
            path=CHAT, messages=[{"role": "user", "content": "hi"}], user="me", tools=[{"type": "function"}]
        )
        assert run.text == "x"
        assert seen[0]["messages"] == [{"role": "user", "content": "hi"}]
        assert seen[0]["tools"] == [{"type": "function"}]
        assert seen[0]["user"] != "me"
        assert run.chunks[0]["id"].startswith("chatcmpl-")


@both
async def test_one_engine_fails_or_refuses(stream):
    async with World(hybrid=True) as world:
        world.decode.faults["/v1/completions"] = (400, b'"{\\"message\\": \\"too long\\"}"')
        run = await world.run(stream=stream)
        assert (run.error.status, run.error.message) == (400, "too long")
        world.decode.faults["/v1/completions"] = (500, b"")
        run = await world.run(stream=stream)
        assert run.error.instance_id == "h0"
        await world.leaves_nothing()


async def test_leaving_one_engine_closes_its_connection():
    async with World(hybrid=True) as world:
        world.decode.after.clear()
        run = world.start()
        await until(lambda: len(run.out.events) == 4)
        run.task.cancel()
        await run.ended()
        await world.decode.calls[0].left()
        world.decode.after.set()
