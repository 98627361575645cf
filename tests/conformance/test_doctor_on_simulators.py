"""The doctor on simulated clusters: healthy ones, and one with six planted faults that it has to name."""

import asyncio
import datetime as dt
import io
import json
import logging
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import format_datetime
from urllib.parse import urlsplit

import aiohttp
import pytest
import trustme
from aiohttp import web
from certificates import Authority
from engine_world import until
from held_ports import HeldPorts

from coordinator.app import App
from coordinator.cli import main
from coordinator.config import parse
from coordinator.demo_extras import extras_of
from coordinator.doctor import Level, Options, as_json, as_text, examine
from coordinator.observability.access import AccessLog
from coordinator.observability.writer import LineWriter
from instances.options import Options as Sim
from instances.run import Fleet
from instances.timing import Timing

QUICK = Options(within_s=5.0, handover_s=15.0)
ROLES = ("prefill", "prefill", "decode", "decode")


def sim(engine, role, **more):
    return Sim(engine=engine, role=role, model="m", timing=Timing(), **more)


def row(each, name, **more):
    keys = {}
    if each.options.engine == "sglang" and each.role == "prefill":
        keys["bootstrap_port"] = each.engine.bootstrap_port
    return {"id": name, "role": each.role, "url": each.url, "engine": each.options.engine, **keys, **more}


def named(fleet):
    counts = {}
    for each in fleet.instances:
        letter = each.role[0]
        counts[letter] = counts.get(letter, -1) + 1
        yield each, f"{letter}{counts[letter]}"


def write(folder, rows, **sections):
    path = folder / "cluster.yaml"
    given = {
        "server": {"port": 0, "management_port": 0},
        "cluster": {"engine": "vllm", "model": "m", "instances": rows},
        "limits": {"max_requests": 10},
    }
    path.write_text(json.dumps(given | sections))
    return path


def found(report, check, *levels):
    return {finding.subject: finding.what for finding in report.of(*levels) if finding.check == check}


@pytest.fixture
def free_port():
    with HeldPorts() as ports:
        yield ports.take


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mindie", "microserving"])
async def test_a_healthy_cluster(engine, tmp_path):
    settings = {"world": f"doctor-{tmp_path.name}"} if engine == "microserving" else {}
    async with Fleet([sim(engine, role, settings=settings) for role in ROLES]) as fleet:
        ranks = {"recv_rank": 0} if engine == "microserving" else {}
        rows = [
            row(each, name, **({"recv_rank": each.engine.recv_rank} if ranks and each.role == "decode" else {}))
            for each, name in named(fleet)
        ]
        report = await examine(write(tmp_path, rows), QUICK)
        assert report.status == 0, as_text(report)
        assert set(found(report, "handover", Level.OK)) == {"p0 -> d0", "p0 -> d1", "p1 -> d0", "p1 -> d1"}
        assert set(found(report, "reach", Level.OK)) == {"p0", "p1", "d0", "d1"}
        assert not report.of(Level.WARNING, Level.FAULT)
        await until(lambda: not any(each.ledger.used_blocks or each.live for each in fleet.instances))


@pytest.mark.parametrize("engine", ["xllm", "disaggpb"])
async def test_a_healthy_cluster_of_engines_that_call_back_or_speak_grpc(engine, tmp_path):
    pytest.importorskip("tokenizers")
    async with AsyncExitStack() as stack:
        extras = await extras_of(engine, stack)
        settings = {}
        if engine == "xllm":
            settings = {"service": f"127.0.0.1:{extras.engine['rpc_port']}"}
        fleet = await stack.enter_async_context(
            Fleet([sim(engine, role, settings=settings) for role in ("prefill", "decode")])
        )
        rows = []
        for number, (each, name) in enumerate(named(fleet)):
            keys = extras.keys(each.engine.announce(), number)
            rows.append(row(each, name, **keys))
        path = write(tmp_path, rows, engines={engine: dict(extras.engine)})
        report = await examine(path, QUICK)
        assert report.status == 0, as_text(report)
        assert set(found(report, "handover", Level.OK)) == {"p0 -> d0"}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mindie"])
async def test_where_no_model_is_configured_a_pair_is_asked_for_the_one_that_both_serve(engine, tmp_path):
    async with Fleet([sim(engine, role) for role in ("prefill", "decode")]) as fleet:
        rows = [row(each, name) for each, name in named(fleet)]
        report = await examine(write(tmp_path, rows, cluster={"engine": engine, "instances": rows}), QUICK)
        assert report.status == 0, as_text(report)
        assert set(found(report, "handover", Level.OK)) == {"p0 -> d0"}
        work = [one for each in fleet.instances for one in each.records if one.method == "POST"]
        assert {json.loads(one.body)["model"] for one in work} == {"m"}


async def test_a_pair_of_different_models_is_a_fault(tmp_path):
    both = [sim("vllm", "prefill"), Sim(engine="vllm", role="decode", model="another", timing=Timing())]
    async with Fleet(both) as fleet:
        rows = [row(each, name) for each, name in named(fleet)]
        report = await examine(write(tmp_path, rows, cluster={"engine": "vllm", "instances": rows}), QUICK)
    assert set(found(report, "handover", Level.FAULT)) == {"p0 -> d0"}, as_text(report)


