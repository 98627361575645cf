"""A whole measurement in small: real processes, the coordinator in front of the pretend engines."""

from dataclasses import replace

import pytest

from bench import measure as measure_module
from bench.measure import NotMeasured, measure
from bench.routers import OURS, Router
from bench.workloads import SHOWN, Workload
from coordinator.engines.table import ENGINES

STREAMS = Workload(4, 12, tokens=6, step_ms=2, prefill_ms=3, stream=True)  # timers count in ms, and may be early by one
UNARY = Workload(4, 40, tokens=3, step_ms=1, prefill_ms=0, stream=False)
HELD = Workload(5, 0, tokens=100_000, step_ms=50, prefill_ms=1, stream=True, hold_s=1)

pytestmark = pytest.mark.slow
flavours = pytest.mark.parametrize("flavour", [name for name in ("mindie", "vllm", "sglang") if name in ENGINES])


@flavours
def test_streams(flavour):
    figures = measure(Router(OURS, flavour), STREAMS)
    assert figures["wrong"] == {}
    assert figures["done"] == 12
    assert figures["events"] == 12 * 6
    assert all(figures[name] >= 0 for name in SHOWN["stream"])
    assert figures["ttft_p50_ms"] > 1


@flavours
@pytest.mark.parametrize("together", [4, 6, 100])
def test_streams_of_several_events_at_once_and_clients_that_count_them(flavour, together):
    figures = measure(Router(OURS, flavour), replace(STREAMS, together=together, counting=True))
    assert (figures["wrong"], figures["done"], figures["events"]) == ({}, 12, 12 * 6)


@flavours
def test_unary(flavour):
    figures = measure(Router(OURS, flavour), UNARY)
    assert figures["wrong"] == {}
    assert figures["done"] == 40
    assert all(name in figures for name in SHOWN["unary"])


def test_held_streams():
    figures = measure(Router(OURS, "mindie"), HELD)
    assert figures["wrong"] == {}
    assert figures["opened"] == 5
    assert all(name in figures for name in SHOWN["idle"])


def test_a_router_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(measure_module, "command", lambda *given: ["sh", "-c", "echo no such luck; exit 3"])
    with pytest.raises(NotMeasured, match="no such luck"):
        measure(Router(OURS, "mindie"), STREAMS)


def test_an_answer_without_handoff_is_wrong(monkeypatch):
    """The pretend engines count requests that were not linked as the protocol wants it."""
    proxy = (
        "import sys, http.server, urllib.request as u\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_POST(self):\n"
        "        body = self.rfile.read(int(self.headers['content-length']))\n"
        "        answer = u.urlopen(u.Request(sys.argv[2] + self.path, body)).read()\n"
        "        self.send_response(200); self.send_header('content-length', str(len(answer))); self.end_headers()\n"
        "        self.wfile.write(answer)\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    monkeypatch.setattr(
        measure_module,
        "command",
        lambda router, place, *more: ["python3", "-c", proxy, str(place.port), place.decode_url],
    )
    figures = measure(Router(OURS, "vllm"), UNARY)
    assert figures["done"] == 40
    assert figures["wrong"]["handoff"] >= 40
