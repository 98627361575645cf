"""A microserving prefill and decode instance on loopback, strict about the protocol; tokens are words."""

import asyncio
import base64
import json
import math

from engine_world import GUARD_S, Out, Watcher, context, held, instance, request, scheduler, until
from fake_instances import FakeInstance

from coordinator.engines.microserving import MicroservingEngine, pattern_of
from coordinator.engines.microserving import engine as engine_module
from coordinator.engines.microserving.settings import checked_settings

COMPLETIONS = "/v1/completions"
PREPARE, SEND, GENERATE = "/microserving/prep_recv", "/microserving/remote_send", "/microserving/start_generate"
DONE = b"data: [DONE]\n\n"


def metadata(*models):
    """Base64 of the segments of each model, as (start, length) pairs."""
    numbers = []
    for segments in models:
        numbers.append(len(segments))
        numbers += [number for segment in segments for number in segment]
    return base64.b64encode(json.dumps(numbers).encode()).decode()


def only_metrics_take_time(monkeypatch):
    """Have a check's time count for the metrics alone: the models must come however slow the machine is."""
    honest = engine_module.alive

    def alive(client, asked, path, deadline_s):
        return honest(client, asked, path, deadline_s if path == engine_module.METRICS_PATH else math.inf)

    monkeypatch.setattr(engine_module, "alive", alive)


def words(prompt):
    return prompt.split(" ") if isinstance(prompt, str) else list(prompt)


def resolved(number, length):
    return number + length if number < 0 else number


class Engine(FakeInstance):
    """What both have in common.

    Attributes:
        fatal: assertions of the engine that a call has broken: a real one would be dead by now.
        deaf: paths that are never answered.
        faults: by path, a status with a body that is sent in place of an answer.
    """

    def __init__(self):
        super().__init__()
        self.fatal = []
        self.faults = {}
        self.gates = {}
        self.metrics_hang = False
        self.changed = asyncio.Event()

    def bodies(self, path):
        return [json.loads(call.body) for call in self.calls if call.target == path]

    def paths(self):
        return [call.target.rpartition("/")[2] for call in self.calls]

    def gate(self, path):
        """Hold calls of this path until the event is set."""
        return self.gates.setdefault(path, asyncio.Event())

    def demand(self, fact, what):
        if not fact:
            self.fatal.append(what)

    async def other(self, call):
        if call.target == "/metrics":
            if self.metrics_hang:
                await asyncio.sleep(GUARD_S)
            call.reply(b"# metrics")
            return
        await super().other(call)

    async def infer(self, call):
        if call.target in self.gates:
            await self.gates[call.target].wait()
        fault = self.faults.get(call.target)
        if fault == "reset":
            call.rst()
            return
        if fault is not None:
            status, body = fault
            call.reply(body, status)
            return
        body = json.loads(call.body)
        if call.target not in (COMPLETIONS, "/v1/chat/completions"):
            self.demand(isinstance(body.get("debug_config"), dict), "debug_config is null")
        await getattr(self, call.target.rpartition("/")[2])(call, body)

    async def completions(self, call, body):
        raise NotImplementedError


class Prefill(Engine):
    def __init__(self):
        super().__init__()
        self.sent = []

    async def remote_send(self, call, body):
        length = len(words(body["prompt"]))
        begin, end = body["begin"], resolved(body["end"], length)
        self.demand(0 <= begin < end < length, f"window {begin}:{end} of {length}")
        numbers = json.loads(base64.b64decode(body["kv_addr_info"]))
        total = sum(numbers[2 : 1 + 2 * numbers[0] : 2])
        self.demand(total == end - begin, f"{total} tokens in the metadata, {end - begin} in the window")
        self.demand("suffix" not in body, "suffix")
        self.sent.append((body["user"], body["recv_rank"], begin, end))
        call.reply(b"{}")

    async def completions(self, call, body):
        await Decode.completions(self, call, body)


