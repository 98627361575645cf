"""The composition root: start, reload, drain, stop."""

import asyncio
import json
import logging
import socket

import pytest
from app_world import Process, can_listen, document, entry, settings_of
from engine_world import held, turns, until
from fake_instances import FakeInstance

from coordinator.app import App
from coordinator.config import ConfigError
from coordinator.parts import load_settings, make_policies

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
STREAMED = BODY.replace(b"}]}", b'}],"stream":true}')
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"A"},"finish_reason":null}]}\n\n'


@pytest.fixture
async def fake():
    made = await FakeInstance().listen()
    yield made
    await made.aclose()


class TestStart:
    async def test_both_ports_serve_and_are_given_back(self, fake, free_port):
        before = asyncio.all_tasks()
        ports = {"port": free_port(), "management_port": free_port()}
        async with Process(document(entry("h0", fake), server=ports)) as process:
            await process.ready()
            status, headers, body = await process.call(CHAT, BODY)
            assert (status, body) == (200, b"{}")
            assert headers["X-Request-Id"] == process.lines.records[0].id
            for path in ("/v1/instances", "/v1/startup", "/v1/health", "/v1/readiness", "/metrics"):
                assert (await process.call(path, management=True))[0] == 200, path
            assert not any(map(can_listen, ports.values()))
        assert all(map(can_listen, ports.values()))
        await until(lambda: not fake.peers)
        await until(lambda: asyncio.all_tasks() == before)

    async def test_the_same_ports_again(self, free_port):
        given = document(server={"port": free_port(), "management_port": free_port()})
        for _ in range(2):
            async with Process(given) as process:
                assert process.app.server.port == given["server"]["port"]

    @pytest.mark.parametrize("taken", ["port", "management_port", "metrics_port", "status_port"])
    async def test_a_port_that_is_taken(self, taken, fake, free_port):
        before = asyncio.all_tasks()
        names = ("port", "management_port", "metrics_port", "status_port")
        ports = {name: free_port() for name in names}
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", ports[taken]))
            holder.listen(1)
            process = Process(document(entry("h0", fake), server=ports))
            with pytest.raises(OSError, match="in use"):
                await process.app.start()
        assert all(map(can_listen, ports.values())), "nothing is left open"
        await until(lambda: asyncio.all_tasks() == before)

    async def test_stopping_twice_and_without_a_start(self):
        process = Process(document())
        await process.app.aclose()
        async with Process(document()) as process:
            await process.app.aclose()

    async def test_readiness_says_why_not(self):
        async with Process(document()) as process:
            status, _, body = await process.call("/v1/readiness", management=True)
            assert status == 503
            assert b"no instance is known" in body
            status, headers, body = await process.call(CHAT, BODY)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "no_instance"

    async def test_every_gauge_can_be_read(self, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply()

        fake.infer = slow
        async with Process(document(entry("h0", fake), entry("p0", role="prefill"))) as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, BODY), name="asking")
            await until(lambda: fake.calls)
            text = (await process.call("/metrics", management=True))[2].decode()
            for line in (
                "pd_coordinator_requests_in_flight 1",
                "pd_coordinator_requests_queued 0",
                'pd_coordinator_instance_in_flight{instance="h0",role="hybrid"} 1',
                'pd_coordinator_instance_up{instance="h0",role="hybrid"} 1',
                'pd_coordinator_instance_up{instance="p0",role="prefill"} 0',
            ):
                assert any(found.removesuffix(".0") == line for found in text.splitlines()), line
            gate.set()
            assert (await asking)[0] == 200
            assert held(process.app.scheduler) == {}


