"""The configuration is read again while one process serves: every section, at once, or not at all."""

import asyncio
import json
import logging
import threading

import pytest
from app_world import Process, document, entry
from engine_world import turns, until
from fake_instances import FakeInstance

from coordinator import reloading
from coordinator.config import ConfigError, Problem

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
STREAMED = BODY.replace(b"}]}", b'}],"stream":true}')
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"A"},"finish_reason":null}]}\n\n'
RELOAD = "/v1/config/reload"


@pytest.fixture
async def fake():
    made = await FakeInstance().listen()
    yield made
    await made.aclose()


class Case:
    """A process with a file of its own."""

    def __init__(self, folder, fake):
        self.path = folder / "cluster.yaml"
        self.entry = entry("h0", fake)
        self.given = document(self.entry)
        self.write()

    def write(self, **sections):
        cluster = sections.pop("cluster", {})
        given = document(self.entry) | sections
        given["cluster"] |= cluster
        self.path.write_text(json.dumps(given))

    def process(self):
        return Process(self.given, self.path)


@pytest.fixture
def case(tmp_path, fake):
    return Case(tmp_path, fake)


async def reload(process, query=""):
    status, _, body = await process.call(RELOAD + query, b"", management=True)
    return status, json.loads(body)


async def config_of(process):
    status, _, body = await process.call("/v1/config", management=True)
    assert status == 200
    return json.loads(body)


class TestAnswers:
    async def test_what_has_changed_and_what_waits(self, case):
        async with case.process() as process:
            case.write(limits={"max_requests": 7}, server={"port": 1, "management_port": 0, "route_headers": True})
            status, told = await reload(process)
            assert status == 200
            assert told == {
                "applied": True,
                "changed": [
                    {"path": "server.route_headers", "from": False, "to": True},
                    {"path": "limits.max_requests", "from": 10000, "to": 7},
                ],
                "restart": ["server.port"],
                "instances": {"added": [], "removed": [], "changed": [], "refused": {}},
            }
            shown = await config_of(process)
            assert shown["settings"]["limits"]["max_requests"] == 7
            assert shown["settings"]["server"]["port"] == 0
            assert shown["restart"] == ["server.port"]
            assert shown["file"] == str(case.path)

    async def test_a_faulty_file_is_answered_with_every_reason(self, case, caplog):
        async with case.process() as process:
            before = await config_of(process)
            case.path.write_text("limits:\n  max_request: 3\nretry:\n  max_attempts: 0\n")
            status, told = await reload(process)
            assert status == 400
            assert told["file"] == str(case.path)
            assert told["problems"] == [
                {"path": "limits.max_request", "line": 2, "reason": "unknown key",
                 "hint": "did you mean 'max_requests'?"},
                {"path": "retry.max_attempts", "line": 4, "reason": "must be at least 1, not 0", "hint": None},
            ]  # fmt: skip
            assert await config_of(process) == before
            assert process.app.metrics.config_reloads.labels("invalid").value == 1

    async def test_a_dry_run_changes_nothing(self, case):
        async with case.process() as process:
            case.write(limits={"max_requests": 7})
            status, told = await reload(process, "?dry_run=true")
            assert (status, told["applied"]) == (200, False)
            assert [change["path"] for change in told["changed"]] == ["limits.max_requests"]
            assert process.app.settings.limits.max_requests == 10000
            assert process.app.metrics.config_reloads.labels("ok").value == 0
            case.path.write_text("{")
            assert (await reload(process, "?dry_run=1"))[0] == 400
            assert process.app.metrics.config_reloads.labels("invalid").value == 0

    async def test_a_dry_run_names_the_instances_that_would_change(self, case, fake):
        async with case.process() as process:
            more = entry("h9", fake) | {"url": "http://127.0.0.1:9"}
            case.write(cluster={"instances": [case.entry | {"max_requests": 3}, more]})
            told = (await reload(process, "?dry_run=true"))[1]["instances"]
            assert told == {"added": ["h9"], "removed": [], "changed": ["h0"], "refused": {}}
            case.write(cluster={"instances": [more]})
            told = (await reload(process, "?dry_run=true"))[1]["instances"]
            assert told == {"added": ["h9"], "removed": ["h0"], "changed": [], "refused": {}}
            assert (await reload(process))[1]["instances"] == told
            assert (await reload(process, "?dry_run=true"))[1]["instances"]["added"] == []

    async def test_a_flag_that_is_none(self, case):
        async with case.process() as process:
            assert (await reload(process, "?dry_run=maybe"))[0] == 400

    async def test_without_a_file(self, case):
        async with Process(case.given) as process:
            status, told = await reload(process)
            assert status == 400
            assert told["problems"][0]["reason"] == "there is no file to read again"

    async def test_secrets_are_masked(self, case):
        async with case.process() as process:
            case.write(auth={"keys": [{"name": "a", "hash": "sha256:" + "ab" * 32}]})
            status, told = await reload(process)
            assert status == 200
            text = json.dumps([told, await config_of(process)])
            assert "abab" not in text
            assert '"***"' in text


