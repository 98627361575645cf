"""`pd-coordinator top` as a process: on a terminal, and for scripts."""

import asyncio
import json
import os
import re
import signal
import sys

import pytest
from engine_world import until
from live_world import BusySight
from terminal_screen import TerminalProcess

from coordinator.security.keys import Key, new_hash, split_hash

TOP = (sys.executable, "-m", "coordinator", "top")
KEY = "the-key-of-ops-1"
FRAME = "\x1b[?2026h"  # begins one


async def run(*arguments, env=None):
    """Status, output, complaints."""
    environment = {**os.environ, "COLUMNS": "120", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *TOP, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, told = await process.communicate()
    return process.returncode, out.decode(), told.decode()


class TestScreen:
    async def test_figures_instances_and_leaving(self, site):
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"^pd-coordinator  1\.2\.3  qwen3-32b  2 workers .*live \d\d:\d\d:\d\d$")
            await top.sees(r"requests/s +\d")
            await top.sees(r"^d7 +decode +· ready")
            before = await top.sees(r"requests/s +([\d.]+)")
            await top.sees(rf"requests/s +(?!{re.escape(before.group(1))} )[\d.]+")
            assert {1049} <= top.screen.modes
            assert 25 not in top.screen.modes, "the cursor is hidden"
            assert not top.screen.outside
            assert top.screen.unknown == []
            top.press("q")
            assert await top.end() == (0, "")
            assert top.screen.modes & {1049, 25} == {25}
            assert top.modes == top.before

    async def test_only_what_changes_is_written(self, site):
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"requests/s +\d")
            frames = top.raw.count(FRAME)  # the last of them may be the first one with instances
            await until(lambda: top.raw.count(FRAME) > frames)
            assert top.raw.count("\x1b[2J") <= 2, "the screen is cleared once, and never between frames"
            frame = top.raw.rpartition(FRAME)[2]
            assert "qwen3-32b  2 workers" in top.screen.text
            assert "INSTANCE" not in frame, "lines that stay are not written again"

    async def test_keys(self, site):
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"s sort \(id\)")
            top.press("ss")
            await top.sees(r"IN FLIGHT v")
            top.press("r")
            await top.sees(r"IN FLIGHT \^")
            top.press("/d3\r")
            await top.sees(r"filter \(d3\)")
            await top.sees(r"1-1 of 1\b")
            assert "p0 " not in top.screen.text.partition("LAST")[0].partition("INSTANCE")[2]
            top.press("\x1b")
            await top.sees(r"-12 of 12")
            top.press("n")
            await top.sees(r"(?s)\A(?!.*LAST FAILURES)")

    async def test_another_size(self, site):
        async with TerminalProcess(*TOP, "--url", site.url, columns=100, lines=30) as top:
            await top.sees(r"requests/s +\d")
            for columns, lines in ((60, 12), (180, 50)):
                top.resize(columns, lines)
                await top.sees(r"pd-coord")
                await top.sees(rf"(?s)\A([^\n]*\n){{{lines - 1}}}q quit")
                assert not top.screen.outside

    async def test_the_feed_is_lost_and_comes_back(self, site):
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"live \d")
            await site.stop()
            await top.sees(r"LOST, (the feed has ended|the coordinator cannot be reached); from \d")
            assert "d7 " in top.screen.text, "what was known stays"
            await site.start()
            await top.sees(r"live \d")

    async def test_nobody_is_there_yet(self):
        async with TerminalProcess(*TOP, "--url", "http://127.0.0.1:1") as top:
            await top.sees(r"LOST, the coordinator cannot be reached")
            top.press("\x03")
            assert await top.end() == (0, "")

    async def test_without_a_key_it_ends_with_a_sentence(self, site):
        site.keys = [Key(0, "ops", split_hash(new_hash(KEY))[1])]
        await site.stop()
        await site.start()
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            status, told = await top.end()
            assert status == 1
            assert told == f"top: a management key is needed ({site.url})\n"
            assert top.modes == top.before

    async def test_a_signal_leaves_the_terminal_as_it_was(self, site):
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"live \d")
            top.process.send_signal(signal.SIGTERM)
            assert await top.end() == (0, "")
            assert top.modes == top.before

    async def test_a_thousand_instances(self, site):
        site.sight = BusySight(400, 600, rate=5, failing=0)
        await site.stop()
        await site.start()
        async with TerminalProcess(*TOP, "--url", site.url) as top:
            await top.sees(r"of 1000")
            await top.sees(r"requests/s +\d")  # no more lines come above the table
            top.press("\x1b[F")
            await top.sees(r"^d599 ")


class TestOnce:
    async def test_a_frame(self, site):
        status, out, told = await run("--url", site.url, "--once", "--sort", "blocks")
        assert (status, told) == (0, "")
        assert "BLOCKS v" in out
        assert "\x1b" not in out
        assert re.search(r"requests/s +[\d.]+ ", out)
        assert max(map(len, out.splitlines())) <= 120

    async def test_json(self, site):
        status, out, _ = await run("--url", site.url, "--once", "--json")
        assert status == 0
        found = json.loads(out)
        assert found["figures"]["moving"]["requests_s"] > 0
        assert {one["id"] for one in found["instances"]} == {*site.sight.names["prefill"], *site.sight.names["decode"]}
        assert found["paths"][0]["prefill"].startswith("p")

    async def test_json_each_second(self, site):
        process = await asyncio.create_subprocess_exec(
            *TOP, "--url", site.url, "--json", stdout=asyncio.subprocess.PIPE, limit=1 << 20
        )
        async with asyncio.timeout(60):
            assert process.stdout is not None
            lines = [json.loads(await process.stdout.readline()) for _ in range(3)]
            assert lines[0]["at_s"] <= lines[1]["at_s"] <= lines[2]["at_s"]
            assert len({line["paths"][0]["id"] for line in lines}) == 3
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130

    async def test_a_pipe_that_closes(self, site):
        words = " ".join(TOP)
        process = await asyncio.create_subprocess_shell(
            f"{words} --url {site.url} --json | head -1 | wc -l", stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            out, told = await process.communicate()
        assert (out.strip(), told) == (b"1", b"")

    async def test_keys(self, site, tmp_path):
        site.keys = [Key(0, "ops", split_hash(new_hash(KEY))[1])]
        await site.stop()
        await site.start()
        file = tmp_path / "key"
        file.write_text(f"{KEY}\nmore\n")
        once = ("--url", site.url, "--once")
        assert (await run(*once, "--key-file", str(file)))[0] == 0
        assert (await run(*once, env={"PD_COORDINATOR_KEY": KEY}))[0] == 0
        status, _, told = await run(*once, env={"PD_COORDINATOR_KEY": "not-the-key-of-ops-1"})
        assert (status, told) == (1, f"top: the management key is not accepted ({site.url})\n")

    @pytest.mark.parametrize(
        ("arguments", "status", "sentence"),
        [
            (["--once", "--url", "http://127.0.0.1:1"], 1, "the coordinator cannot be reached"),
            (["--once", "--url", "localhost"], 2, "must begin with http"),
            (["--key-file", "/no/such/file"], 2, "No such file"),
            (["--once", "--url", "https://127.0.0.1:1", "--ca-file", "/no/such/file"], 2, "No such file"),
            ([], 2, "this is no terminal"),
        ],
    )
    async def test_what_cannot_be(self, arguments, status, sentence):
        found, out, told = await run(*arguments)
        assert (found, out) == (status, "")
        assert told.startswith("top: ")
        assert sentence in told
        assert len(told.splitlines()) == 1
