"""MindIE-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.settings import read_settings

MENU: Menu = MappingProxyType(
    {
        # prefill
        "reply_delay": (
            "number",
            "P: this many seconds between decode's accept and the envelope, so that decode's events win",
        ),
        "enqueue_refused": ("flag", "P: 424 `Failed to enqueue inferRequest.`"),
        "fail_after_accept": ("flag", "P: 500 although decode has accepted"),
        "wrong_req_id": ("flag", "P: the envelope carries another reqId"),
        "no_output": ("flag", "P: the envelope lacks `output`"),
        "no_is_last": ("flag", "P: the envelope lacks `isLastResp`"),
        "empty_output": ("flag", "P: `output` is the empty string"),
        "not_json": ("flag", "P: the envelope is not JSON"),
        "wrong_kv": ("flag", "P: hands over KV of something else: decode writes visibly wrong text"),
        # decode, per request
        "refuse_handover": ("text", "D: refuses the handover; value: the reason"),
        "pull_failed": ("text", "D: error event instead of tokens; value `reversibly` for that text"),
        "decode_error": ("text", "D: error event once k tokens exist; value: the text"),
        "preempt": ("flag", "D: retry event (recompute) once k tokens exist"),
        "recompute_unsupported": ("flag", "D: error event where a retry event would be due"),
        "stall": ("flag", "D, hybrid: no more tokens once k exist; the request stays alive"),
        "slow": ("number", "D, hybrid: this many seconds for each token"),
        "decode_crash": ("number", "D: the instance dies once k tokens exist; value: back after s seconds"),
        "late_events": ("number", "D: this many events after a stop (default: the setting of that name)"),
        # decode, shape of events; without @k every event of the request
        "merge": ("flag", "D: the event and a heartbeat in one HTTP chunk"),
        "join": ("flag", "D: the pieces of tokens k and k+1 in one HTTP chunk under one reqId"),
        "split": ("flag", "D: the event over two TCP segments"),
        "split_chunks": ("flag", "D: the event over two HTTP chunks"),
        "no_req_id": ("flag", "D: the event without its reqId part"),
        "unknown_keyword": ("flag", "D: a further message with an unknown keyword"),
        "unknown_req_id": ("flag", "D: a further event for an id that nobody knows"),
        "colons": ("flag", "D: a further piece whose body begins with a colon"),
        "nul": ("flag", "D: a further piece with a NUL inside"),
        "huge": ("number", "D: a further piece of this many MiB (default 1)"),
        "after_last": ("flag", "D: events after lastData"),
        "no_done": ("flag", "D: OpenAI streams end without the second lastData"),
        # decode, the standing stream
        "dresult_status": ("number", "D: GET /dresult answers this status (default 400)"),
        "silence": ("number", "D: nothing is sent on the stream for this many seconds, heartbeats included"),
        "dresult_end": ("flag", "D: the stream ends cleanly once k tokens exist"),
        "dresult_fin": ("flag", "D: the stream is closed without its terminator"),
        "dresult_reset": ("flag", "D: the stream is reset"),
        "dresult_close": ("flag", "D: the close message, then the terminator"),
        # hybrid
        "stream_end": ("flag", "hybrid: the stream ends cleanly once k tokens exist"),
        "stream_close": ("flag", "hybrid: the stream is closed without its terminator once k tokens exist"),
        "stream_reset": ("flag", "hybrid: the stream is reset once k tokens exist"),
    }
)
LINK_FAULTS = ("dresult_end", "dresult_fin", "dresult_reset", "dresult_close")


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        heartbeat_s: silence after which a heartbeat is sent; checked five times as often.
        linger_s: how long a prefill instance still knows a req-id after its KV was released: a recompute that comes
            earlier is refused.
        late_events: events that are sent for a stream after a stop.
        inter_comm_port: a further port, for `d-target: ip;port`; 0 takes a free one, -1: none.
        enqueue_status: 424 or 500, for a req-id that is still known.
        start_role: `none`: the role is unknown until `POST /v1/role/...`; `flex`: prefill and decode.
    """

    heartbeat_s: float = 5.0
    linger_s: float = 0.0
    late_events: int = 1
    inter_comm_port: int = -1
    enqueue_status: int = 424
    start_role: str = ""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError for an unknown name or a wrong value."""
        return read_settings(cls(), given)
