"""disaggpb's own API: an event for each token, and no text anywhere (disaggpb protocol page §3)."""

from collections.abc import Sequence

from coordinator.api.bodies import dump

from .answer import STOP, STOP_STRING, Delta, Usage


class DisaggpbWriter:
    """Writes `{"token_id":10,"done":false}`, and the finish reason with the last token."""

    tail_has_token = False

    def prompt(self, index: int, prompt: Delta) -> bytes:  # noqa: ARG002  # answers never begin with the prompt
        """Nothing."""
        return b""

    def piece(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002  # there is one answer
        """An event for each token; one without a token where the answer ends with none."""
        reason, ids = delta.finish_reason, delta.token_ids
        if reason is None:
            return _events(ids)
        last = {"token_id": ids[-1]} if ids else {}
        return _events(ids[:-1]) + b"data: " + dump({**last, "done": True, "finish_reason": _finish(reason)}) + b"\n\n"

    def tail(self, usage: Usage | None) -> bytes:  # noqa: ARG002  # no numbers are told
        """Nothing: the last token was the end."""
        return b""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:  # noqa: ARG002
        """`{"token_ids":[...],"finish_reason":"stop"}`."""
        [choice] = choices
        return dump({"token_ids": choice.token_ids, "finish_reason": _finish(choice.finish_reason)})


def _events(ids: Sequence[int]) -> bytes:
    return b"".join(b'data: {"token_id":%d,"done":false}\n\n' % token for token in ids)


def _finish(reason: str | None) -> str | None:
    return STOP if reason == STOP_STRING else reason