async def test_a_hybrid_instance_answers(tmp_path):
    async with Fleet([sim("vllm", "hybrid")]) as fleet:
        report = await examine(write(tmp_path, [row(fleet.instances[0], "h0")]), QUICK)
    assert report.status == 0, as_text(report)
    assert found(report, "answer", Level.OK) == {"h0": "answers a small request"}


# --- planted faults


@asynccontextmanager
async def another_time(url, **shift):
    """Something in front of an instance whose answers come from another time."""
    session = aiohttp.ClientSession()

    async def pass_on(request):
        date = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(**shift), usegmt=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with session.request(
            request.method, url + request.path_qs, data=await request.read(), headers=headers
        ) as reply:
            return web.Response(
                status=reply.status, body=await reply.read(), headers={"Date": date}, content_type=reply.content_type
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await session.close()


@asynccontextmanager
async def behind_tls(url, issued):
    """TLS in front of an instance."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issued.configure_cert(context)
    port = urlsplit(url).port

    async def copy(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def client(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(client, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.fixture
async def ill(tmp_path, free_port):
    """A cluster with six faults, and the file that describes it."""
    authority = trustme.CA()
    now = dt.datetime.now(dt.UTC)
    expired = authority.issue_cert(
        "127.0.0.1", not_before=now - dt.timedelta(days=30), not_after=now - dt.timedelta(days=2)
    )
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            Fleet(
                [
                    sim("vllm", "prefill"),
                    sim("vllm", "decode"),
                    sim(
                        "vllm", "decode", faults=("transfer_failed",), settings={"kv_load_failure_policy": "recompute"}
                    ),
                    sim("sglang", "prefill"),
                    sim("sglang", "prefill"),
                    Sim(engine="mindie", role="hybrid", model="another", timing=Timing()),
                    sim("vllm", "hybrid"),
                    sim("vllm", "hybrid"),
                ]
            )
        )
        vllm_p, vllm_d, recomputes, sglang_p, not_decode, other_model, slow_clock, dated = fleet.instances
        ahead = await stack.enter_async_context(another_time(slow_clock.url, minutes=-7))
        tls = await stack.enter_async_context(behind_tls(dated.url, expired))
        rows = [
            row(vllm_p, "p0"),
            row(vllm_d, "d0"),
            row(recomputes, "d-recomputes"),
            row(sglang_p, "s0"),
            row(not_decode, "d-wrong-role") | {"role": "decode"},
            row(other_model, "h-other-model"),
            row(slow_clock, "h-clock") | {"url": ahead},
            row(dated, "h-expired") | {"url": tls, "ca_file": str(tmp_path / "ca.pem")},
            {"id": "d-down", "role": "decode", "url": f"http://127.0.0.1:{free_port()}", "engine": "mindie"},
        ]
        rows[4].pop("bootstrap_port")
        yield write(tmp_path, rows)


async def test_every_planted_fault_is_named_and_nothing_else(ill):
    report = await examine(ill, QUICK)
    assert report.status == 2
    faults = {(finding.check, finding.subject) for finding in report.of(Level.FAULT)}
    assert faults == {
        ("handover", "p0 -> d-recomputes"),
        ("role", "d-wrong-role"),
        ("model", "h-other-model"),
        ("reach", "h-expired"),
        ("certificates", "h-expired"),
        ("reach", "d-down"),
    }, as_text(report)
    assert {(finding.check, finding.subject) for finding in report.of(Level.WARNING)} == {("clock", "h-clock")}
    text = as_text(report)
    for words in (
        "role d-wrong-role: it runs as prefill, the configuration says decode",
        "model h-other-model: it serves another, the configuration says m",
        "reach d-down: decode of mindie at http://127.0.0.1:",
        "connect refused",
        "handover p0 -> d-recomputes: the KV does not move: it computed 320 prompt tokens itself, after a KV",
        "clock h-clock: its clock is 7 min behind this machine's",
        "certificates h-expired: the certificate expired on",
    ):
        assert words in text, (words, text)
    assert found(report, "handover", Level.OK).keys() == {"p0 -> d0"}
    assert all(finding.advice for finding in report.of(Level.FAULT, Level.WARNING))


async def test_the_report_for_programs(ill):
    report = await examine(ill, QUICK)
    told = json.loads(as_json(report))
    assert told["status"] == 2
    assert told["file"] == str(ill)
    assert {"level", "check", "subject", "what", "advice"} == set(told["findings"][0])
    assert {finding["level"] for finding in told["findings"]} == {"ok", "note", "warning", "fault"} - (
        set() if report.of(Level.NOTE) else {"note"}
    )


async def test_prefill_that_hands_nothing_over(tmp_path):
    async with Fleet([sim("vllm", "prefill", faults=("no_params",)), sim("vllm", "decode")]) as fleet:
        report = await examine(write(tmp_path, [row(each, name) for each, name in named(fleet)]), QUICK)
    assert report.status == 2
    assert "prefill answered without kv_transfer_params" in found(report, "handover", Level.FAULT)["p0 -> d0"]


async def test_an_engine_that_refuses_the_request(tmp_path):
    async with Fleet([sim("vllm", "prefill", faults=("status=401",)), sim("vllm", "decode")]) as fleet:
        report = await examine(write(tmp_path, [row(each, name) for each, name in named(fleet)]), QUICK)
    assert report.status == 2
    (finding,) = [one for one in report.of(Level.FAULT) if one.check == "handover"]
    assert "401" in finding.what
    assert "key" in finding.advice


async def test_what_never_answers_costs_its_time_and_no_more(tmp_path):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rows = [{"id": "d0", "role": "decode", "url": f"http://127.0.0.1:{port}"}]
    report = await examine(write(tmp_path, rows), Options(within_s=0.3, handover_s=0.3))
    server.close()
    assert report.status == 2
    assert report.took_s < 10
    assert set(found(report, "reach", Level.FAULT)) == {"d0"}


async def test_without_handovers_no_engine_works(tmp_path):
    async with Fleet([sim("vllm", "prefill"), sim("vllm", "decode")]) as fleet:
        report = await examine(
            write(tmp_path, [row(each, name) for each, name in named(fleet)]), Options(handover=False)
        )
        assert report.status == 0
        assert found(report, "handover", Level.NOTE) == {"": "not tested, as asked for"}
        assert [each.ordinal for each in fleet.instances] == [0, 0]


async def test_more_pairs_than_are_tried(tmp_path):
    async with Fleet([sim("vllm", role) for role in ROLES]) as fleet:
        rows = [row(each, name) for each, name in named(fleet)]
        report = await examine(write(tmp_path, rows), Options(most_pairs=2))
        assert len(found(report, "handover", Level.OK)) == 2
        assert "more pairs than the 2" in found(report, "handover", Level.NOTE)[""]
        # each instance comes up before any pair is tried twice over
        assert {end for pair in found(report, "handover", Level.OK) for end in pair.split(" -> ")} == {
            "p0", "p1", "d0", "d1"
        }  # fmt: skip


@pytest.mark.parametrize("guarded", ["open", "tls", "certificates"])
async def test_a_running_coordinator_keeps_what_it_must_have_alone(tmp_path, guarded, free_port):
    """Also where its management port wants a certificate, which the doctor has none of."""
    authority = Authority(tmp_path)
    tls = {} if guarded == "open" else {"management": authority.issue("server").keys}
    if guarded == "certificates":
        tls["management"]["client_ca_file"] = str(authority.file)
    async with Fleet([sim("mindie", "prefill"), sim("mindie", "decode")]) as fleet:
        ports = {"port": free_port(), "management_port": free_port()}
        path = write(
            tmp_path, [row(each, name) for each, name in named(fleet)], server=ports,
            health={"interval_s": 0.2, "recover_after": 1}, tls=tls,
        )  # fmt: skip
        app = App(
            parse(path.read_text(), str(path)),
            AccessLog(logging.getLogger("pd_coordinator.test"), LineWriter(io.StringIO())),
        )
        await app.start()
        await until(lambda: app.cluster.ready_pair()[0])
        try:
            report = await examine(path, QUICK)
            assert report.status == 0, as_text(report)
            assert "a coordinator runs" in found(report, "handover", Level.NOTE)["mindie"]
            assert found(report, "ports", Level.OK)["server.port"].endswith("is the running coordinator's")
            assert fleet.decode[0].engine.state()["dresult"]["opened"] == 1
        finally:
            await app.aclose()


async def test_another_program_that_wants_certificates_is_no_coordinator_of_ours(tmp_path):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    issued = theirs.issue("another")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.cert, issued.key)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    keys = {**ours.issue("server").keys, "client_ca_file": str(ours.file)}
    path = write(tmp_path, [], server={"port": 0, "management_port": port}, tls={"management": keys})
    report = await examine(path, QUICK)
    server.close()
    await server.wait_closed()
    assert "another program listens there" in found(report, "ports", Level.FAULT)["server.management_port"]


class TestCommand:
    def test_a_file_that_cannot_be_used(self, tmp_path, capsys):
        path = tmp_path / "cluster.yaml"
        path.write_text("limits: {max_request: 1}")
        assert main(["doctor", "--config", str(path)]) == 2
        assert "did you mean 'max_requests'" in capsys.readouterr().err

    def test_text_and_json(self, tmp_path, capsys, free_port):
        path = write(tmp_path, [{"id": "d0", "role": "decode", "url": f"http://127.0.0.1:{free_port()}"}])
        assert main(["doctor", "--config", str(path), "--timeout", "10"]) == 2
        text = capsys.readouterr().out
        assert "FAULT   reach d0" in text
        assert "        -> nothing listens there" in text
        assert text.rstrip().splitlines()[-1].startswith(f"{path}: something is wrong (1 fault, ")
        assert main(["doctor", "--config", str(path), "--timeout", "10", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["status"] == 2

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
    def test_times_that_are_none(self, seconds, tmp_path, capsys):
        with pytest.raises(SystemExit):
            main(["doctor", "--config", "x", "--timeout", seconds])
