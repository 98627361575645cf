"""One small request over a pair, through the engine protocol itself, and what decode's own counters say of it."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.api.openai import OpenAi
from coordinator.core.abilities import Examiner, Verdict
from coordinator.core.errors import NoInstance, RequestError
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Completed, EngineProtocol
from coordinator.core.request import Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.doctor.advice import advice_for, told
from coordinator.doctor.findings import Finding, fault, note, ok
from coordinator.policies import Policies, load_policy
from coordinator.scheduler import Scheduler

FAMILY = OpenAi()
PATH = "/v1/completions"
PROMPT_WORDS = 160  # some blocks of KV: what does not fill one is not handed over
TAKE_IDS = ("microserving", "xllm", "disaggpb")  # engines that take token ids, so that no tokenizer is needed here
LEAST_ID, ID_RANGE = 100, 150  # ordinary tokens of any vocabulary
TOKENS = 2
COUNTED_S = 3.0  # engines bring their counters up to date now and then
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill and decode that requests could be placed on; the same twice for a hybrid instance."""

    prefill: Instance
    decode: Instance

    @property
    def name(self) -> str:
        """For people."""
        return self.prefill.id if self.prefill is self.decode else f"{self.prefill.id} -> {self.decode.id}"


class Collected(Out):
    """Takes an answer."""

    def __init__(self) -> None:
        self.body = b""
        self._started = False

    @property
    def started(self) -> bool:
        """Whether anything has come."""
        return self._started

    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:  # noqa: ARG002
        """Keep it."""
        self._started = True
        self.body += data

    def finish(self, data: bytes, now_s: float, *, token: bool = True, after: bytes = b"") -> None:  # noqa: ARG002
        """Keep the last of it."""
        self.piece(data, now_s)

    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:  # noqa: ARG002
        """Keep all of it."""
        self.piece(body, now_s)

    def only_opens(self, data: bytes) -> bool:
        """As the API family says."""
        return FAMILY.only_opens(data)

    def ends(self, data: bytes) -> bool:
        """As the API family says."""
        return FAMILY.ends(data)

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Nobody is slow here."""

    def hold(self) -> None:
        """Nothing is written here."""

    def flush(self) -> None:
        """Nothing is kept back."""


class HandoverCheck:
    """Sends such requests.

    Args:
        missing: how often prefill has answered so far without what decode needs (vLLM).
        within_s: for one request.
    """

    def __init__(
        self, engine: EngineProtocol, examiner: Examiner, missing: Callable[[], float], within_s: float
    ) -> None:
        self._engine = engine
        self._examiner = examiner
        self._missing = missing
        self._within_s = within_s

    async def run(self, pair: Pair, model: str | None) -> Finding:
        """Send one for that model, and judge it."""
        request = tiny_request(pair, self._within_s, model)
        lease = _scheduler(pair).try_place(request)
        if lease is None:
            return note("handover", pair.name, "not tested: max_requests of one of them is 0")
        out, missed = Collected(), self._missing()
        before = await self._stock(pair)
        try:
            async with asyncio.timeout(self._within_s):
                with lease:
                    outcome = await self._engine.serve(request, lease, out)
        except TimeoutError:
            what = f"no answer within {self._within_s:g} s"
            return fault("handover", pair.name, what, "see the logs of both instances; can they reach each other?")
        except RequestError as error:
            return fault("handover", pair.name, told(error), advice_for(error))
        except Exception as error:  # noqa: BLE001  # the border to engines of the user's own
            return fault("handover", pair.name, told(error), advice_for(error))
        if not isinstance(outcome, Completed):
            what = "decode gave the request back to be computed again"
            return fault("handover", pair.name, what, "has decode KV memory left? See the logs of both instances")
        if pair.prefill is pair.decode:
            return ok("answer", pair.name, "answers a small request")
        if self._missing() > missed:
            return _recomputed(pair, Verdict(moved=False, why="prefill answered without kv_transfer_params, so decode "
                "computed the prompt itself", advice="start prefill with --kv-transfer-config (NixlConnector, kv_role "
                "kv_producer); is it a prefill instance at all?"))  # fmt: skip
        return await self._judged(pair, before)

    async def _stock(self, pair: Pair) -> Mapping[str, float]:
        return {} if pair.prefill is pair.decode else await self._examiner.take_stock(pair.decode, self._within_s)

    async def _judged(self, pair: Pair, before: Mapping[str, float]) -> Finding:
        """Look at decode's counters until they show it, for a moment."""
        until_s = time.monotonic() + COUNTED_S
        while True:
            verdict = self._examiner.judge(before, await self._stock(pair))
            if verdict.moved is not False:
                break
            if time.monotonic() >= until_s:
                return _recomputed(pair, verdict)
            await asyncio.sleep(LOOK_S)
        if verdict.moved is None:
            return note("handover", pair.name, f"it answers; whether the KV moved cannot be told: {verdict.why}")
        return ok("handover", pair.name, f"decode went on with prefill's KV: {verdict.why}")


def _recomputed(pair: Pair, verdict: Verdict) -> Finding:
    what = f"the KV does not move: {verdict.why}. Requests are answered, slowly"
    return fault("handover", pair.name, what, verdict.advice)


def _prompt(engine: str) -> str | list[int]:
    if engine in TAKE_IDS:
        return [LEAST_ID + secrets.randbelow(ID_RANGE) for _ in range(PROMPT_WORDS)]
    return " ".join(secrets.token_hex(2) for _ in range(PROMPT_WORDS))


def can_pair(prefill: Instance, decode: Instance) -> bool:
    """Whether requests could be placed on the two, by the scheduler's own rules."""
    pair = Pair(prefill, decode)
    try:
        lease = _scheduler(pair).try_place(tiny_request(pair, math.inf, pair.prefill.model or pair.decode.model))
    except NoInstance:
        return False
    if lease is not None:
        lease.end()
    return True


def _scheduler(pair: Pair) -> Scheduler:
    policies = Policies(load_policy("round_robin", None), load_policy("round_robin", None))
    made = Scheduler(policies, max_queue=0)
    made.on_view(ClusterView(1, ready=(pair.prefill,) if pair.prefill is pair.decode else (pair.prefill, pair.decode)))
    return made


def tiny_request(pair: Pair, within_s: float, model: str | None) -> Request:
    """A request for very few tokens with a prompt that no cache has seen; engines may refuse one without a model."""
    given = {"prompt": _prompt(pair.prefill.engine), "max_tokens": TOKENS, "temperature": 0, "stream": False}
    body = json.dumps({"model": model, **given} if model is not None else given).encode()
    now_s = time.monotonic()
    end_s = now_s + within_s
    return Request(
        id=f"doctor-{secrets.token_hex(4)}",
        api=FAMILY.name,
        path=PATH,
        query="",
        headers=((b"content-type", b"application/json"),),
        body=body,
        ask=FAMILY.parse(PATH, body),
        arrived_s=now_s,
        deadlines=Deadlines(scheduled_s=end_s, first_token_s=end_s, finished_s=end_s, inter_token_s=within_s),
    )
