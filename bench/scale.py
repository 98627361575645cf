"""How much more the coordinator carries with several workers.

    python -m bench.scale                            # processor time of each process, for 1 and for 2 workers
    python -m bench.scale --together 32              # the highest rate, where clients and engines cost little
    python -m bench.scale --cpus 0,1 --clients 4     # the highest rate, the coordinator on two processors of its own

Where clients and engines share the processors with the coordinator, a rate says more about them than about it. So the
first way measures, at the same load, the processor time that each process of the coordinator spends per event. On so
many cores it can carry one event in max(busiest process, sum of all / cores) of that time: no process can do more than
one core, nor all together more than all cores. The second way raises the load until no more events arrive, with
engines that send several events of a stream at once and clients that only count them, so that nearly all time of the
processors is the coordinator's. The third way does so event by event, and needs more processors than `--cpus` names.
"""

import argparse
import contextlib
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.measure import Bench, Figures, NotMeasured, bench, clients
from bench.processes import tree
from bench.routers import FLAVOURS, OURS, Router
from bench.workloads import Workload

TOKENS = 128
WRITES = 16
RAISE = 1.25
RISES = 1.03


def busy_s(pid: int) -> float:
    """Time that a process and its threads have spent on processors, in seconds (to the nanosecond)."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def work_of(streams: int, step_ms: float, together: int = 1) -> Workload:
    """Streams that are followed by others when they end, for some seconds; `step_ms` is the time of one event."""
    tokens = max(TOKENS, WRITES * together)
    rounds = max(2, round(6000 / (tokens * step_ms)))
    work = Workload(streams, streams * rounds, tokens=tokens, step_ms=step_ms * together, prefill_ms=5, stream=True)
    return replace(work, together=together, counting=together > 1)


def drive(made: Bench, work: Workload, processes: int) -> Figures:
    """Let so many client processes do the work together."""
    share = replace(work, concurrency=work.concurrency // processes, requests=work.requests // processes)
    results: list[Figures] = []
    threads = [
        threading.Thread(target=lambda: results.append(clients(made.url, share, share.requests)))
        for _ in range(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(results) < processes:
        raise NotMeasured("not all clients came to an end")
    wrong = [result["wrong"] for result in results if result["wrong"]]
    if wrong:
        raise NotMeasured(f"wrong answers: {wrong}")
    return {
        "events": sum(result["events"] for result in results),
        "events_per_s": sum(result["events_per_s"] for result in results),
    }


def costs(args: argparse.Namespace, workers: int) -> dict[str, float]:
    """Microseconds per event, of the busiest process and of all."""
    work = work_of(args.streams, args.step_ms)
    with bench(Router(OURS, args.flavour), work, workers=workers) as made:
        drive(made, replace(work, requests=work.concurrency), args.clients)  # connections and caches are warm
        before = {pid: busy_s(pid) for pid in tree(made.process.pid)}
        figures = drive(made, work, args.clients)
        spent = sorted((busy_s(pid) - was for pid, was in before.items()), reverse=True)
    per_event = [1e6 * one / figures["events"] for one in spent]
    each = ", ".join(f"{one:.2f}" for one in per_event)
    print(f"  {workers} workers at {figures['events_per_s']} events/s: {each} µs per event and process", flush=True)
    return {"busiest": per_event[0], "all": sum(per_event)}


def compare_costs(args: argparse.Namespace) -> None:
    """Print what so many cores can carry with 1 and with several workers."""
    runs: dict[int, list[dict[str, float]]] = {1: [], args.workers: []}
    for _ in range(args.rounds):
        for workers, found in runs.items():
            found.append(costs(args, workers))
    carried = {}
    for workers, found in runs.items():
        busiest = statistics.median(run["busiest"] for run in found)
        everything = statistics.median(run["all"] for run in found)
        carried[workers] = 1e6 / max(busiest, everything / args.cores)
        print(f"{workers} workers: busiest {busiest:.2f}, all {everything:.2f} µs per event: on {args.cores} cores "
              f"{carried[workers]:.0f} events/s")  # fmt: skip
    print(f"{carried[args.workers] / carried[1]:.2f} times as many events with {args.workers} workers")


@contextlib.contextmanager
def elsewhere(cpus: str) -> Iterator[None]:
    """Keep everything but the router off these processors."""
    before = os.sched_getaffinity(0)
    others = before - {int(cpu) for cpu in cpus.split(",")}
    if not others:
        raise NotMeasured(f"there are no processors but {cpus}: clients and engines need some, too")
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def highest_rate(args: argparse.Namespace, workers: int) -> float:
    """The most events per second that arrive, whatever the load: two more loads have brought no more of them."""
    best, streams, in_vain = 0.0, args.streams, 0
    router = Router(OURS, args.flavour)

    def pinned(command: list[str]) -> list[str]:
        return ["taskset", "-c", args.cpus, *command] if args.cpus else command

    while True:
        work = work_of(streams, args.step_ms, args.together)
        with bench(router, work, workers=workers, wrap=pinned) as made:
            drive(made, replace(work, requests=work.concurrency), args.clients)
            rate = float(drive(made, work, args.clients)["events_per_s"])
        offered = streams * 1e3 / args.step_ms
        print(f"  {workers} workers: {offered:.0f} events/s offered, {rate:.0f} arrive", flush=True)
        in_vain = 0 if rate > RISES * best else in_vain + 1
        best = max(best, rate)
        if in_vain == 2:
            return best
        streams = int(streams * RAISE)


def compare_rates(args: argparse.Namespace) -> None:
    """Print the highest rates with 1 and with several workers."""
    runs: dict[int, list[float]] = {1: [], args.workers: []}
    for _ in range(args.rounds):
        for workers, found in runs.items():
            found.append(highest_rate(args, workers))
    rates = {workers: statistics.median(found) for workers, found in runs.items()}
    for workers, rate in rates.items():
        print(f"{workers} workers: {rate:.0f} events/s")
    print(f"{rates[args.workers] / rates[1]:.2f} times as many events with {args.workers} workers")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--flavour", choices=FLAVOURS, default="mindie")
    add("--workers", type=int, default=2)
    add("--streams", type=int, default=400, help="at once, to begin with; default: %(default)s")
    add("--step-ms", type=float, default=10, help="from one event of a stream to the next; default: %(default)s")
    add("--rounds", type=int, default=3, help="figures are medians of so many; default: %(default)s")
    add("--cores", type=int, default=2, help="what to reckon for; default: %(default)s")
    add("--clients", type=int, default=1, help="client processes; default: %(default)s")
    add("--together", type=int, default=1, help="events that an engine sends at once; with several: the highest rate")
    add("--cpus", help="processors for the coordinator alone, as 0,1: finds the highest rate")
    args = parser.parse_args()
    try:
        if args.cpus is None and args.together == 1:
            compare_costs(args)
        else:
            with elsewhere(args.cpus) if args.cpus else contextlib.nullcontext():
                compare_rates(args)
    except NotMeasured as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
