"""Running one or many instances in this process."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import MappingProxyType
from typing import Self

from instances.microserving.instance import MicroservingEngine
from instances.mindie.instance import MindieEngine
from instances.options import Options
from instances.server import Engine, Instance
from instances.sglang.instance import SglangEngine
from instances.vllm.instance import VllmEngine


def _xllm(instance: Instance) -> Engine:
    # only this engine needs more than the base installation
    try:
        module = importlib.import_module("instances.xllm.instance")
    except ModuleNotFoundError as missing:
        raise ValueError(f"simulated xLLM instances need the package {missing.name}") from None
    engine: Engine = module.XllmEngine(instance)
    return engine


def _disaggpb(instance: Instance) -> Engine:
    # only this engine needs gRPC
    module = importlib.import_module("instances.disaggpb.instance")
    engine: Engine = module.DisaggpbEngine(instance)
    return engine


ENGINES: Mapping[str, Callable[[Instance], Engine]] = MappingProxyType(
    {
        "mindie": MindieEngine,
        "vllm": VllmEngine,
        "sglang": SglangEngine,
        "microserving": MicroservingEngine,
        "xllm": _xllm,
        "disaggpb": _disaggpb,
    }
)


def run_instance(options: Options) -> AbstractAsyncContextManager[Instance]:
    """One instance, running while the context is open. Raises ValueError for options that cannot be."""
    if options.engine not in ENGINES:
        raise ValueError(f"no simulated engine {options.engine!r}; there is: {', '.join(ENGINES)}")
    return Instance(options, ENGINES[options.engine])


class Fleet:
    """Several instances on ports of their own, started together and stopped in reverse order.

    Example:
        async with Fleet([Options(role="prefill"), Options(role="decode")]) as fleet:
            fleet.prefill[0].url
    """

    def __init__(self, options: Sequence[Options]) -> None:
        self._options = tuple(options)
        self._stack = AsyncExitStack()
        self.instances: list[Instance] = []

    async def __aenter__(self) -> Self:
        try:
            for options in self._options:
                self.instances.append(await self._stack.enter_async_context(run_instance(options)))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _with(self, role: str) -> list[Instance]:
        return [instance for instance in self.instances if instance.options.role == role]

    @property
    def prefill(self) -> list[Instance]:
        """Instances that were started as prefill."""
        return self._with("prefill")

    @property
    def decode(self) -> list[Instance]:
        """Instances that were started as decode."""
        return self._with("decode")

    @property
    def hybrid(self) -> list[Instance]:
        """Instances that were started as hybrid."""
        return self._with("hybrid")

    async def kv_empty(self, deadline_s: float = 2.0) -> bool:
        """Wait until no instance holds KV; False if one still does after `deadline_s` seconds."""
        for instance in self.instances:
            if not await instance.ledger.wait_empty(deadline_s):
                return False
        return True


def run_fleet(options: Sequence[Options]) -> Fleet:
    """Many instances; the same as `Fleet(options)`."""
    return Fleet(options)
