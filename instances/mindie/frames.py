"""Messages of the decode instance's standing stream (MindIE protocol page §5.2, §5.3)."""

HEARTBEAT = b"ka:heartbeat\0"
CLOSE = b"reqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0"

PULL_FAILED = "Pull kv failed irreversibly."
PULL_FAILED_REVERSIBLY = "Pull kv failed reversibly."
NO_RECOMPUTE = "Try to do recompute but it is not supported."
FORWARD_FAILED = "Failed forward in for infer engine."


def message(req_id: str, prefix: str, body: bytes) -> bytes:
    """`reqId:<id> NUL <prefix>:<body> NUL`; the body is opaque and may hold anything."""
    return b"reqId:%b\0%b:%b\0" % (req_id.encode(), prefix.encode(), body)


def continuation(prefix: str, body: bytes) -> bytes:
    """A message without an id of its own: it belongs to the id before it in the same chunk."""
    return b"%b:%b\0" % (prefix.encode(), body)
