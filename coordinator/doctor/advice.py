"""What to do about failures, by the words that the coordinator has for them."""

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError
from coordinator.core.instance import Instance

UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
_BY_REASON = {
    "connect_refused": "nothing listens there: is the instance started, and are host and port those of its file entry?",
    "connect_timeout": "the host does not answer at all: is it up, and is a firewall or a missing route in between?",
    "connect_failed": "the network has no way there: check address, routes and firewalls",
    "dns_failed": "the name is not known here: check its spelling, or the name servers of this machine",
    "tls_failed": "TLS does not come about: is https right, and do ca_file and server_name fit its certificate?",
    "reset": "it breaks connections off: see its own log; a TLS port that is spoken to in plain text does this, too",
    "closed": "it closes connections without an answer: see its own log",
    "timeout": "it takes connections and does not answer in time: see its own log; is it loading, or hanging?",
    "bad_reply": "it answers something else than this engine does: is `engine` right, and is this its inference port?",
    "key_refused": "it does not take the key (or certificate) that the configuration gives it: is that the one it was "
    "started with? See auth.engine_key_env or auth.engine_key_file, or the instance's own",
    "http_5xx": "it answers with an error of its own: see its log",
    "handoff_failed": "prefill cannot hand requests over to it: can prefill reach it at this address? See both logs",
    "link_lost": "its standing stream is not open: is it a decode instance, and does no other coordinator hold it?",
    "recompute": "decode gave the request back: its KV memory is full, or prefill's KV did not come",
}
_KEY = "it wants a key: set auth.engine_key_env or auth.engine_key_file, or the instance's own"
_ELSE = "see its own log, and the coordinator's at logging.level debug"


def advice_for(error: Exception) -> str:
    """What to do about a failure."""
    if isinstance(error, EngineRefused):
        if error.status in (UNAUTHORIZED, FORBIDDEN):
            return _KEY
        if error.status == NOT_FOUND:
            return "it does not know this call or this model: check `engine`, `model` and the port"
        return "it refuses a plain small request: see the message, and its own log"
    if isinstance(error, EngineFailed):
        return _BY_REASON.get(error.reason, _ELSE)
    return _ELSE


def told(error: Exception) -> str:
    """A failure in plain words."""
    if isinstance(error, EngineRefused):
        return f"refused with status {error.status}: {error.message}"
    if isinstance(error, EngineFailed):
        words = error.reason.replace("_", " ")
        return f"{words} ({error.detail})" if error.detail else words
    if isinstance(error, RequestError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def place_of(instance: Instance) -> str:
    """Where an instance is, for a sentence."""
    return f"{instance.role} of {instance.engine} at {instance.url}"
