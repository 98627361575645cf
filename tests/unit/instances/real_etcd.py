"""A real etcd for one test module, and calls to it by its own tool."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
import urllib.request

import pytest
from held_ports import HeldPorts


class RealEtcd:
    """One member on ports of its own; its data go with it."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="etcd-")
        self.ports = HeldPorts()
        self.url, self.peer = (f"http://127.0.0.1:{self.ports.take()}" for _ in range(2))
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            ["etcd", "--name", "one", "--data-dir", self.folder, "--logger", "zap", "--log-level", "error",
             "--listen-client-urls", self.url, "--advertise-client-urls", self.url, "--listen-peer-urls", self.peer,
             "--initial-advertise-peer-urls", self.peer, "--initial-cluster", f"one={self.peer}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                if b"true" in answer.read():
                    return
            assert self.process.poll() is None, "etcd has ended"
            time.sleep(0.05)
        raise AssertionError("etcd does not come up")

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def close(self):
        self.stop()
        self.ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def ctl(self, *words):
        """Run etcdctl; gives what it prints."""
        process = await asyncio.create_subprocess_exec(
            "etcdctl", "--endpoints", self.url, *words, env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err
        return out.decode()

    async def get(self, key):
        """The value of a key; empty: there is none."""
        return (await self.ctl("get", "--print-value-only", key)).rstrip("\n")


@contextlib.contextmanager
def real_etcd():
    """A running etcd; the test is skipped where it is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    etcd = RealEtcd()
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.close()
