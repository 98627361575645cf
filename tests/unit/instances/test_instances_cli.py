import argparse
import asyncio
import re
import signal
import sys

import pytest

from instances.cli import add_arguments, main, read_options

ENTRY = """
import argparse, sys
from instances.cli import add_arguments, main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""


def parsed(*args):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


def test_arguments_become_options():
    args = parsed(
        "--role", "prefill", "--port", "0", "--decode-ms", "7", "--prefill-ms-per-token", "0.5", "--speed", "2"
    )
    options = read_options(args)
    assert (options.engine, options.role, options.port) == ("mindie", "prefill", 0)
    assert (options.timing.decode_ms, options.timing.prefill_token_ms, options.timing.speed) == (7, 0.5, 2)
    more = parsed(
        *("--role", "decode", "--port", "0", "--answer-tokens", "5", "--fault", "hang", "--fault", "#1:reset"),
        *("--set", "heartbeat_s=0.5"),
    )
    options = read_options(more)
    assert (options.answer_tokens, options.faults) == ((5, 5), ("hang", "#1:reset"))
    assert options.settings == {"heartbeat_s": "0.5"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--answer-tokens", "9-5"), "--answer-tokens wants"),
        (("--answer-tokens", "few"), "--answer-tokens wants"),
        (("--set", "heartbeat_s"), "--set wants KEY=VALUE"),
        (("--set", "heartbeet_s=1"), "no setting 'heartbeet_s'"),
        (("--fault", "hnag"), "did you mean 'hang'"),
    ],
)
def test_wrong_arguments_give_exit_code_two(args, says, capsys):
    assert main(parsed("--role", "decode", "--port", "0", *args)) == 2
    assert says in capsys.readouterr().err


async def test_a_port_in_use_gives_exit_code_one():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(20):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENTRY, "--role", "decode", "--port", str(port)), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
    server.close()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err.decode()


async def test_a_prefill_of_sglang_says_its_bootstrap_port():
    async with asyncio.timeout(20):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENTRY, "--engine", "sglang", "--role", "prefill", "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
        )
        line = (await process.stdout.readline()).decode()
        process.terminate()
        assert await process.wait() == 0
    wanted = r"sglang prefill instance prefill-\d+, bootstrap port \d+, at http://127\.0\.0\.1:\d+\n"
    assert re.fullmatch(wanted, line)


async def test_it_says_where_it_is_and_ends_with_sigterm():
    async with asyncio.timeout(20):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENTRY, "--role", "decode", "--port", "0"), stdout=asyncio.subprocess.PIPE
        )
        line = (await process.stdout.readline()).decode()
        assert line.startswith("mindie decode instance decode-")
        port = int(line.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /dresult HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert await reader.read() == b"0\r\n\r\n"
        writer.close()
