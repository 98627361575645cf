"""Soak: a simulated cluster and a coordinator under faults for a long time, and what must hold all the same.

    python bench/soak.py --minutes 10 --streams 200

Starts two prefill and two decode instances and the coordinator, each as a process, keeps requests alive in all
dialects, lets clients leave in every phase, lets instances fail in many ways, and kills and restarts one of them every
minute.
Every five seconds it looks at memory, file descriptors and gauges. In the end it demands:

- memory that does not grow after the warm-up;
- no answer that looks whole and is not, and none that hangs;
- all gauges back at zero, all KV given back, all connections closed that are not needed any more (idle ones to engines
  are kept for a minute), no traceback in any log, exit status 0.

Exit status: 0 all held, 1 something did not, 2 it could not run. Loopback only, free ports, ends by itself.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from soak_clients import Clients
from soak_cluster import DOWN_S, CannotRun, Cluster, Process, settled

SAMPLE_S = 5.0
KILL_S = 60.0
SETTLE_S = 20.0
FILES_BACK_S = 100.0  # idle connections to engines live for 60 to 75 s
SPARE_FILES = 16  # more than at the start, when nobody had asked yet
WARM_UP = 0.25  # share of the samples that the growth of memory is not judged by
GROWTH_SHARE, GROWTH_MIB = 0.05, 4.0  # both must be exceeded
LEAST_WHOLE = 1 / 3


# --- the run


async def sample(cluster: Cluster, coordinator: Process, samples: list[dict[str, float]], began_s: float) -> None:
    """Look at the coordinator every five seconds."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        gauges = await asyncio.to_thread(cluster.gauges)
        now = {"at_s": time.monotonic() - began_s, "memory_mib": coordinator.memory_mib(), "files": coordinator.files()}
        samples.append({**now, **gauges})
        shown = ", ".join(f"{name} {value:.0f}" for name, value in samples[-1].items())
        print(shown, flush=True)


async def disturb(cluster: Cluster, every_s: float, seed: int) -> None:
    """Kill one instance after the other, any of them, one at a time."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(every_s - DOWN_S)
        await cluster.replace(chance.randrange(len(cluster.instances)))


async def soak(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Run it; returns the summary."""
    coordinator = await cluster.start()
    began_s, seconds = time.monotonic(), args.minutes * 60
    idle_files = coordinator.files()
    samples: list[dict[str, float]] = []
    clients = Clients(cluster.port, args.streams, args.seed, args.leaving)
    helpers = {
        asyncio.create_task(sample(cluster, coordinator, samples, began_s), name="sampler"),
        asyncio.create_task(disturb(cluster, min(KILL_S, seconds / 4), args.seed), name="killer"),
    }
    done, _ = await asyncio.wait(helpers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for helper in helpers - done:
        helper.cancel()
    results = await asyncio.gather(*helpers, return_exceptions=True)
    failures = [repr(result) for result in results if not isinstance(result, asyncio.CancelledError)]
    await cluster.revive()
    await clients.stop()
    zero = await settled(lambda: not any(cluster.gauges().values()), SETTLE_S)
    kv_free = await settled(lambda: not cluster.kv_blocks(), SETTLE_S)
    files_back = await settled(lambda: coordinator.files() <= idle_files + SPARE_FILES, FILES_BACK_S)
    return {
        "seconds": round(time.monotonic() - began_s),
        "requests": clients.outcomes.total(),
        "outcomes": dict(clients.outcomes.most_common()),
        "wrong": clients.wrong[:10],
        "memory": memory_of(samples),
        "files": {"idle": idle_files, "end": coordinator.files(), "back": files_back},
        "gauges": cluster.gauges(),
        "gauges_zero": zero,
        "kv_free": kv_free,
        "kv_blocks": cluster.kv_blocks(),
        "kv_held": cluster.kv_held(),
        "helpers_failed": failures,
        "exit_statuses": await cluster.stop(),
        "bad_words": cluster.bad_words(),
        "samples": samples,
    }


def memory_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """Growth after the warm-up: by a straight line through all, and from the first third to the last."""
    judged = samples[int(len(samples) * WARM_UP) :]
    third = len(judged) // 3
    if not third:
        return {}
    memory = [row["memory_mib"] for row in judged]
    times = [row["at_s"] for row in judged]
    middle_s, mean = sum(times) / len(times), sum(memory) / len(memory)
    spread = sum((at - middle_s) ** 2 for at in times)
    slope = sum((at - middle_s) * (mib - mean) for at, mib in zip(times, memory, strict=True)) / spread
    first, last = sum(memory[:third]) / third, sum(memory[-third:]) / third
    return {
        "first_third_mib": first, "last_third_mib": last, "most_mib": max(memory), "slope_mib_per_hour": slope * 3600,
        "fitted_growth_mib": slope * (times[-1] - times[0]), "growth_mib": last - first,
    }  # fmt: skip


def violations(summary: dict[str, Any]) -> list[str]:
    """What did not hold, in plain words."""
    memory, outcomes = summary["memory"], summary["outcomes"]
    found = [f"the {words}" for words in summary["bad_words"]]
    allowed = max(GROWTH_MIB, GROWTH_SHARE * memory.get("first_third_mib", 0))
    if min(memory.get("growth_mib", 0), memory.get("fitted_growth_mib", 0)) > allowed:
        found.append(f"memory grew by {memory['growth_mib']:.1f} MiB, {memory['slope_mib_per_hour']:.0f} MiB an hour")
    if not memory:
        found.append("too few samples to judge memory by")
    found += [f"{outcomes[word]} answers: {word}" for word in ("wrong", "hung", "500") if outcomes.get(word)]
    if outcomes.get("whole", 0) < summary["requests"] * LEAST_WHOLE:
        found.append("fewer than a third of the answers were whole")
    for key, words in (("gauges_zero", "gauges are not at zero"), ("kv_free", "KV was not given back")):
        if not summary[key]:
            found.append(f"{words}: {summary['gauges' if key == 'gauges_zero' else 'kv_blocks']}")
    if not summary["files"]["back"]:
        found.append(f"file descriptors stay open: {summary['files']}")
    found += [f"{name} ended with {status}" for name, status in summary["exit_statuses"].items()]
    return found + [f"the tool itself failed: {failure}" for failure in summary["helpers_failed"]]


async def run(args: argparse.Namespace, folder: Path) -> int:
    """Run and report, in bounded time; returns the exit status."""
    cluster = Cluster(folder)
    try:
        async with asyncio.timeout(args.minutes * 60 + 300):
            summary = await soak(args, cluster)
    except (CannotRun, TimeoutError) as failure:
        print(f"cannot run: {failure}" if str(failure) else "it did not end in time", file=sys.stderr)
        return 2 if isinstance(failure, CannotRun) else 1
    finally:
        cluster.kill()
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1))
    print(json.dumps({key: value for key, value in summary.items() if key != "samples"}, indent=1))
    found = violations(summary)
    print("\n".join(f"VIOLATED: {words}" for words in found) or "all held")
    return 1 if found else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="A simulated cluster under faults for a long time.")
    add = parser.add_argument
    add("--minutes", type=float, default=10)
    add("--streams", type=int, default=200, help="requests alive at the same time")
    add("--leaving", type=float, default=0.2, help="share of requests whose client leaves early")
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="write the summary with all samples")
    add("--logs", type=Path, metavar="FOLDER", help="keep the logs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return uvloop.run(run(args, folder))


if __name__ == "__main__":
    sys.exit(main())
