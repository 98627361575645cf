"""One request on a decode instance: its tokens, and the faults that strike it on the way."""

import json
import time
from typing import TYPE_CHECKING

from instances.faults import Chosen, Fault
from instances.ledger import OutOfBlocks
from instances.mindie import frames
from instances.mindie.ask import Family, Job, Token
from instances.mindie.dresult import ResultStream
from instances.mindie.settings import LINK_FAULTS

if TYPE_CHECKING:
    from instances.mindie.decode import Decode

_MIB = 1 << 20


class Decoding:
    """A live request. Bound to the stream that exists when decoding starts: if that is replaced, the rest is lost."""

    def __init__(self, owner: "Decode", job: Job, family: Family, chosen: Chosen) -> None:
        self._owner = owner
        self.job = job
        self.chosen = chosen
        self._family = family
        self._stream: ResultStream | None = None
        self._opened = False
        self._stalled = self._went_on = False
        self._joined = b""
        self._last_s = time.monotonic()

    def bind(self, stream: ResultStream | None) -> None:
        """Decoding starts: from now on everything goes to this stream."""
        self._stream = stream
        self._last_s = time.monotonic()

    def go_on(self) -> bool:
        """No stall holds it any more; whether it stood in one, so that it has to join the batch again."""
        stood, self._stalled = self._stalled, False
        self._went_on = True
        return stood

    def step(self) -> bool:
        """Make one token; False when there is nothing more to do."""
        job = self.job
        if self._strikes(job.sent):
            return False
        try:
            self._owner.ledger.grow(job.req_id, job.kv_tokens + 1)
        except OutOfBlocks:
            self.preempt()
            return False
        now_s = time.monotonic()
        token = Token(job.sent, by_prefill=False, took_ms=(now_s - self._last_s) * 1000)
        self._last_s = now_s
        job.decode_ms.append(token.took_ms)
        self._owner.meters.decoded(token.took_ms / 1000)
        job.sent += 1
        if job.is_last(token.index):
            self._finish(token)
            return False
        if job.stream:
            self._piece(token)
        return True

    def _strikes(self, tokens: int) -> bool:
        """Faults that are due when so many tokens exist; True: no more tokens."""
        chosen = self.chosen
        if not chosen:
            return False
        if (fault := chosen.at("decode_error", tokens)) is not None:
            self.fail(fault.value or frames.FORWARD_FAILED)
            return True
        if chosen.at("preempt", tokens) is not None:
            self.preempt()
            return True
        if (fault := chosen.at("decode_crash", tokens)) is not None:
            self._owner.instance.crash(fault.number(0) if fault.value else None)
            return True
        if chosen.at("stall", tokens) is not None and not self._went_on:
            self._stalled = True
            return True
        stream = self._stream
        for name in LINK_FAULTS:
            if chosen.at(name, tokens) is not None and stream is not None:
                stream.end(name)
        if (fault := chosen.at("silence", tokens)) is not None and stream is not None:
            stream.flush()
            stream.mute(fault.number(30))
        return False

    # --- events

    def _piece(self, token: Token) -> None:
        if not self.job.plan.texts[token.index]:
            return  # the token ends inside a character: its bytes come with the next one
        self._open()
        self._emit("data", self._family.piece(self.job, token), token.index + 1)

    def _open(self) -> None:
        """The family's opening piece, an event of its own: decode sends it although prefill has (§5.5)."""
        if not self._opened:
            self._opened = True
            opening = self._family.opening(self.job)
            if opening:
                self.send(frames.message(self.job.req_id, "data", opening))

    def _finish(self, token: Token) -> None:
        job = self.job
        if job.stream:
            self._open()
            bodies = self._family.last(job, token)
            if "no_done" in self.chosen:
                bodies = bodies[:1]
        else:
            bodies = (self._family.whole(job),)
        for body in bodies:
            self._emit("lastData", body, token.index + 1)
        if "after_last" in self.chosen:
            self.send(frames.message(job.req_id, "data", self._family.filler(b"after the end")))
            self.send(frames.message(job.req_id, "lastData", bodies[-1]))
        self._owner.finished(self, "end of decode")
        self._owner.meters.ended(len(job.plan), (job.prefill_ms + sum(job.decode_ms)) / 1000)

    def fail(self, text: str) -> None:
        """An error event; the request is over."""
        self.send(frames.message(self.job.req_id, "error", text.encode()))
        self._owner.finished(self, "error")
        self._owner.meters.failed += 1

    def preempt(self) -> None:
        """A retry event: the KV is gone, the request must be computed again from the tokens so far."""
        if "recompute_unsupported" in self.chosen:
            self.fail(frames.NO_RECOMPUTE)
            return
        body = json.dumps(self._family.retry(self.job), separators=(",", ":"), ensure_ascii=False)
        self.send(frames.message(self.job.req_id, "retry", body.encode("utf-8", "replace")))
        self._owner.preempted += 1
        self._owner.finished(self, "preempted")

    def late(self) -> None:
        """An event that was on its way when the request was stopped."""
        job = self.job
        if job.stream and not job.is_last(job.sent):
            piece = self._family.piece(job, Token(job.sent, by_prefill=False, took_ms=0.0))
            self.send(frames.message(job.req_id, "data", piece))
            job.sent += 1

    def send(self, message: bytes) -> None:
        """Queue a message on the bound stream; lost if that is gone."""
        if self._stream is None or not self._stream.alive:
            self._owner.lost_messages += 1
            return
        self._stream.send(message)

    def _emit(self, prefix: str, body: bytes, token: int) -> None:
        job, chosen = self.job, self.chosen
        message = frames.message(job.req_id, prefix, body)
        if not chosen:
            self.send(message)
            return
        for name in ("unknown_keyword", "unknown_req_id", "colons", "nul", "huge"):
            if (fault := chosen.on_piece(name, token)) is not None:
                self._extra(fault)
        if chosen.on_piece("no_req_id", token) is not None:
            message = frames.continuation(prefix, body)
        if self._joined:
            message = self._joined + frames.continuation(prefix, body)
            self._joined = b""
        elif chosen.on_piece("join", token) is not None and prefix == "data":
            self._joined = message
            return
        if chosen.on_piece("merge", token) is not None:
            message += frames.HEARTBEAT
        split = next((name for name in ("split", "split_chunks") if chosen.on_piece(name, token)), None)
        if split and self._stream is not None and self._stream.alive:
            self._stream.send_split(message, chunks=split == "split_chunks")
        else:
            self.send(message)

    def _extra(self, fault: Fault) -> None:
        """A further message that is not part of the answer."""
        req_id, filler = self.job.req_id, self._family.filler
        if fault.name == "unknown_keyword":
            self.send(frames.message(req_id, "mystery", b"what is this"))
        elif fault.name == "unknown_req_id":
            self.send(frames.message("99999999999999999999", "data", filler(b"for nobody")))
        elif not self.job.stream:
            return
        elif fault.name == "colons":
            self.send(frames.message(req_id, "data", filler(b":a:b::c:")))
        elif fault.name == "nul":
            self.send(frames.message(req_id, "data", b": before\0after\n\n"))
        else:
            self.send(frames.message(req_id, "data", filler(b"x" * int(fault.number(1) * _MIB))))
