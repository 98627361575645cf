"""A real vLLM instance as a process of the tests, and what its own metrics tell."""

import os
import re
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from processes import HOST, Process, call, until
from prometheus_client.parser import text_string_to_metric_families

GUARD = Path(__file__).with_name("guard.py")
MODEL = "tiny"
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 32
START_S = 300.0
STOP_S = 30.0
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Books:
    """What an instance says of itself at one moment.

    Attributes:
        transfers: KV transfers that it has read from another instance.
        transferred_bytes, transferred_tokens: what came with them.
        computed_tokens: prompt tokens that it has computed itself.
        generated_tokens: output tokens.
        expired: requests whose KV nobody has fetched within the lease.
        failed: transfers or notices that went wrong.
        live: requests that run or wait.
        kv_usage: share of the KV cache that is in use or pinned.
    """

    transfers: int
    transferred_bytes: int
    transferred_tokens: int
    computed_tokens: int
    generated_tokens: int
    expired: int
    failed: int
    live: int
    kv_usage: float

    @property
    def idle(self) -> bool:
        """Neither a request nor a pinned KV block."""
        return not self.live and not self.kv_usage


def free_port() -> int:
    """A port that nobody listens at; vLLM wants a number."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


class VllmServer(Process):
    """`vllm serve` with the NIXL connector, on the CPU, with the tiny model.

    Args:
        home: what setup.sh has made.
        role: prefill or decode.
        folder: where the log is written.
        ports: HTTP and side channel; None: free ones.
    """

    def __init__(self, home: Path, role: str, folder: Path, ports: tuple[int, int] | None = None) -> None:
        self.role = role
        self.ports = ports or (free_port(), free_port())
        self.port = self.ports[0]
        self.url = f"http://{HOST}:{self.port}"
        self._home, self._folder = home, folder
        command = [str(GUARD), str(os.getpid()), "/usr/bin/env", *_environment(home, self.ports[1]), *self._command()]
        super().__init__(role, command, folder)

    def _command(self) -> list[str]:
        transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{KV_ROLES[self.role]}","kv_buffer_device":"cpu"}}'
        options = {
            "--served-model-name": MODEL,
            "--host": HOST,
            "--port": str(self.port),
            "--dtype": "float32",  # two ways to the same logits must not differ by a rounded bit
            "--max-model-len": str(CONTEXT_TOKENS),
            "--block-size": str(BLOCK_TOKENS),
            "--kv-transfer-config": transfer,
        }
        flags = [word for option in options.items() for word in option]
        python = str(self._home / "venv/bin/python")
        serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(self._home / "tiny")]
        return [*serve, *flags, "--enforce-eager", "--enable-prompt-tokens-details"]

    def wait_ready(self) -> None:
        """Wait until it answers; fails at once if it has ended."""

        def healthy() -> bool:
            assert self.running, f"{self.name} has ended:\n{self.log()[-8000:]}"
            try:
                return call(self.port, "/health")[0] == 200
            except OSError:
                return False

        until(healthy, f"{self.role} is ready, see {self.log_path}", START_S)

    def again(self) -> "VllmServer":
        """A successor at the same address, after this one has ended."""
        return VllmServer(self._home, self.role, self._folder, self.ports)

    def books(self) -> Books:
        """What its metrics say."""
        status, _, page = call(self.port, "/metrics")
        assert status == 200
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                source = sample.labels.get("source")
                name = f"{sample.name}/{source}" if source else sample.name
                sums[name.removeprefix("vllm:")] = sums.get(name.removeprefix("vllm:"), 0.0) + sample.value
        return Books(
            transfers=int(sums["nixl_xfer_time_seconds_count"]),
            transferred_bytes=int(sums["nixl_bytes_transferred_sum"]),
            transferred_tokens=int(sums.get("prompt_tokens_by_source_total/external_kv_transfer", 0)),
            computed_tokens=int(sums.get("prompt_tokens_by_source_total/local_compute", 0)),
            generated_tokens=int(sums["generation_tokens_total"]),
            expired=int(sums["nixl_num_kv_expired_reqs_total"]),
            failed=int(sums["nixl_num_failed_transfers_total"] + sums["nixl_num_failed_notifications_total"]),
            live=int(sums["num_requests_running"] + sums["num_requests_waiting"]),
            kv_usage=sums["kv_cache_usage_perc"],
        )

    def freeze(self) -> None:
        """Stop all its processes where they are; the kernel still takes connections for it."""
        os.killpg(self._group(), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        os.killpg(self._group(), signal.SIGCONT)

    def kill(self) -> None:
        """End all its processes as a power cut would."""
        if self.running:
            os.killpg(self._group(), signal.SIGKILL)
            self._popen.wait(STOP_S)

    def stop(self) -> None:
        """Have its guard end it and all that it has started."""
        if self.running:
            self.thaw()
            self.signal(signal.SIGTERM)
            self._popen.wait(STOP_S)

    def _group(self) -> int:
        found = re.search(r"guard: process group (\d+)", self.log())
        assert found, self.log()
        return int(found.group(1))


def _environment(home: Path, side_channel_port: int) -> list[str]:
    return [
        "HF_HUB_OFFLINE=1",
        "VLLM_NO_USAGE_STATS=1",
        "VLLM_CPU_KVCACHE_SPACE=1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND=nobind",
        "OMP_NUM_THREADS=1",  # several instances share few cores
        "TORCHDYNAMO_DISABLE=1",  # compiling would take longer than all requests together
        f"VLLM_CACHE_ROOT={home / 'cache'}",
        f"VLLM_NIXL_SIDE_CHANNEL_HOST={HOST}",
        f"VLLM_NIXL_SIDE_CHANNEL_PORT={side_channel_port}",
    ]
