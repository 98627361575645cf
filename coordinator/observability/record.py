"""What is known of one request by its end.

A record has no place for a prompt, an output or a header: what is not in it cannot be logged.
"""

import re
from dataclasses import dataclass, field

from coordinator.core.errors import DeadlineExceeded, EngineFailed, Outcome, RequestError

from .trace import Trace

# failures whose detail is in our own words; any other may hold an engine's, and those may quote a prompt or an output
_OWN_WORDS = frozenset(
    (
        "connect_refused", "connect_timeout", "connect_failed", "dns_failed", "tls_failed", "reset", "closed",
        "link_lost", "ended_early", "reply_too_large", "message_too_large", "missing_kv",
    )
)  # fmt: skip
_status = re.compile(r"status \d{3}").match


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request by its end; filled along its way.

    Attributes:
        id: the id that the client knows.
        api: name of the API family; empty where none serves the path.
        path: path as the client gave it; a query is cut off when it is logged.
        client: the client's address; empty where nobody knows it.
        key: name of its API key; empty where it needed none, or had no valid one.
        model: the model name that the client gave.
        status: status that went out; 0 where none did.
        prefill: instance id of the last attempt.
        decode: instance id of the last attempt.
        wire_ids: the ids of all attempts on engines' wires.
        attempts: placements that were made.
        recomputes: how often decode gave the request back.
        events: tokens of a stream, as far as they can be told apart.
        bytes_out: body bytes sent to the client.
        prompt_bytes: size of the prompt.
        queue_s: time spent waiting for an instance.
        prefill_s: time that the last attempt spent in prefill; None: it did not come to that, like the two that follow.
        handoff_s: from there to decode's first output.
        decode_s: from there to the end.
        ttft_s: from arrival to the first token.
        duration_s: from arrival to the end.
        error_code: stable code of the error it ended in (docs/errors.md).
        error_side: who is to blame.
        error_reason: an engine's failure, or the stage of a deadline, in one word.
        error_instance: id of the guilty instance.
        error_detail: text for the log only.
        failed_legs: side, reason and instance id of each attempt in which an engine failed.
        trace: what is noted for its trace, where requests are traced.
    """

    id: str
    api: str
    path: str
    client: str = ""
    key: str = ""
    stream: bool = False
    model: str | None = None
    status: int = 0
    outcome: Outcome = Outcome.OK
    prefill: str | None = None
    decode: str | None = None
    wire_ids: list[str] = field(default_factory=list)
    attempts: int = 0
    recomputes: int = 0
    events: int = 0
    bytes_out: int = 0
    prompt_bytes: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    error_code: str | None = None
    error_side: str | None = None
    error_reason: str | None = None
    error_instance: str | None = None
    error_detail: str = ""
    failed_legs: tuple[tuple[str, str, str], ...] = ()
    trace: Trace | None = None

    def blame(self, error: EngineFailed) -> None:
        """An attempt has failed at an engine; another one may follow."""
        self.failed_legs += ((error.side, error.reason, error.instance_id),)

    def fields(self) -> dict[str, str]:
        """What other lines of the log name it by: its id, and its trace's."""
        named = {"request": self.id}
        return named if self.trace is None else named | {"trace_id": self.trace.id}

    def failed(self, error: RequestError) -> None:
        """Take over how the request failed.

        Not its status, which may be out already, nor the client's message, nor what an engine said.
        """
        self.outcome = error.outcome
        self.error_code = error.code
        self.error_side = error.side
        self.error_detail = error.detail
        if isinstance(error, EngineFailed):
            self.error_reason = error.reason
            self.error_instance = error.instance_id
            if error.reason not in _OWN_WORDS:
                status = _status(error.detail)
                self.error_detail = status.group() if status is not None else ""
        elif isinstance(error, DeadlineExceeded):
            self.error_reason = error.stage