class TestReload:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "cluster.yaml"

    def write(self, path, given):
        path.write_text(json.dumps(given))

    async def test_instances_come_and_go(self, path, fake, caplog):
        caplog.set_level(logging.INFO, "pd_coordinator")
        given = document(entry("h0", fake), entry("h1"))
        async with Process(given, path) as process:
            await process.ready()
            self.write(path, document(entry("h0", fake), entry("h2")))
            assert await process.reload()
            assert process.ids() == ["h0", "h2"]
            assert (await process.call(CHAT, BODY))[0] == 200
            assert process.app.metrics.config_reloads.labels("ok").value == 1
            told = [record.getMessage() for record in caplog.records if "reloaded" in record.getMessage()]
            assert told == ["configuration reloaded: added h2, removed h1, changed none"]

    async def test_the_same_file_changes_nothing(self, path, fake):
        given = document(entry("h0", fake))
        self.write(path, given)
        async with Process(given, path) as process:
            await process.ready()
            version = process.app.cluster.view.version
            for _ in range(3):
                assert await process.reload()
            assert process.app.cluster.view.version == version

    @pytest.mark.parametrize(
        "text", ["", "{", "cluster: [", "clutser: {}", '{"cluster":{"engine":"nope"}}', "\x00",
                 '{"cluster":{"instances":[{"role":"hybrid"}]}}', '{"scheduling":{"policy":"nope"}}',
                 '{"cluster":{"instances":[{"role":"decode","url":"http://a:1","inter_comm_port":"x"}]}}'],
    )  # fmt: skip
    async def test_a_faulty_file_changes_nothing_and_is_told_once(self, path, fake, text, caplog):
        given = document(entry("h0", fake))
        async with Process(given, path) as process:
            await process.ready()
            if text == "":
                path.write_bytes(b"\xff\xfe")
            else:
                path.write_text(text)
            caplog.clear()
            assert not await process.reload()
            assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["ERROR"]
            assert process.app.metrics.config_reloads.labels("invalid").value == 1
            assert process.ids() == ["h0"]
            assert (await process.call(CHAT, BODY))[0] == 200
            # and a good one is taken afterwards
            self.write(path, document(entry("h0", fake), entry("h1")))
            assert await process.reload()
            assert process.ids() == ["h0", "h1"]

    async def test_a_file_that_is_gone(self, path, fake):
        async with Process(document(entry("h0", fake)), path) as process:
            assert not await process.reload()
            assert process.ids() == ["h0"]

    async def test_without_a_file(self, fake):
        async with Process(document(entry("h0", fake))) as process:
            assert not await process.reload()
            assert process.ids() == ["h0"]

    async def test_what_waits_for_the_next_start_is_named(self, path, fake, caplog):
        async with Process(document(entry("h0", fake)), path) as process:
            port = process.app.port
            self.write(path, document(entry("h0", fake), limits={"max_requests": 7}, server={"port": 7, "workers": 2}))
            assert await process.reload()
            warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert warnings == ["changed settings that take effect at the next start: server.port, server.workers"]
            assert process.app.settings.server.workers == 1
            assert process.app.settings.limits.max_requests == 7
            assert (await process.call(CHAT, BODY))[0] == 200
            assert process.app.port == port

    async def test_running_requests_are_unharmed(self, path, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply(b'{"x":1}')

        fake.infer = slow
        async with Process(document(entry("h0", fake)), path) as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, BODY), name="asking")
            await until(lambda: fake.calls)
            self.write(path, document(entry("h1")))
            assert await process.reload()
            assert process.ids() == ["h1"]
            gate.set()
            status, _, body = await asking
            assert (status, body) == (200, b'{"x":1}')
            await until(lambda: [row["id"] for row in process.app.cluster.describe()] == ["h1"])


class TestDrain:
    async def test_what_runs_may_end_and_nothing_new_begins(self, fake):
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply(b'{"x":1}')

        fake.infer = slow
        async with Process(document(entry("h0", fake))) as process:
            await process.ready()
            asking = asyncio.create_task(process.call(CHAT, BODY), name="asking")
            await until(lambda: fake.calls)
            draining = asyncio.create_task(process.app.drain(), name="drain")
            await turns()
            status, headers, _ = await process.call(CHAT, BODY)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert (await process.call("/v1/readiness", management=True))[0] == 503
            assert (await process.call("/v1/health", management=True))[0] == 200
            assert not draining.done()
            gate.set()
            assert (await asking)[2] == b'{"x":1}'
            async with asyncio.timeout(5):
                await draining

    async def test_what_takes_too_long_gets_an_error_event_and_is_aborted(self, fake, caplog):
        async def endless(call):
            call.open_stream()
            call.chunk(EVENT)
            await call.left()

        fake.infer = endless
        async with Process(document(entry("h0", fake), timeouts={"drain_s": 0.05})) as process:
            await process.ready()
            _, writer = streams = await asyncio.open_connection("127.0.0.1", process.app.server.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
                % (len(STREAMED), STREAMED)
            )
            await streams[0].readuntil(b"\n\n")
            async with asyncio.timeout(5):
                await process.app.drain()
                await fake.calls[0].left()
                rest = await streams[0].read()
            assert b'"code":"draining"' in rest
            assert not rest.endswith(b"0\r\n\r\n"), "a broken answer must not look like a whole one"
            assert held(process.app.scheduler) == {}
            writer.close()
            assert [record.levelname for record in caplog.records if "grace" in record.getMessage()] == ["WARNING"]

    async def test_nothing_to_drain(self):
        async with Process(document()) as process:
            async with asyncio.timeout(5):
                await process.app.drain()


