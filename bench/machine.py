"""What the figures were measured on."""

import os
import platform
from pathlib import Path


def describe() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python and load average."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{memory_gib:.0f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
