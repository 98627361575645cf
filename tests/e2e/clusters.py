"""Clusters of real processes on free ports of the loopback interface."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dialects import MODEL
from held_ports import HeldPorts
from processes import Coordinator, Fleet, InstanceProcess, Process, Simulator, until

P = TypeVar("P", bound=Process)
FAST = {"prefill_ms": 3.0, "decode_ms": 3.0, "prefill_lanes": 4}
# what is gone refuses connections at once; what only stands still for a while is not gone
QUICK_HEALTH = {"interval_s": 0.1, "timeout_s": 10, "fail_after": 2, "recover_after": 1}
ALIASES = ["dummy", "tgi", "http://127.0.0.1:1025"]


@dataclass
class Cluster:
    """Simulated instances and the coordinator in front of them."""

    coordinator: Coordinator
    instances: list[Simulator]
    config: dict[str, Any]

    @property
    def port(self) -> int:
        """Data port."""
        return self.coordinator.port

    def of(self, role: str) -> list[Simulator]:
        """The instances of a role."""
        return [instance for instance in self.instances if instance.role == role]

    @property
    def decode(self) -> Simulator:
        """The only decode instance, or the first one."""
        return self.of("decode")[0]

    @property
    def prefill(self) -> Simulator:
        """The only prefill instance, or the first one."""
        return self.of("prefill")[0]

    def go_on(self) -> None:
        """Streams that are HELD run to their ends."""
        for instance in self.of("decode"):
            instance.act("go_on")

    def kv_blocks(self) -> list[int]:
        """KV blocks held, by instance."""
        return [instance.kv_blocks() for instance in self.instances]

    def wait_handed_over(self, within_s: float = 15.0) -> None:
        """Wait until decode has fetched all KV: before, both sides are told of a client that leaves, in any order."""
        until(lambda: not any(one.kv_blocks() for one in self.of("prefill")), "decode has the KV", within_s)

    def wait_kv_free(self, within_s: float = 15.0) -> None:
        """Wait until no instance holds KV: it hears of an end from a connection of its own."""
        until(lambda: not any(self.kv_blocks()), f"KV given back: {self.kv_blocks()}", within_s)

    def wait_idle(self, within_s: float = 15.0) -> None:
        """Wait until neither the gauges nor the instances' own books show work."""
        self.coordinator.wait_idle(within_s)
        self.wait_kv_free(within_s)


def cluster_config(instances: list[Simulator], changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration for these instances, ids p0, p1, ..., d0, ...

    `changes` replace keys section by section; `each` holds keys for every instance.
    """
    rows: list[dict[str, Any]] = []
    for instance in instances:
        number = sum(row["role"] == instance.role for row in rows)
        row = {"id": f"{instance.role[0]}{number}", "role": instance.role, "url": instance.url}
        rows.append(row | changes.get("each", {}))
    config: dict[str, Any] = {
        "server": {"port": 0, "management_port": 0, "route_headers": True},
        "cluster": {"engine": "mindie", "model": MODEL, "model_aliases": ALIASES, "instances": rows},
        "limits": {"max_requests": 1000},
        "timeouts": {"drain_s": 5},
        "health": QUICK_HEALTH,
    }
    for section in changes.keys() - {"each"}:
        config[section] = {**config.get(section, {}), **changes[section]}
    return config


class Starter:
    """Starts processes and stops them at the end of the test, the last one first; each must end well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []
        self._ports = HeldPorts()  # of processes that may come back at their address

    def fleet(self, options: list[dict[str, Any]]) -> Fleet:
        """Instances in one process."""
        return self._own(Fleet([{"timing": FAST, **one} for one in options], self._folder))

    def instance(self, role: str, *arguments: str) -> InstanceProcess:
        """An instance in a process of its own."""
        return self._own(InstanceProcess(role, arguments, self._folder, self._ports.take()))

    def again(self, ended: InstanceProcess) -> InstanceProcess:
        """A successor at the same address."""
        return self._own(ended.again())

    def coordinator(self, config: dict[str, Any]) -> Coordinator:
        """A coordinator; it may not be ready yet."""
        return self._own(Coordinator(config, self._folder))

    def command(self, *arguments: str) -> Process:
        """Any other `pd-coordinator` command."""
        return self._own(Process(arguments[0], ["-m", "coordinator", *arguments], self._folder))

    def cluster(self, prefill: int = 1, decode: int = 1, *, timing: object = FAST, **changes: Any) -> Cluster:
        """A ready cluster; `changes` are sections of the configuration, `each` keys of every instance."""
        options = [{"role": "prefill", "timing": timing}] * prefill + [{"role": "decode", "timing": timing}] * decode
        return self.in_front_of(list(self.fleet(options).instances), **changes)

    def in_front_of(self, instances: list[Simulator], **changes: Any) -> Cluster:
        """A ready coordinator for instances that run; `changes` as above."""
        config = cluster_config(instances, changes)
        coordinator = self.coordinator(config)
        coordinator.wait_ready()
        return Cluster(coordinator, instances, config)

    def _own(self, process: P) -> P:
        self._started.append(process)
        return process

    def close(self) -> None:
        """Stop everything; then raise what went wrong first."""
        try:
            with ExitStack() as stack:
                for process in self._started:
                    stack.callback(process.stop)
        finally:
            for process in self._started:
                process.kill()
            self._ports.close()
