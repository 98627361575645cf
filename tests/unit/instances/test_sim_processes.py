"""Instances as commands, in processes of their own, each on uvloop."""

import argparse
import asyncio
import json
import re
import sys
import uuid
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from disaggpb_client import PROMPT, decoded, ids_of, kv_of
from microserving_client import PREP, SEND, body_of, expected, generate
from openai_client import get, post

from instances.cli import add_arguments

ENTRY = """
import argparse, sys
from instances.cli import add_arguments, main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""
TOLD = re.compile(r"(\w+) (\w+) instance \w+-\d+(?:, recv_rank (\d+),)? at http://127\.0\.0\.1:(\d+)\n")


@asynccontextmanager
async def command(engine, role, *more):
    """A running command: host and port, and the rank that it told."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENTRY, "--engine", engine, "--role", role, "--port", "0", "--speed", "0", *more),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            found = TOLD.fullmatch((await process.stdout.readline()).decode())
        assert (found[1], found[2]) == (engine, role)
        yield SimpleNamespace(host="127.0.0.1", port=int(found[4]), rank=found[3])
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_mlc_engines_find_each_other_by_rank():
    world = ("--world", uuid.uuid4().hex)
    async with (
        command("microserving", "prefill", *world, "--pe-start", "0", "--num-gpus", "2") as prefill,
        command("microserving", "decode", *world, "--set", "pe_start=2") as decode,
    ):
        assert (prefill.rank, decode.rank) == ("0", "2")
        told = (await post(decode, PREP, {**body_of("r1"), "end": -1})).json
        window = {"begin": 0, "end": -1, "kv_addr_info": told["kv_append_metadata"], "recv_rank": 2}
        assert (await post(prefill, SEND, {**body_of("r1"), **window})).json == {}
        assert (await generate(decode, "r1")).json["choices"] == (await expected())["choices"]
        kv = (await get(decode, "/sim/state")).json["kv"]
        assert (kv["allocated"], kv["pinned"], kv["released_requests"]) == (0, 0, 1)


async def test_disaggpb_workers():
    shape = ("--layers", "3", "--kv-heads", "1", "--head-dim", "4")
    async with (
        command("disaggpb", "prefill", *shape) as prefill,
        command("disaggpb", "decode", *shape, "--max-message-bytes", "-1", "--health") as decode,
    ):
        kv = await kv_of(prefill)
        assert (len(kv), len(kv[0].k_data)) == (3, len(PROMPT) * 8)
        got, _, _ = await decoded(decode, kv)
        assert (len(got), got[-1].finish_reason, ids_of(got)[-1]) == (10, "stop", 2)
        assert (await get(decode, "/sim/state")).json["wrong_kv"] == {}


def test_the_tokenizer_folder_is_that_of_the_engine(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for engine, end in (("disaggpb", 2), ("xllm", 0)):
        folder = tmp_path / engine
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--engine", engine, "--write-tokenizer", str(folder)])
        assert ended.value.code == 0
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == end
