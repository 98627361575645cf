"""An engine that is always well, and a notebook for what sources tell."""

import asyncio


class Engine:
    """An engine protocol that takes any keys and whose instances are always well."""

    def options(self, given):
        return dict(given)

    def attach(self, instance, watcher):
        watcher.linked()

    async def detach(self, instance):
        pass

    async def probe(self, instance):
        return None


def validate(engine, given):
    """Keys of an engine, as they are; `bad` is none."""
    if "bad" in given:
        raise ValueError("bad: this engine has no such key")
    return given


class Notebook:
    """Takes what a source tells (source.Report), and waits for it."""

    def __init__(self):
        self.instances = None
        self.faults = {}
        self.trouble = "not looked yet"
        self.told = 0
        self._changed = asyncio.Event()

    def found(self, instances, faults, trouble="", *, incomplete=False):
        self.instances, self.faults, self.trouble = list(instances), dict(faults), trouble
        self.incomplete = incomplete
        self._note()

    def lost(self, reason):
        self.trouble = reason
        self._note()

    def _note(self):
        self.told += 1
        self._changed.set()

    @property
    def urls(self):
        return sorted(one.url for one in self.instances or ())

    @property
    def ids(self):
        return sorted(one.id for one in self.instances or ())

    async def until(self, check, within_s=20.0):
        """Wait until what is known fits."""
        async with asyncio.timeout(within_s):
            while not check(self):
                self._changed.clear()
                await self._changed.wait()
