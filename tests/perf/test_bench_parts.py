"""The bench suite's own counting, comparing and writing."""

import os
import subprocess
import sys
import time

import pytest

from bench import routers
from bench.clients import EventCount, quantile_ms
from bench.processes import cpu_s, end, memory_bytes, running, tree
from bench.report import NoSection, before_after, markdown, ratios, text, write_sections
from bench.workloads import LABELS, SHOWN, WORKLOADS, quick

STREAM = b"data: {}\n\ndata: {}\n\n" * 3


class TestClients:
    @pytest.mark.parametrize("cut", range(len(STREAM) + 1))
    def test_events_are_counted_wherever_the_stream_is_cut(self, cut):
        seen = EventCount()
        seen.feed(STREAM[:cut])
        seen.feed(STREAM[cut:])
        assert seen.events == 6

    def test_events_are_counted_byte_by_byte(self):
        seen = EventCount()
        for at in range(len(STREAM)):
            seen.feed(STREAM[at : at + 1])
        assert seen.events == 6

    @pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (0.5, 51.0), (0.99, 100.0)])
    def test_quantiles(self, share, expected):
        assert quantile_ms([number / 1000 for number in range(1, 101)], share) == expected

    def test_no_values(self):
        assert quantile_ms([], 0.5) == 0


class TestProcesses:
    CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'while True: pass']); time.sleep(60)"

    def test_a_tree_is_measured_and_ended_as_a_whole(self, tmp_path):
        with running([sys.executable, "-c", self.CHILD], tmp_path / "log") as process:
            end_s = time.monotonic() + 20
            while cpu_s(process.pid) < 0.3:
                assert time.monotonic() < end_s, "the child's processor time is not seen"
            pids = tree(process.pid)
            assert len(pids) == 2
            assert memory_bytes(process.pid) > memory_bytes(pids[1]) > 1 << 20
        assert process.poll() is not None
        end_s = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):  # noqa: PTH110  # a zombie has no target
            assert time.monotonic() < end_s, "still running"
            time.sleep(0.01)  # the kernel takes a killed process away when it gets to it

    def test_what_does_not_end_by_itself_is_killed(self, monkeypatch):
        monkeypatch.setattr("bench.processes.END_S", 0.2)
        stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", stubborn], stdin=-1, stdout=-1) as process:
            assert process.stdout.readline() == b"up\n"
            end(process)
            assert process.returncode == -9


def row(first, **more):
    return {"wrong": 0, "lowest": first, "highest": first, **more}


def result(ours=8.0):
    shown = {"events_per_s": 1e4, "ttft_p50_ms": 6, "itl_p99_ms": 12}
    rows = {
        "pd-coordinator/mindie": row(ours, cpu_us_per_event=ours, **shown),
        "vllm-router/vllm": row(12.0, cpu_us_per_event=12.0, **shown),
        "smg/sglang": row(10.0, cpu_us_per_event=10.0, **shown),
    }
    return {
        "date": "2030-01-02 03:04 UTC",
        "machine": {
            "cpu": "abacus",
            "cores": "2",
            "memory_gib": "7",
            "kernel": "6.1",
            "python": "3.11.7",
            "load": "0.1",
        },
        "versions": {"smg": "1.13.0"},
        "rounds": 3,
        "quick": False,
        "workloads": {"stream": rows},
        "micro": {"calibration": {"us": 0.3, "ratio": 1.0}, "relay": {"us": 0.36, "ratio": 1.2}},
    }


class TestReport:
    def test_the_ratio_is_to_the_best_peer_of_any_engine(self):
        assert ratios("stream", result()["workloads"]["stream"]) == {"pd-coordinator/mindie": (0.8, "smg/sglang")}

    def test_a_peer_that_answered_wrongly_is_no_measure(self):
        rows = result()["workloads"]["stream"]
        rows["smg/sglang"]["wrong"] = 1
        assert ratios("stream", rows)["pd-coordinator/mindie"][1] == "vllm-router/vllm"

    def test_no_peer_no_ratio(self):
        rows = {"pd-coordinator/mindie": row(8.0, cpu_us_per_event=8.0)}
        assert ratios("stream", rows) == {}

    def test_text_and_tables_hold_the_figures(self):
        for shown in (text(result()), markdown(result())["figures"]):
            assert "0.80 of smg/sglang" in shown
            assert LABELS["cpu_us_per_event"] in shown
        assert "abacus, 2 cores" in markdown(result())["machine"]
        assert "| relay | 0.36 | 1.20 |" in markdown(result())["micro"]

    def test_a_quick_run_says_so(self):
        assert "mean nothing" in markdown({**result(), "quick": True})["machine"]

    def test_before_and_after(self):
        line = before_after(result(9.5), result(8.0)).splitlines()[-1]
        assert line == "| stream | pd-coordinator/mindie | CPU µs / event | 9.5 | 8 | 0.95 | 0.80 |"

    def test_sections_are_replaced_and_the_rest_stays(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("# A\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nB\n")
        for said in ("one", "two"):
            write_sections(page, {"x": said})
        assert page.read_text() == "# A\n<!-- bench:x -->\n\ntwo\n\n<!-- /bench:x -->\nB\n"

    def test_a_page_without_the_section_stays_as_it_is(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("<!-- bench:x -->\n<!-- /bench:x -->\n")
        with pytest.raises(NoSection, match="section y"):
            write_sections(page, {"x": "1", "y": "2"})
        assert "1" not in page.read_text()

    def test_the_committed_page_has_every_section(self):
        page = routers.ROOT / "docs/performance.md"
        content = page.read_text(encoding="utf-8")
        for name in ("machine", "figures", "micro", "flame", "before-after"):
            assert content.count(f"<!-- bench:{name} -->") == content.count(f"<!-- /bench:{name} -->") == 1


class TestInstall:
    def test_where_it_goes(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PD_BENCH_HOME", str(tmp_path))
        assert routers.home() == tmp_path
        monkeypatch.delenv("PD_BENCH_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", "/c")
        assert str(routers.home()) == "/c/pd-coordinator-bench"

    def test_what_is_there_is_not_installed_again(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PD_BENCH_HOME", str(tmp_path))
        (tmp_path / "smg").mkdir()
        (tmp_path / "smg/.installed").write_text("smg==1.13.0")
        monkeypatch.setattr(subprocess, "run", lambda *args, **more: pytest.fail("something was installed"))
        assert routers.install("smg", ["smg==1.13.0"])

    def test_a_peer_that_cannot_be_installed_is_left_out(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setenv("PD_BENCH_HOME", str(tmp_path))

        def offline(command, **more):
            raise subprocess.CalledProcessError(1, command)

        monkeypatch.setattr(subprocess, "run", offline)
        found = routers.routers(["mindie", "sglang"], ["pd-coordinator", "smg"])
        assert [router.name for router in found if not router.ours] == []
        assert "mindie" in [router.flavour for router in found]
        assert "smg: left out" in capsys.readouterr().err

    def test_an_engine_that_is_not_there_is_left_out(self, monkeypatch, capsys):
        monkeypatch.setattr(routers, "ENGINES", {"mindie": None})
        found = routers.routers(["mindie", "vllm"], ["pd-coordinator"])
        assert [router.key for router in found] == ["pd-coordinator/mindie"]
        assert "pd-coordinator/vllm: left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_complete(name):
    assert all(figure in LABELS for figure in SHOWN[name])
    small = quick(WORKLOADS[name])
    assert 0 < small.concurrency < WORKLOADS[name].concurrency
    assert bool(small.requests) == bool(WORKLOADS[name].requests)