class TestSettings:
    def test_policies_by_role(self):
        policies = make_policies(
            settings_of({"scheduling": {"policy": {"prefill": "round_robin", "decode": "load_balance"}}})
        )
        assert type(policies.prefill) is not type(policies.decode)

    def test_every_key_of_load_balance_is_known_to_the_policy(self):
        """All keys of the configuration, so that none is refused at the start."""
        settings = settings_of({"scheduling": {"policy": "load_balance"}})
        given = dict(settings.scheduling.load_balance)
        assert given
        make_policies(settings_of({"scheduling": {"policy": "load_balance", "load_balance": given}}))

    def test_a_policy_that_cannot_be_had_is_a_problem_of_its_line(self, tmp_path):
        path = tmp_path / "cluster.yaml"
        path.write_text("cluster: {}\nscheduling:\n  policy: nowhere:Policy\n")
        with pytest.raises(ConfigError) as caught:
            load_settings(path)
        assert "nowhere" in str(caught.value)
        assert "3" in str(caught.value)

    def test_a_policy_has_its_options(self):
        given = {
            "policy": {"prefill": "xllm_cache_aware", "decode": "xllm_slo"},
            "policy_options": {"xllm_slo": {"target_tpot_ms": 30}, "xllm_cache_aware": {"order": "shortest"}},
        }
        policies = make_policies(settings_of({"scheduling": given}))
        assert policies.decode.options.target_tpot_ms == 30
        assert policies.prefill.accounting.order == "shortest"

    def test_a_policy_of_the_users_own_has_its_options(self, tmp_path, monkeypatch):
        (tmp_path / "own_policy.py").write_text(
            "from coordinator.policies import RoundRobin\n\n\nclass Own(RoundRobin):\n"
            "    def __init__(self, weight):\n        super().__init__()\n        self.weight = weight\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        given = {"policy": "own_policy:Own", "policy_options": {"own_policy:Own": {"weight": 7}}}
        assert make_policies(settings_of({"scheduling": given})).prefill.weight == 7

    @pytest.mark.parametrize(
        ("name", "options", "says"),
        [
            ("xllm_slo", {"target_ms": 3}, "policy_options.xllm_slo: unknown option 'target_ms'"),
            ("xllm_slo", {"target_tpot_ms": -1}, "policy_options.xllm_slo: policy xllm_slo: target_tpot_ms must be"),
            ("load_balance", {"order": "fcfs"}, "policy_options.load_balance: its options stand in a section"),
            ("xllm_slow", {}, "did you mean 'xllm_slo'?"),
            ("nowhere:Policy", {}, "no role has this policy"),
        ],
    )
    def test_options_that_cannot_be_are_a_problem_of_their_line(self, tmp_path, name, options, says):
        path = tmp_path / "cluster.yaml"
        path.write_text(f"cluster: {{}}\nscheduling:\n  policy_options:\n    {name!r}: {json.dumps(options)}\n")
        with pytest.raises(ConfigError) as caught:
            load_settings(path)
        assert says in str(caught.value)
        assert "cluster.yaml:4" in str(caught.value)

    async def test_an_engine_of_the_users_own(self, fake):
        given = document({**entry("h0", fake), "engine": "coordinator.engines.hybrid:HybridEngine"})
        async with Process(given) as process:
            await process.ready()
            assert (await process.call(CHAT, BODY))[0] == 200

    def test_an_app_alone_starts_nothing(self):
        """Built outside of any loop: the constructor opens no socket and makes no task."""
        app = App(settings_of(document()), None)
        assert app.server.port == 0


async def test_series_of_an_instance_that_left_are_dropped(fake):
    mark = b'engine_failures_total{instance="h0"'
    async with Process(document(entry("h0", fake), entry("h1"))) as process:
        await process.ready()
        process.app.metrics.engine_failures.labels("h0", "decode", "reset").inc()
        assert mark in process.app.metrics.render()
        process.app.cluster.remove("h0")
        await until(lambda: mark not in process.app.metrics.render())
