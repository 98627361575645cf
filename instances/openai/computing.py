"""How an engine that computes a prompt by itself takes blocks and prefills, whichever engine it plays."""

import asyncio
import time
from typing import Protocol

from instances.ledger import OutOfBlocks
from instances.openai.ask import Choice, Job
from instances.openai.meters import Meters
from instances.openai.refusal import Refused
from instances.server import Instance


class Computer(Protocol):
    """The engine whose instance does the work."""

    instance: Instance
    meters: Meters


class Computing:
    """One request whose KV is computed here.

    Attributes:
        kind: what the ledger calls its blocks.
    """

    kind = "computing"
    engine: Computer
    instance: Instance
    job: Job

    async def prepare(self) -> None:
        """Take blocks and compute, one sequence after the other; raises Refused."""
        for choice in self.job.choices:
            await self.take_blocks(choice)
            await self.compute(choice)

    async def take_blocks(self, choice: Choice) -> None:
        """Blocks for prompt and answer; waits while there are too few. Raises Refused."""
        try:
            await self.instance.ledger.wait_allocate(choice.key, choice.kv_tokens, self.kind)
        except OutOfBlocks as never:
            raise Refused(400, str(never)) from None

    async def compute(self, choice: Choice) -> None:
        """Prefill."""
        choice.cached_tokens = self.instance.prefix.lookup(choice.prompt.tokens)
        uncached = len(choice.prompt.tokens) - choice.cached_tokens
        wait_s = self.instance.clockwork.prefill_wait_s(uncached, time.monotonic())
        if wait_s:
            await asyncio.sleep(wait_s)
        self.engine.meters.computed(choice)