class Decode(Engine):
    """Attributes: prefix: cached tokens; say: the answer's words; preempts: after how many of them, one per run."""

    def __init__(self):
        super().__init__()
        self.prefix = 0
        self.say = ["A", " B", " C", " D"]
        self.preempts = []
        self.reserved = {}
        self.freed = []
        self.users = []
        self.meta = None
        self.extra = True
        self.multi = 1
        self.after = asyncio.Event()
        self.after.set()

    async def prep_recv(self, call, body):
        prompt, user = words(body["prompt"]), body["user"]
        end = resolved(body["end"], len(prompt))
        self.demand(0 <= end < len(prompt), f"end {end} of {len(prompt)}")
        self.demand("suffix" not in body, "suffix")
        self.demand(user not in self.users, "the same user twice")
        self.users.append(user)
        matched = min(self.prefix, end)
        missing = end - matched
        self.reserved[user] = (body, end)
        self.changed.set()
        segments = [(matched, missing)] if missing else []
        told = {"kv_append_metadata": self.meta or metadata(*[segments] * self.multi)}
        call.reply(json.dumps({**told, "prefix_matched_length": matched}).encode())

    async def start_generate(self, call, body):
        user = body["user"]
        if user not in self.reserved:
            self.demand(False, "start_generate without prep_recv")
            call.rst()
            return
        prepared, end = self.reserved[user]
        begin = resolved(body["begin"], len(words(body["prompt"])))
        self.demand(begin == end, f"begin {begin}, prepared {end}")
        del self.reserved[user]
        self.freed.append(user)
        self.changed.set()
        await self.answer(call, body, prepared)

    async def completions(self, call, body):
        await self.answer(call, body, body)

    async def answer(self, call, body, config):
        """Generate by the parameters of prep_recv, in the shape that start_generate asks for."""
        prompt = words(body["prompt"])
        said = self.say[self.start(prompt) :]
        limit = config.get("max_tokens")
        finish = "stop"
        if limit is not None and limit < len(said):
            said, finish = said[:limit], "length"
        preempt = self.preempts.pop(0) if self.preempts else None
        if preempt is not None:
            said, finish = said[:preempt], "preempt"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        usage["total_tokens"] = sum(usage.values())
        if self.extra:
            usage["extra"] = {"ttft_s": 0.1}
        if finish == "preempt":
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        count = config.get("n") or 1
        if not body.get("stream"):
            choices = [self.choice("".join(said), finish, at, config, said) for at in range(count)]
            call.reply(json.dumps(self.shape(body, choices, usage)).encode())
            return
        call.open_stream()
        if body.get("echo"):
            call.chunk(self.event(body, [self.choice(" ".join(map(str, prompt)), None, 0, {}, [])]))
        for word in said:
            call.chunk(self.event(body, [self.choice(word, None, at, config, [word]) for at in range(count)]))
        await self.after.wait()
        tail = body.get("suffix") or ""
        call.chunk(self.event(body, [self.choice(tail, finish, at, {}, []) for at in range(count)]))
        if (body.get("stream_options") or {}).get("include_usage"):
            call.chunk(self.event(body, [], usage))
        call.chunk(DONE)
        call.end()

    def start(self, prompt):
        """How many words of the answer stand at the prompt's end already."""
        tail = " ".join(map(str, prompt))
        for size in range(len(self.say), 0, -1):
            if tail.endswith("".join(self.say[:size])):
                return size
        return 0

    def choice(self, text, finish, index, config, tokens):
        logprobs = None
        if config.get("logprobs") is not None:
            logprobs = {
                "text_offset": list(range(len(tokens))),
                "token_logprobs": [-0.5] * len(tokens),
                "tokens": list(tokens),
                "top_logprobs": [{"x}": -1.0} if config["logprobs"] else {} for _ in tokens],
            }
        return {"finish_reason": finish, "index": index, "logprobs": logprobs, "text": text}

    def shape(self, body, choices, usage):
        return {
            "id": body["user"], "choices": choices, "created": 1, "model": "m", "object": "text_completion",
            "usage": usage,
        }  # fmt: skip

    def event(self, body, choices, usage=None):
        return b"data: " + json.dumps(self.shape(body, choices, usage)).encode() + b"\n\n"


