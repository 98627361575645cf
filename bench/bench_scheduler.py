"""What one scheduling decision costs: place, prefilled, decoding, end.

    python bench/bench_scheduler.py [--seconds 1] [--live 10000]

Prints microseconds per decision for growing clusters, with so many requests live all the time.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Iterator

from coordinator.core.instance import Address, Capacity, Instance, Role
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.policies import Policies, load_policy
from coordinator.scheduler import Scheduler

POLICIES = {
    "round_robin": ("round_robin", {}),
    "load_balance": ("load_balance", {}),
    "load_balance, per request": ("load_balance", {"sequence_cost": 1}),
}


def cluster(size: int, groups: int) -> Iterator[Instance]:
    """So many prefill and decode instances, spread over groups."""
    for number in range(size):
        for role, port in ((Role.PREFILL, 1000), (Role.DECODE, 5000)):
            yield Instance(
                id=f"{role}{number}",
                role=role,
                address=Address("10.0.0.1", port + number),
                engine="mindie",
                group=str(number % groups),
                capacity=Capacity(max_requests=5000, total_blocks=1_000_000),
            )


def requests(count: int) -> list[Request]:
    """Requests of very different length."""
    deadlines = Deadlines(scheduled_s=1e9, first_token_s=1e9, finished_s=1e9, inter_token_s=60)
    return [
        Request(
            id=str(number),
            api="openai",
            path="/v1/chat/completions",
            query="",
            headers=(),
            body=b"",
            ask=Ask(stream=True, model="m", prompt_bytes=random.Random(number).randrange(100, 100_000)),
            arrived_s=0.0,
            deadlines=deadlines,
        )
        for number in range(count)
    ]


def measure(policy: str, options: dict[str, object], size: int, groups: int, args: argparse.Namespace) -> float:
    """Microseconds per request."""
    made = Policies(load_policy(policy, options), load_policy(policy, options))
    scheduler = Scheduler(made, max_queue=0)
    scheduler.on_view(ClusterView(1, ready=tuple(cluster(size, groups))))
    sample = requests(997)
    live: deque = deque()
    for number in range(args.live):
        live.append(scheduler.try_place(sample[number % len(sample)]))
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        for request in sample[:100]:
            lease = scheduler.try_place(request)
            lease.prefilled(0.0)
            lease.decoding(0.0)
            live.append(lease)
            live.popleft().end()
        done += 100
    spent = time.perf_counter() - start
    for lease in live:
        lease.end()
    assert not any(load.requests or load.pinned for _, load in scheduler.loads())
    return spent / done * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    parser.add_argument("--live", type=int, default=10_000, help="requests live all the time")
    args = parser.parse_args()
    print(f"{'policy':28}{'instances per role':>20}{'groups':>8}{'us per request':>16}")
    for name, (policy, options) in POLICIES.items():
        for size, groups in ((10, 1), (200, 1), (1000, 1), (1000, 100)):
            if "per request" in name and (size > 200 or groups > 1):
                continue
            cost = measure(policy, options, size, groups, args)
            print(f"{name:28}{size:>20}{groups:>8}{cost:>16.1f}")


if __name__ == "__main__":
    main()
