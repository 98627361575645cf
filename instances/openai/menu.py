"""The faults of answers that both engines have."""

from types import MappingProxyType

from instances.faults import Menu

STREAM_FAULTS = ("stream_end", "stream_close", "stream_reset")
ANSWER_MENU: Menu = MappingProxyType(
    {
        "answer_error": ("text", "fails once k tokens exist: error event, or 500; value: the text"),
        "stall": ("flag", "no more tokens once k exist; the request stays alive"),
        "slow": ("number", "this many seconds for each token"),
        "answer_crash": ("number", "the instance dies once k tokens exist; value: back after s seconds"),
        "stream_end": ("flag", "the stream ends cleanly once k tokens exist, without finish reason and [DONE]"),
        "stream_close": ("flag", "the stream is closed without its terminator once k tokens exist"),
        "stream_reset": ("flag", "the stream is reset once k tokens exist"),
        "no_done": ("flag", "the stream ends without [DONE]"),
        "empty_first": ("flag", "the stream's first event has no choices"),
        "comments": ("flag", "comments and further fields before the event"),
        "no_space": ("flag", "`data:` without the space"),
        "multi_line": ("flag", "the event's JSON over two data lines"),
        "crlf": ("flag", "the event's lines end with CR LF"),
        "join": ("flag", "the event and the next one in one HTTP chunk"),
        "split": ("flag", "the event over two TCP segments"),
        "split_chunks": ("flag", "the event over two HTTP chunks"),
        "huge": ("number", "the event carries a further field of this many MiB (default 1)"),
        "not_json": ("flag", "an answer that is not a stream is not JSON"),
    }
)