class TestSections:
    async def test_limits_of_bodies_and_headers(self, case):
        async with case.process() as process:
            await process.ready()
            case.write(limits={"max_body_bytes": 40})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 413
            case.write()
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 200

    async def test_live_requests_and_waits(self, case, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply()

        fake.infer = slow
        async with case.process() as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, BODY), name="asking")
            await until(lambda: fake.calls)
            case.write(limits={"max_requests": 1})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 429
            case.write(limits={"max_queue": 0}, cluster={"instances": [case.entry | {"max_requests": 1}]})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 429
            gate.set()
            assert (await asking)[0] == 200

    async def test_deadlines_hold_for_requests_that_begin_later(self, case, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply()

        fake.infer = slow
        async with case.process() as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, BODY), name="asking")
            await until(lambda: fake.calls)
            case.write(timeouts={"request_s": 0.1, "first_token_s": 0.1})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 504
            assert not asking.done()
            gate.set()
            assert (await asking)[0] == 200

    async def test_retries(self, case, fake):
        async def broken(call):
            call.reply(b"{}", status=500)

        fake.infer = broken
        async with case.process() as process:
            await process.ready()
            assert (await process.call(CHAT, BODY))[0] == 502
            case.write(retry={"max_attempts": 1}, health={"interval_s": 1, "fail_after": 100})
            assert await process.reload()
            await process.call(CHAT, BODY)
            assert process.lines.records[-1].attempts == 1

    async def test_names_of_the_model(self, case):
        async with case.process() as process:
            await process.ready()
            other = BODY.replace(b'"m"', b'"alias"')
            assert (await process.call(CHAT, other))[0] == 404
            case.write(cluster={"model_aliases": ["alias"]})
            assert await process.reload()
            assert (await process.call(CHAT, other))[0] == 200
            case.write(cluster={"model": "n"})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[0] == 404
            assert (await process.call(CHAT, BODY.replace(b'"m"', b'"n"')))[0] == 200

    async def test_headers_that_tell_the_route(self, case):
        async with case.process() as process:
            await process.ready()
            case.write(server={"port": 0, "management_port": 0, "route_headers": True})
            assert await process.reload()
            assert (await process.call(CHAT, BODY))[1]["X-PD-Prefill"] == "h0"

    async def test_the_policy_and_loads_that_survive_it(self, case, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply()

        fake.infer = slow
        async with case.process() as process:
            await process.ready()
            asking = [asyncio.create_task(process.call(CHAT, BODY), name=f"asking {n}") for n in range(3)]
            await until(lambda: len(fake.calls) == 3)
            case.write(scheduling={"policy": "round_robin"})
            assert await process.reload()
            (load,) = [load for _, load in process.app.scheduler.loads()]
            assert load.requests == 3
            gate.set()
            assert {(await one)[0] for one in asking} == {200}
            assert load.requests == 0
            assert (await process.call(CHAT, BODY))[0] == 200

    async def test_health_checks(self, case, fake):
        asked = []

        async def other(call):
            asked.append(call.target)
            call.reply()

        fake.other = other
        case.given = document(case.entry, health={"interval_s": 3600, "timeout_s": 30, "recover_after": 1})
        async with case.process() as process:
            await process.ready()
            del asked[:]
            case.write(health={"interval_s": 0.1, "path": "/elsewhere"})
            assert await process.reload()
            await until(lambda: asked.count("/elsewhere") >= 2)

    async def test_time_to_connect_reaches_client_and_engines(self, case):
        async with case.process() as process:
            case.write(timeouts={"connect_s": 0.25}, health={"timeout_s": 2, "path": "/alive"})
            assert await process.reload()
            engine = process.app.control._engines["vllm"]
            assert (engine._context.connect_s, engine._context.health_timeout_s) == (0.25, 2)
            assert engine._context.health_path == "/alive"
            assert process.app._client._connector._connect_s == 0.25

    async def test_settings_of_engines_as_far_as_they_can(self, case):
        case.given = document(case.entry, engines={"xllm": {"rpc_port": 0}})
        async with case.process() as process:
            case.write(engines={"xllm": {"rpc_port": 5, "order_wait_s": 0.5}, "microserving": {"cleanup_s": 3}})
            status, told = await reload(process)
            assert status == 200
            assert told["restart"] == ["engines.xllm.rpc_port"]
            assert {change["path"] for change in told["changed"]} == {
                "engines.xllm.order_wait_s", "engines.microserving.cleanup_s"
            }  # fmt: skip
            engines = process.app.control._engines
            assert engines["xllm"]._settings.order_wait_s == 0.5
            assert engines["xllm"]._settings.rpc_port == 0
            assert engines["microserving"]._means.settings.cleanup_s == 3
            assert engines["microserving"]._means.errands.within_s == 3
            # and what waits goes on waiting
            assert (await reload(process))[1]["restart"] == ["engines.xllm.rpc_port"]

    async def test_an_engine_that_was_not_in_use(self, case, tmp_path, fake):
        (tmp_path / "mine.py").write_text(
            "from coordinator.engines.hybrid import HybridEngine\nclass Mine(HybridEngine):\n    pass\n"
        )
        async with case.process() as process:
            await process.ready()
            case.write(cluster={"engine": "mine.py:Mine"})
            assert await process.reload()
            name = f"{tmp_path / 'mine.py'}:Mine"
            assert process.app.cluster.describe()[-1]["engine"] == name
            await until(lambda: process.app.cluster.ready_pair()[0])
            assert (await process.call(CHAT, BODY))[0] == 200

    async def test_logging(self, case):
        async with case.process() as process:
            given = []
            process.app.renewal.on_logging = given.append
            case.write(logging={"level": "debug"})
            assert await process.reload()
            assert [one.level for one in given] == ["debug"]

    async def test_time_to_drain(self, case):
        async with case.process() as process:
            case.write(timeouts={"drain_s": 1.5})
            assert await process.reload()
            assert process.app.renewal.drain_s == 1.5


class TestAtOnceOrNotAtAll:
    async def test_streams_go_on(self, case, fake):
        gate = asyncio.Event()

        async def streamed(call):
            call.open_stream()
            call.chunk(EVENT)
            await gate.wait()
            call.chunk(EVENT)
            call.chunk(b"data: [DONE]\n\n")
            call.end()

        fake.infer = streamed
        async with case.process() as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, STREAMED), name="asking")
            await until(lambda: process.app.data.dispatcher.live == 1)
            for policy in ("round_robin", "load_balance") * 3:
                case.write(scheduling={"policy": policy}, timeouts={"request_s": 5}, limits={"max_requests": 9})
                assert await process.reload()
            gate.set()
            status, _, body = await asking
            assert (status, body.count(b'"A"')) == (200, 2)
            assert body.endswith(b"data: [DONE]\n\n")

    async def test_the_loop_is_free_while_the_file_is_read(self, case, monkeypatch):
        reading, gate = threading.Event(), threading.Event()
        load = reloading.load_settings

        def slow(path):
            reading.set()
            assert gate.wait(10)
            return load(path)

        monkeypatch.setattr(reloading, "load_settings", slow)
        async with case.process() as process:
            await process.ready()
            case.write(limits={"max_requests": 7})
            reloaded = asyncio.create_task(process.reload(), name="reload")
            await until(reading.is_set)
            assert (await process.call(CHAT, BODY))[0] == 200
            assert process.app.settings.limits.max_requests == 10000
            gate.set()
            assert await reloaded
            assert process.app.settings.limits.max_requests == 7

    async def test_a_part_that_refuses_turns_the_others_back(self, case):
        async with case.process() as process:
            reloader = process.app.control.reloader
            seen = []

            def refuse(settings):
                raise ConfigError("f", [Problem("tls.data.cert_file", None, "is gone")])

            reloader.parts += [lambda settings: seen.append(settings.limits.max_requests), refuse]
            before = await config_of(process)
            case.write(limits={"max_requests": 7})
            status, told = await reload(process)
            assert status == 400
            assert told["problems"][0]["path"] == "tls.data.cert_file"
            assert seen == [7, 10000]
            assert await config_of(process) == before
            assert process.app.dispatcher._limits.max_requests == 10000

    async def test_a_policy_that_cannot_be_made(self, case, tmp_path):
        async with case.process() as process:
            before = await config_of(process)
            case.write(scheduling={"policy": "nowhere:Policy"}, limits={"max_requests": 7})
            status, told = await reload(process)
            assert status == 400
            assert told["problems"][0]["path"] == "scheduling.policy"
            assert await config_of(process) == before

    async def test_signals_that_come_in_a_burst(self, case, caplog):
        caplog.set_level(logging.INFO, "pd_coordinator")
        async with case.process() as process:
            case.write(limits={"max_requests": 7})
            for _ in range(50):
                process.app.hang_up()
            await until(lambda: process.app.metrics.config_reloads.labels("ok").value == 2)
            await turns()
            assert process.app.settings.limits.max_requests == 7
            assert "settings that have changed: limits.max_requests" in caplog.text

    async def test_a_signal_and_a_faulty_file(self, case, caplog):
        async with case.process() as process:
            case.path.write_text("{")
            process.app.hang_up()
            await until(lambda: process.app.metrics.config_reloads.labels("invalid").value == 1)
            assert "nothing has changed" in caplog.text

    async def test_a_stop_in_between(self, case, monkeypatch):
        gate = threading.Event()
        load = reloading.load_settings
        monkeypatch.setattr(reloading, "load_settings", lambda path: gate.wait(10) and load(path))
        async with case.process() as process:
            process.app.hang_up()
            await turns()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "reload"]
        gate.set()

    async def test_two_at_once_come_one_after_the_other(self, case):
        async with case.process() as process:
            case.write(limits={"max_requests": 7})
            answers = await asyncio.gather(reload(process), reload(process))
            assert [status for status, _ in answers] == [200, 200]
            assert sorted(len(told["changed"]) for _, told in answers) == [0, 1]


