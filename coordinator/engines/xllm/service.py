"""XllmRpcService: what instances call the coordinator for (xLLM protocol page §5.2)."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from coordinator.engines.xllm.info import Type
from coordinator.engines.xllm.registry import Beat, Registry
from coordinator.rpc.prpc import Caller, Method
from coordinator.wire.protobuf.xllm_pb2 import (
    DisaggStreamGeneration,
    DisaggStreamGenerations,
    HeartbeatRequest,
    InstanceID,
    InstanceIDs,
    InstanceMetaInfo,
    InstanceType,
    Status,
)
from coordinator.wire.prpc import BAD_REQUEST, PayloadError

SERVICE = "xllm_service.proto.XllmRpcService"
# the members of a StatusSet, each a Status with its tag and length
WANTED = b"\x0a\x02\x08\x01"
UNWANTED = b"\x0a\x00"

M = TypeVar("M", bound=Message)


Deliver = Callable[[Iterable[DisaggStreamGeneration], float, str], list[bool]]
"""Takes results with the time of their arrival and the name of who sends them, which is empty where it is not known.

Says for each whether its request is still wanted.
"""


def services(registry: Registry, deliver: Deliver) -> Mapping[str, Mapping[str, Method]]:
    """The methods, for a baidu_std server. None of them waits for anything."""
    return {SERVICE: _Service(registry, deliver).methods()}


class _Service:
    def __init__(self, registry: Registry, deliver: Deliver) -> None:
        self._registry = registry
        self._deliver = deliver

    def methods(self) -> Mapping[str, Method]:
        return {
            "Hello": self._hello,
            "Heartbeat": self._heartbeat,
            "GetInstanceInfo": self._info,
            "GetStaticPrefillList": lambda *_: self._listed(Type.PREFILL),
            "GetStaticDecodeList": lambda *_: self._listed(Type.DECODE),
            "Generations": self._generations,
        }

    def _hello(self, _payload: bytes, _caller: Caller) -> bytes:
        return Status(ok=True).SerializeToString()

    def _heartbeat(self, payload: bytes, caller: Caller) -> bytes:
        told = _read(HeartbeatRequest, payload)
        load, cache = told.load_metrics, told.cache_event
        known = self._registry.beat(
            Beat(
                told.name,
                told.incarnation_id,
                load.waiting_requests_num,
                load.gpu_cache_usage_perc,
                tuple(cache.stored_cache),
                tuple(cache.removed_cache),
            )
        )
        if known:
            caller.name = told.name
        return Status(ok=known).SerializeToString()

    def _info(self, payload: bytes, _caller: Caller) -> bytes:
        """An empty name in the answer: there is no such instance."""
        found = self._registry.find(_read(InstanceID, payload).name)
        if found is None:
            return b""
        return InstanceMetaInfo(
            name=found.name,
            rpc_address=found.rpc_address,
            type=InstanceType.Value(found.kind.name),
            cluster_ids=found.cluster_ids,
            dp_size=found.dp_size,
            addrs=found.addrs,
            ports=found.ports,
            incarnation_id=found.incarnation,
            register_ts_ms=found.registered_ms,
            kv_split_size=found.kv_split_size,
        ).SerializeToString()

    def _listed(self, kind: Type) -> bytes:
        return InstanceIDs(names=self._registry.names(kind)).SerializeToString()

    def _generations(self, payload: bytes, caller: Caller) -> bytes:
        """One Status for each result, in their order: any other number aborts the engine's process (§5.5). Hot."""
        told = _read(DisaggStreamGenerations, payload)
        wanted = self._deliver(told.gens, time.monotonic(), caller.name)
        return b"".join([WANTED if one else UNWANTED for one in wanted])


def _read(kind: type[M], payload: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise PayloadError(BAD_REQUEST, f"the payload is no {kind.DESCRIPTOR.name}") from None
    return message
