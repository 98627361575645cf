"""A real etcd on free ports, for tests; ends with its block."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
import urllib.request

import pytest
from held_ports import HeldPorts

BINARY = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(BINARY is None, reason="etcd is not installed (Debian: etcd-server)")
START_S = 30.0


class Etcd:
    """Starts and stops one member; its data and ports stay the same, and nobody else gets the ports before `stop`."""

    def __init__(self, folder):
        self.folder = folder
        self.ports = HeldPorts()
        self.port, self.peer_port = self.ports.take(), self.ports.take()
        self.process = None

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        url, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        self.process = subprocess.Popen(
            [BINARY, "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", url,
             "--advertise-client-urls", url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"default={peer}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
        )  # fmt: skip
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as reply:
                if b"true" in reply.read():
                    return
            time.sleep(0.05)
        raise AssertionError("etcd does not start")

    def stop(self):
        self.kill()
        self.ports.close()

    def kill(self):
        """Stop, to be started again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def started(self):
        await asyncio.to_thread(self.start)
        return self