class World:
    """Prefill and decode instances around an engine, and a scheduler."""

    def __init__(self, *, prefills=1, decodes=1, hybrid=False, tokenizer=None, router=None, **settings):
        self.context = context(settings=checked_settings(settings))
        self.engine = (MicroservingEngine if router is None else pattern_of(router))(self.context)
        if tokenizer is not None:
            self.engine._tokenizer = lambda instance: tokenizer
        self.prefills = [Prefill() for _ in range(0 if hybrid else prefills)]
        self.decodes = [Decode() for _ in range(decodes)]
        self.hybrid = hybrid

    async def __aenter__(self):
        self.fakes = [*self.prefills, *self.decodes]
        for fake in self.fakes:
            await fake.listen()
        role = "h" if self.hybrid else "d"
        self.instances = [self._made(f"p{at}", fake) for at, fake in enumerate(self.prefills)]
        self.instances += [
            self._made(f"{role}{at}", fake, options={"recv_rank": 4 + 2 * at}) for at, fake in enumerate(self.decodes)
        ]
        for each in self.instances:
            watcher = Watcher()
            self.engine.attach(each, watcher)
            assert watcher.up, watcher.told
        self.scheduler = scheduler(*self.instances)
        self.decode = self.decodes[0]
        self.prefill = self.prefills[0] if self.prefills else None
        return self

    def _made(self, name, fake, **more):
        return instance(name, fake.address, engine="microserving", **more)

    async def __aexit__(self, *_):
        await self.engine.aclose()
        await self.context.client.aclose()
        for fake in self.fakes:
            await fake.aclose()
        assert [fake.fatal for fake in self.fakes if fake.fatal] == []

    def start(self, *, path=COMPLETIONS, resume=None, avoid=frozenset(), out=None, **body):
        """Begin one attempt; it has `out`, `lease` and `task`."""
        body = {"model": "m", "prompt": "one two three", "stream": True} | body
        if path != COMPLETIONS:
            body.pop("prompt")
        asked = request(path=path, body=json.dumps(body).encode(), stream=body["stream"])
        if resume is not None:
            asked = asked.resumed(resume.body, asked.ask, resume.wire_id)
            avoid = {resume.avoid}
        return Run(self, asked, frozenset(avoid), out)

    async def run(self, **given):
        run = self.start(**given)
        await run.ended()
        return run

    async def to_its_end(self, **given):
        """Attempts, one after the other, until the answer is there."""
        run = await self.run(**given)
        while run.error is None and hasattr(run.result, "body"):
            run = await self.run(resume=run.result, out=run.out, **given)
        return run

    async def leaves_nothing(self):
        await until(lambda: not self.engine.pinned())
        await until(lambda: not self.engine._means.errands._tasks)
        assert held(self.scheduler) == {}
        client = self.context.client
        await until(lambda: client.open_connections == client.idle_connections)
        assert [fake.reserved for fake in self.decodes if fake.reserved] == []


class Run:
    """One attempt."""

    def __init__(self, world, asked, avoid, out):
        self.out = out or Out()
        self.lease = world.scheduler.try_place(asked, avoid)
        self.request = asked
        self.task = asyncio.create_task(self._serve(world.engine), name="serve")

    async def _serve(self, engine):
        with self.lease:
            return await engine.serve(self.request, self.lease, self.out)

    async def ended(self):
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([self.task])

    @property
    def error(self):
        return None if self.task.cancelled() else self.task.exception()

    @property
    def result(self):
        return self.task.result()

    @property
    def chunks(self):
        """The stream's chunks, or the whole answer as the only one."""
        if not self.out.body.startswith(b"data:"):
            return [json.loads(self.out.body)]
        events = [event.removeprefix(b"data: ") for event in self.out.body.split(b"\n\n") if event]
        return [json.loads(event) for event in events if event != b"[DONE]"]

    @property
    def text(self):
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(
            choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content", "")
            for choice in choices
            if choice["index"] == 0
        )

    @property
    def finish_reasons(self):
        return [choice["finish_reason"] for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def finish(self):
        return self.finish_reasons[-1]

    @property
    def usage(self):
        return self.chunks[-1]["usage"]


class Words:
    """The text of ids: each word with a space before it."""

    def __init__(self, words):
        self.words = words

    def push(self, ids):
        return "".join(f" {self.words[number]}" for number in ids)

    def end(self):
        return ""


class WordTokenizer:
    """Tokens are words; ids stand for words that have been seen."""

    def __init__(self):
        self.words = []

    @property
    def highest_id(self):
        return len(self.words) - 1

    async def encode(self, text, *, special=True):
        assert not special, "the engines add no marks"
        return [self._id(word) for word in text.split(" ") if word]

    def _id(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def detokenizer(self, prompt_ids=(), *, skip_special=True):
        return Words(self.words)

    async def chat(self, messages, *, tools=None, add_generation_prompt=True, extra=()):
        return " ".join(["<chat>", *(message["content"] for message in messages), "<answer>"])
