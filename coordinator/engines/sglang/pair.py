"""One attempt: both legs at once, and whose fault it is when one of them fails (SGLang protocol page §4)."""

import asyncio
import time
from dataclasses import dataclass

from coordinator.core.body import RequestBody
from coordinator.core.errors import EngineFailed, RequestError, Side
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Placement
from coordinator.engines.http_leg import MAX_ERROR_BYTES, failed
from coordinator.engines.sglang.drains import Drains
from coordinator.engines.sglang.joined import JoinedOut
from coordinator.engines.sglang.legs import DecodeLeg, PrefillLeg, late, settled
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.request import GivenHeaders
from coordinator.transport.scope import Scope
from coordinator.transport.sink import ReplySink
from coordinator.transport.stream import Stream

BLAME_WAIT_S = 0.25  # how long a failure that may be the other leg's waits for that leg's own
REFUSAL_WAIT_S = 0.5  # how long the text of an error answer is waited for
FIRST_FAILURE = 500
SAID = ("engine_error", "http_5xx")  # failures that an engine has put into words
PREFILL_WAIT_S = 5.0  # how long a complete answer waits for what prefill adds to it


class StaleConnection(Exception):
    """A kept connection turned out to be closed by the engine: the request was not processed there.

    The room is in use on the other leg, so that the call cannot just be made again.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(str(error))
        self._error: RequestError | None = error

    def taken(self) -> RequestError:
        """The failure itself, once: it may be raised from this one, and must not be known by its own cause."""
        error, self._error = self._error, None
        assert error is not None
        return error


@dataclass(frozen=True, slots=True)
class Call:
    """What goes out, the same to both instances."""

    target: str
    headers: GivenHeaders
    body: RequestBody
    stream: bool


class Pair:
    """The two legs, from the first connection to the end of decode's answer.

    Prefill's failure ends decode in the same moment, since decode may stream garbage from then on (sglang #30233);
    decode's failure closes prefill, which would wait for it in vain.

    Args:
        call: what both instances are sent.
        keep_bytes: how much of prefill's answer is kept.
        joined: what prefill's answer is told to; None where it adds nothing.
    """

    def __init__(
        self, call: Call, placement: Placement, out: Out, joined: JoinedOut | None, *, keep_bytes: int
    ) -> None:
        self._call = call
        self._placement = placement
        self._joined = joined
        self._scope = Scope()
        self._prefill_stream: Stream | None = None
        self._decode_stream: Stream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._prefilled: asyncio.Event | None = None  # for who waits for prefill's answer
        self._sent_well = False  # prefill has answered, and no failure
        self._gave_up: RequestError | None = None  # prefill's failure that blames decode
        self._blamed = False  # decode has failed, and blames prefill
        self._spoke: RequestError | None = None  # how decode failed, in words that name nobody; prefill may be why
        self._doomed = False  # nothing of decode's may reach the client any more
        self._decode_error: RequestError | None = None  # how it failed after that
        self._overheard: PrefillLeg | None = None  # what listens to a decode whose answer is not wanted any more
        self._prefill = PrefillLeg(
            placement.prefill,
            stream=call.stream,
            keep_bytes=keep_bytes,
            on_doomed=self._prefill_doomed,
            on_over=self._prefill_over,
        )
        self._decode = DecodeLeg(placement.decode, placement, joined or out)

    async def run(self, client: HttpClient, drains: Drains) -> None:
        """Make both calls and see decode's answer through.

        Raises:
            RequestError: the guilty leg's.
            StaleConnection: try again, in another room.

        However it ends, no connection is left in use, but for the rest of prefill's answer after a success: `drains`
        has it then.
        """
        try:
            async with self._scope:
                await self._both(client)
            if self._prefill_stream is not None and not self._prefill.over:
                drains.take(self._prefill, self._prefill_stream)
                self._prefill_stream = None
        except BaseException:
            self._let_go()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._stop_decode()
            if self._prefill_stream is not None:
                self._prefill_stream.close()
                self._prefill.part()

    def _let_go(self) -> None:
        """Keep neither errors, whose tracebacks know this pair, nor legs that tell it: both would be cycles."""
        self._decode.let_go()
        self._gave_up = self._decode_error = self._spoke = None
        self._prefill.part()
        if self._overheard is not None:
            self._overheard.part()

    async def _both(self, client: HttpClient) -> None:
        placement, decode = self._placement, self._decode
        self._prefill_stream = await self._open(client, placement.prefill, self._prefill)
        self._decode_stream = await self._open(client, placement.decode, decode)
        decode.started_by(self._decode_stream)
        if self._doomed:
            self._overhear()
        try:
            await decode.done
        except RequestError as error:
            raise await self._failure_behind(error)  # noqa: B904  # it may be the same, and nobody's own cause
        if self._joined is not None and self._joined.waits:
            await self._wait_for_prefill()
            self._joined.release()

    async def _open(self, client: HttpClient, instance: Instance, sink: ReplySink) -> Stream:
        call = self._call
        try:
            return await client.open_stream(
                instance.address, b"POST", call.target, call.headers, call.body, sink=sink, retry_stale=False
            )
        except TransportError as error:
            if error.reason == "closed":
                raise StaleConnection(failed(instance, error)) from error
            raise failed(instance, error) from error

    async def _wait_for_prefill(self) -> None:
        """Wait for the end of prefill's answer; its failure interrupts."""
        if self._prefill.over:
            return
        self._prefilled = asyncio.Event()
        try:
            async with asyncio.timeout(PREFILL_WAIT_S):
                await self._prefilled.wait()
        except TimeoutError:
            return

    async def _failure_behind(self, error: RequestError) -> Exception:
        """What to raise for decode's failure: that, unless prefill's comes to light as its cause."""
        if self._decode.stale:
            return StaleConnection(error)
        error, blames_prefill = settled(self._decode.instance, error)
        if self._sent_well or not (blames_prefill or self._may_be_prefills(error)):
            return error
        if self._gave_up is not None:
            return self._gave_up if blames_prefill else error
        self._blamed = blames_prefill
        self._spoke = None if blames_prefill else error
        await asyncio.sleep(BLAME_WAIT_S)  # prefill's own failure interrupts
        return (late(self._prefill.instance, error) if blames_prefill else None) or error

    def _may_be_prefills(self, error: RequestError) -> bool:
        """Whether decode says so before its first token: it may be the quicker one to tell of prefill's failure."""
        return not self._decode.decoding and isinstance(error, EngineFailed) and error.reason in SAID

    # --- called by prefill's leg

    def _prefill_doomed(self) -> None:
        if self._prefill.status >= FIRST_FAILURE and not self._decode.decoding:
            self._overhear()
        else:
            self._stop_decode()
        self._timer = asyncio.get_running_loop().call_later(
            REFUSAL_WAIT_S, lambda: self._prefill.give_up(time.monotonic())
        )

    def _prefill_over(self, now_s: float, error: RequestError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is None:
            self._sent_well = True
            self._placement.prefilled(now_s)
            if self._joined is not None:
                self._joined.prefilled(self._prefill.body, now_s)
            if self._prefilled is not None:
                self._prefilled.set()
            return
        error, blames_decode = settled(self._prefill.instance, error)
        if self._prefill.stale:
            self._end(StaleConnection(error))
        elif blames_decode and self._spoke is not None:
            self._end(self._spoke)
        elif blames_decode and not (self._decode.decoding or self._blamed):
            self._gave_up = error
            self._overhear()
            if self._overheard is None or not self._overheard.over:
                self._timer = asyncio.get_running_loop().call_later(BLAME_WAIT_S, self._verdict)
        else:
            self._end(error)

    def _overhear(self) -> None:
        """Nothing of decode's reaches the client from here on; it is only heard whether decode fails too."""
        self._doomed = True
        if self._overheard is None and self._decode_stream is not None:
            self._overheard = PrefillLeg(
                self._decode.instance,
                stream=self._call.stream,
                keep_bytes=MAX_ERROR_BYTES,
                on_doomed=lambda: None,
                on_over=self._decode_over,
                status=self._decode.status,
            )
            self._decode_stream.hand_over(self._overheard)

    def _decode_over(self, now_s: float, error: RequestError | None) -> None:  # noqa: ARG002
        """Decode has ended after prefill had failed."""
        self._decode_error = error
        if self._gave_up is not None:
            self._verdict()

    def _verdict(self) -> None:
        """Prefill has given the hand-over up; decode is guilty if it kept silent, or failed for a reason of its own.

        A decode that gives it up as well was there: then prefill is the one that had not finished.
        """
        guilty, heard = self._gave_up, self._overheard
        assert guilty is not None
        decode = self._decode.instance
        if heard is None or not (heard.over or heard.body):
            detail = f"prefill waited for it: {guilty.detail or guilty.message}"
            guilty = EngineFailed(Side.DECODE, decode.id, "timeout", detail=detail)
        elif self._decode_error is not None:
            error, blames_prefill = settled(decode, self._decode_error)
            guilty = guilty if blames_prefill else error
        self._end(guilty)

    def _end(self, error: Exception) -> None:
        if not self._answered():
            self._stop_decode()
            self._scope.interrupt(error)

    def _answered(self) -> bool:
        """Whether the client has its whole answer, so that nothing that prefill still says matters."""
        done = self._decode.done
        whole = done.done() and not done.cancelled() and done.exception() is None
        return whole and not (self._joined is not None and self._joined.waits)

    def _stop_decode(self) -> None:
        """Nothing of decode's reaches the client from here on."""
        if self._decode_stream is not None:
            self._decode_stream.close()
