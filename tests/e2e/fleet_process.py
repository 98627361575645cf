"""Simulated instances in one process: options as a JSON list in, their URLs out, until SIGTERM."""

import asyncio
import json
import signal
import sys

import uvloop

from instances.options import Options
from instances.run import run_fleet
from instances.timing import Timing


async def serve(given: list[dict[str, object]]) -> None:
    """Run them all."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = [Options(**{**one, "timing": Timing(**one.get("timing", {}))}) for one in given]
    async with run_fleet(options) as fleet:
        print("READY", json.dumps([instance.url for instance in fleet.instances]))
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1])))
