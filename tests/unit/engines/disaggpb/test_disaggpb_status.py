"""gRPC's words for failures, as the library and grpc-go write them, and our errors."""

import pytest
from engine_world import instance

from coordinator.core.errors import EngineFailed, EngineRefused, KvTooLarge, Side
from coordinator.engines.disaggpb.status import call_failed

P, D = instance("p0"), instance("d0")
TO = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:9000: "


REMOTE = TO + "Failed to connect to remote host: "


@pytest.mark.parametrize(
    ("code", "details", "reason", "connecting"),
    [
        ("UNAVAILABLE", REMOTE + "connect: Connection refused (111)", "connect_refused", True),
        ("UNAVAILABLE", REMOTE + "Timeout occurred: FD Shutdown", "connect_timeout", True),
        ("UNAVAILABLE", TO + "Ssl handshake failed (TSI_PROTOCOL_FAILURE)", "tls_failed", True),
        ("UNAVAILABLE", REMOTE + "No route to host", "connect_failed", True),
        ("UNAVAILABLE", "DNS resolution failed for d0:9000: C-ares status is not ARES_SUCCESS", "dns_failed", True),
        ("UNAVAILABLE", "Socket closed", "reset", False),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", "reset", False),
        ("UNAVAILABLE", "GOAWAY received", "reset", False),
        ("UNAVAILABLE", "", "reset", False),
        ("UNAVAILABLE", "the model is being loaded", "engine_error", False),
        ("UNKNOWN", "prefill: CUDA out of memory", "engine_error", False),
        ("INTERNAL", "", "engine_error", False),
        ("RESOURCE_EXHAUSTED", "no free slot", "engine_error", False),
        ("CANCELLED", "CANCELLED", "reset", False),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "timeout", False),
        ("UNIMPLEMENTED", "unknown service disagg.DecodeWorker", "bad_reply", False),
        ("UNAUTHENTICATED", "no credentials", "key_refused", False),
        ("PERMISSION_DENIED", "not for you", "key_refused", False),
    ],
)  # fmt: skip
def test_failures(code, details, reason, connecting):
    error = call_failed(D, code, details)
    assert isinstance(error, EngineFailed)
    assert (error.side, error.instance_id, error.reason, error.connecting) == (Side.DECODE, "d0", reason, connecting)
    assert code in error.detail
    assert details[:20] in error.detail
    assert "10.0.0.1" not in error.message


@pytest.mark.parametrize(
    ("code", "status"),
    [("INVALID_ARGUMENT", 400), ("OUT_OF_RANGE", 400), ("FAILED_PRECONDITION", 400), ("NOT_FOUND", 404)],
)
def test_refusals(code, status):
    error = call_failed(P, code, "so says the worker")
    assert isinstance(error, EngineRefused)
    assert (error.status, error.message) == (status, "so says the worker")
    assert call_failed(P, code, "").message


@pytest.mark.parametrize(
    "details",
    [
        "Received message larger than max (4194848 vs. 4194304)",
        "CLIENT: Received message larger than max (8194848 vs. 4194304)",
        "grpc: received message larger than max (4194848 vs. 4194304)",
        "SERVER: Sent message larger than max (4194848 vs. 4194304)",
    ],
)
def test_messages_that_are_too_long(details):
    error = call_failed(D, "RESOURCE_EXHAUSTED", details)
    assert isinstance(error, KvTooLarge)
    assert error.status == 413
    assert "d0" in error.detail
    assert not isinstance(error, EngineFailed)


def test_long_words_are_cut():
    assert len(call_failed(D, "UNKNOWN", "x" * 10_000).detail) < 400
    assert len(call_failed(D, "INVALID_ARGUMENT", "x" * 10_000).message) < 400
