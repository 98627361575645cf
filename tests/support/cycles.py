"""Looks for what only the garbage collector would free: the process lets it look seldom (see docs/adr/0014)."""

import collections
import contextlib
import gc
from pathlib import Path
from types import FrameType, FunctionType

import coordinator

OURS = str(Path(coordinator.__file__).parent)


@contextlib.contextmanager
def quick_looks():
    """What there is now is not looked through again, so that many looks cost little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def left_to_the_collector():
    """Yields a counter that tells at the end which of the coordinator's objects and frames were unreachable, yet there.

    Whatever is made once, at the first request, is to be made before.
    """
    found = collections.Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(name for thing in gc.garbage if (name := _name(thing)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name(thing):
    """What to call an object of ours; nothing for others."""
    if isinstance(thing, FrameType):
        code = thing.f_code
        return f"frame {code.co_qualname}:{thing.f_lineno}" if code.co_filename.startswith(OURS) else ""
    named = thing if isinstance(thing, FunctionType) else type(thing)
    module = named.__module__ or ""  # compiled functions have none
    return f"{module}.{named.__qualname__}" if module.startswith("coordinator.") else ""