LEVELS = "/v1/log-level"


class TestLogLevels:
    async def put(self, process, body):
        port = process.app.management.addresses["management"][1]
        async with process.session.put(f"http://127.0.0.1:{port}{LEVELS}", json=body) as reply:
            return reply.status, await reply.json()

    async def test_until_the_file_is_read_again(self, case):
        async with case.process() as process:
            given = []
            process.app.renewal.on_logging = given.append
            assert json.loads((await process.call(LEVELS, management=True))[2]) == {"level": "info", "levels": {}}
            told = await self.put(process, {"levels": {"pd_coordinator.engines": "debug"}})
            assert told == (200, {"level": "info", "levels": {"pd_coordinator.engines": "debug"}})
            told = await self.put(process, {"level": "error", "levels": {"pd_coordinator": "warning"}})
            assert told[1] == {
                "level": "error", "levels": {"pd_coordinator.engines": "debug", "pd_coordinator": "warning"}
            }  # fmt: skip
            told = await self.put(process, {"levels": {"pd_coordinator.engines": None}})
            assert told[1]["levels"] == {"pd_coordinator": "warning"}
            assert [one.level for one in given] == ["info", "error", "error"]
            assert await process.reload()
            assert json.loads((await process.call(LEVELS, management=True))[2]) == {"level": "info", "levels": {}}
            assert given[-1].level == "info"

    @pytest.mark.parametrize(
        "body", [{}, [], {"levle": "info"}, {"level": "loud"}, {"level": None}, {"levels": {"engines": "debug"}},
                 {"levels": {"pd_coordinator.x": "loud"}}, {"levels": [1]}, {"level": "info", "format": "json"}],
    )  # fmt: skip
    async def test_what_is_none(self, case, body):
        async with case.process() as process:
            status, told = await self.put(process, body)
            assert status == 400
            assert told["error"]
            assert process.app.control.reloader.logging.level == "info"


async def test_lines_of_a_request_carry_its_id(case, fake):
    seen = []

    async def noted(call):
        call.reply()

    fake.infer = noted
    async with case.process() as process:
        await process.ready()
        assert process.app.renewal.belonging() == {}
        place = process.app.scheduler.place

        async def looked(*args):
            seen.append(dict(process.app.renewal.belonging()))
            return await place(*args)

        process.app.scheduler.place = looked
        _, headers, _ = await process.call(CHAT, BODY)
        assert seen == [{"request": headers["X-Request-Id"]}]
        assert process.app.renewal.belonging() == {}
