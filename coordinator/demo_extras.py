"""What a demo needs of an engine besides instances on free ports."""

import asyncio
import contextlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HOST = "127.0.0.1"
WRITE_S = 30.0
PREFIX_BLOCKS = "1000"
TOLD = {"bootstrap_port": r"bootstrap port (\d+)", "recv_rank": r"recv_rank (\d+)"}
"""What instances say of themselves when they start, by the key of their entry in the configuration."""


def told_keys(line: str, _number: int) -> dict[str, object]:
    """The keys that the line holds in which an instance says where it is."""
    told = ((key, re.search(words, line)) for key, words in TOLD.items())
    return {key: int(found.group(1)) for key, found in told if found}


@dataclass(frozen=True, slots=True)
class Extras:
    """What one engine needs.

    Attributes:
        arguments: for every simulated instance.
        cluster: keys of the section `cluster`.
        engine: settings of the engine protocol.
        keys: what an instance's entry needs besides the URL, from its first line and its number.
    """

    arguments: tuple[str, ...] = ()
    cluster: Mapping[str, object] = field(default_factory=dict)
    engine: Mapping[str, object] = field(default_factory=dict)
    keys: Callable[[str, int], dict[str, object]] = told_keys


async def extras_of(engine: str, stack: contextlib.AsyncExitStack) -> Extras:
    """What the demo of an engine needs; files of it are removed with `stack`.

    Raises:
        RuntimeError: it cannot be had, in a sentence.
    """
    if engine == "microserving":
        return Extras(arguments=("--set", f"world=demo-{os.getpid()}"))
    if engine == "disaggpb":
        folder = await _tokenizer_folder(engine, stack)
        return Extras(arguments=("--max-message-bytes", "-1"), cluster={"tokenizer": folder})
    if engine == "xllm":
        folder = await _tokenizer_folder(engine, stack)
        port = _reserved_port(stack)
        return Extras(
            # without prefix caches, decode instances refuse requests for several choices, and prefill asks for ever
            arguments=("--service", f"{HOST}:{port}", "--prefix-blocks", PREFIX_BLOCKS),
            cluster={"tokenizer": folder},
            engine={"rpc_port": port},
            keys=_xllm_keys,
        )
    return Extras()


def _xllm_keys(line: str, number: int) -> dict[str, object]:
    found = re.search(r"pd_port (\d+)", line)
    address = {"rpc_address": f"{HOST}:{found.group(1)}"} if found else {}
    return {**address, "cluster_ids": [number + 1], "addrs": [HOST], "ports": [1]}


async def _tokenizer_folder(engine: str, stack: contextlib.AsyncExitStack) -> str:
    """The tokenizer of an engine's simulated instances, which is removed with `stack`."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-coordinator-demo-"))
    command = [sys.executable, "-m", "coordinator", "instance", "--engine", engine, "--role", "prefill", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--write-tokenizer", folder,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WRITE_S):
        _, said = await process.communicate()
    if process.returncode:
        words = said.decode("utf-8", "replace").strip().splitlines()
        raise RuntimeError(f"the tokenizer cannot be written: {words[-1] if words else 'no word'}")
    return folder


def _reserved_port(stack: contextlib.AsyncExitStack) -> int:
    """A port for instances to call, which must be known before they start.

    It stays bound until `stack` ends, so that the system gives it to nobody else; who listens on it may do so.
    """
    reserved = stack.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return int(reserved.getsockname()[1])
