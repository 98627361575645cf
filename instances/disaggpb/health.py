"""The standard gRPC health service (`grpc.health.v1`): one message each way, small enough to be read by hand."""

import asyncio
from typing import TYPE_CHECKING

import grpc

from instances.disaggpb.calls import Context

if TYPE_CHECKING:
    from instances.disaggpb.instance import DisaggpbEngine

SERVICE = "grpc.health.v1.Health"
_SERVICE_FIELD = b"\x0a"  # field 1, a string
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


class Health:
    """`Check`, for the whole server and for each of its services."""

    def __init__(self, engine: "DisaggpbEngine", services: list[str]) -> None:
        self._engine = engine
        self._services = {"", *services}

    async def check(self, request: bytes, context: Context) -> bytes:
        """SERVING or NOT_SERVING; NOT_FOUND for a service that is not there."""
        name = request[2:].decode("utf-8", "replace") if request.startswith(_SERVICE_FIELD) else ""
        if name not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        instance = self._engine.instance
        chosen = instance.faults.always()
        if "health_hang" in chosen:
            await asyncio.Event().wait()
        fails_after = chosen.get("health_fail_after")
        failed = fails_after is not None and instance.age_s * 1000 >= fails_after.number(0)
        return _NOT_SERVING if instance.starting or failed or "health_status" in chosen else _SERVING

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server serves."""
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": grpc.unary_unary_rpc_method_handler(self.check)})
