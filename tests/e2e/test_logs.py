"""The log: one line for each finished request, and never a word of what was asked or answered."""

import json
import re

import pytest
from dialects import BY_NAME, CHAT, CHAT_STREAM, DIALECTS
from raw_client import ask, eventually
from traffic import open_streams

from instances import answers, tokens

SECRET = "the-combination-is-4711"
KEY = "sk-canary-0815"


def shards(text: str) -> set[str]:
    """Stretches of a text that nobody would write by chance."""
    words = text.split()
    return {" ".join(words[start : start + 3]) for start in range(len(words) - 2)}


async def everything_that_can_happen(cluster) -> set[str]:
    """Requests that succeed and fail in many ways; gives shards of all answers."""
    shown: set[str] = set()
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "canary-run", "Cookie": f"session={KEY}"}
    echo = f'[[fault:body={{"error":"you said {SECRET}"}}]]'
    faults = ["", "[[fault:preempt@4]]", "[[fault:decode_error@4=about {SECRET}]]", f"[[fault:status=500]] {echo}",
              f"[[fault:status=422]] {echo}", "[[fault:not_json]]", "[[fault:unknown_keyword]]", "[[fault:reset]]",
              "[[fault:pull_failed]]", "[[fault:empty]]"]  # fmt: skip
    for fault in faults:
        for name in ("chat", "chat-stream", "tgi-stream", "vllm-stream", "triton-infer", "mindie"):
            dialect = BY_NAME[name]
            prompt = f"{SECRET} {fault} [[length:25]]"
            reply = await ask(cluster.port, f"{dialect.path}?q={SECRET}", dialect.body(prompt, 25), headers)
            if reply.status == 200 and reply.complete:
                shown |= shards(dialect.text(reply.body, prompt))
    for body in (f'{{"messages": "{SECRET}', f'["{SECRET}"]', f'{{"{SECRET}": 1}}'):
        for path in (CHAT.path, "/generate", "/infer", f"/{SECRET[:3]}"):
            await ask(cluster.port, path, body.encode(), headers)
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [f"{SECRET} [[fault:stall@4]]"])
    await stream.reset()
    await eventually(lambda: not any(cluster.coordinator.loads().values()), "all have ended")
    assert len(shown) > 50
    return shown


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.xdist_group("logs")
async def test_no_log_at_any_level_holds_prompt_output_or_credential(start, style: str):
    cluster = start.cluster(2, 2, logging={"level": "debug", "format": style}, health={"fail_after": 100})
    shown = await everything_that_can_happen(cluster)
    cluster.coordinator.stop()
    log = cluster.coordinator.log()
    assert log.count("canary-run") > 50
    for word in (SECRET, KEY, "combination", *shown):
        assert word not in log
    if style == "json":
        lines = [json.loads(line) for line in log.splitlines()]
        assert {"time", "level", "logger", "message"} <= lines[0].keys()


LINE = re.compile(r"^\S+Z INFO pd_coordinator\.access request (.*)$", re.MULTILINE)


def finished(cluster, ident: str) -> dict[str, str]:
    """The fields of the one line about a request."""
    lines = [dict(re.findall(r'(\w+)=("[^"]*"|\S+)', fields)) for fields in LINE.findall(cluster.coordinator.log())]
    (found,) = [line for line in lines if line["id"] == ident] or [{}]
    return found


async def line_of(cluster, ident: str) -> dict[str, str]:
    """The same, once it is written."""
    found: dict[str, str] = await eventually(lambda: finished(cluster, ident), f"a line about {ident}")
    return found


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_one_line_for_each_request(cluster, dialect):
    ident = f"line-{dialect.name}"
    reply = await ask(cluster.port, dialect.path, dialect.body("Hello [[length:9]]", 9), {"X-Request-Id": ident})
    assert reply.status == 200
    line = await line_of(cluster, ident)
    assert (line["api"], line["path"], line["status"], line["outcome"]) == (dialect.api, dialect.path, "200", "ok")
    assert (line["prefill"], line["decode"]) == (reply.header("x-pd-prefill"), reply.header("x-pd-decode"))
    assert (line["attempts"], line["stream"]) == ("1", "yes" if dialect.stream else "no")
    assert int(line["bytes"]) == len(reply.body)
    assert 0 < float(line["ttft_ms"]) <= float(line["duration_ms"])
    assert "error" not in line


async def test_wire_ids_lead_to_the_records_of_the_instances(cluster):
    await ask(cluster.port, CHAT.path, CHAT.body("Hello"), {"X-Request-Id": "trace-me"})
    wire = (await line_of(cluster, "trace-me"))["wire"]

    def released() -> list[str]:
        return [row["id"] for instance in cluster.instances for row in instance.state()["kv"]["released"]]

    await eventually(lambda: released().count(wire) == 2, "prefill and decode have released it")


@pytest.mark.parametrize(
    ("words", "status", "outcome", "fields"),
    [
        ("[[fault:status=422]]", 422, "client_error", {"error": "engine_refused", "side": "client"}),
        (
            "[[fault:decode_error@4]]",
            502,
            "engine_error",
            {"side": "decode", "attempts": "3", "reason": "engine_error"},
        ),
        ("[[fault:status=500]]", 502, "engine_error", {"side": "prefill", "reason": "http_5xx"}),
    ],
)
async def test_failures_name_who_is_to_blame(start, words: str, status: int, outcome: str, fields: dict[str, str]):
    cluster = start.cluster(3, 3)
    reply = await ask(cluster.port, CHAT.path, CHAT.body(f"Hello {words} [[length:9]]", 9), {"X-Request-Id": "bad"})
    assert reply.status == status
    line = await line_of(cluster, "bad")
    assert (line["status"], line["outcome"]) == (str(status), outcome)
    assert fields.items() <= line.items()


async def test_a_client_that_leaves_has_a_line(cluster):
    client = (await open_streams(cluster.port, CHAT_STREAM, ["Hello [[fault:stall@4]]"]))[0]
    ident = client.header("x-request-id")
    await client.reset()
    assert (await line_of(cluster, ident))["outcome"] == "client_gone"


def test_the_words_of_the_canary_are_in_the_answers():
    """The answers that must not be logged are words, so the search above could find them."""
    wish = answers.Wish(prompt=tokens.encode(SECRET), limit=25, natural_length=25)
    assert len(shards(answers.plan(wish, 0, (1, 1)).text)) > 10
