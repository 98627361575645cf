"""KV that waits on a prefill instance for the decode instance that will read it (vLLM protocol page §1.2, §1.5)."""

import asyncio
import itertools
import json
import time
import uuid
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from instances.answers import kv_digest
from instances.openai.ask import Choice

if TYPE_CHECKING:
    from instances.vllm.instance import VllmEngine

_PAST_KEPT = 10_000
_BIG = 10**18  # 19 digits: a float would lose some of them
_LATER = ("dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode")


def canonical(value: Any) -> str:
    """The JSON value as a text that differs for 1, 1.0 and true, but not for the order of keys."""
    return json.dumps(value, sort_keys=True)


@dataclass(slots=True)
class Offered:
    """KV on offer. `key`: in the ledger."""

    key: str
    request_id: str
    params: dict[str, Any]
    kv: str
    kv_tokens: int
    opened: bool = False
    lease: asyncio.TimerHandle | None = None


class Handoffs:
    """What this instance has on offer, by the params that it gave out."""

    def __init__(self, engine: "VllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self._offers: dict[str, Offered] = {}
        self._past: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self.engine_id = ""
        self.read = self.expired = self.given_up = 0
        self.refused: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """Another engine id; nothing that was offered can be read any more."""
        for offer in self._offers.values():
            if offer.lease is not None:
                offer.lease.cancel()
        self._offers.clear()
        self.engine_id = str(uuid.uuid4())

    def holds(self, request_id: str) -> bool:
        """Whether KV of that request is on offer."""
        return any(offer.request_id == request_id for offer in self._offers.values())

    # --- prefill

    def offer(self, choice: Choice, request_id: str, *, wrong: bool) -> dict[str, Any]:
        """Pin the KV of a finished sequence and start its lease; gives the kv_transfer_params."""
        self._instance.ledger.pin(choice.key, "until decode has read it")
        params = self._params(choice, request_id)
        kv = kv_digest(choice.prompt.tokens, self._instance.options.seed)
        offer = Offered(choice.key, request_id, params, kv[::-1] if wrong else kv, len(choice.prompt.tokens))
        self._offers[canonical(params)] = offer
        self._lease(offer, self._engine.settings.kv_lease_s)
        return params

    def _params(self, choice: Choice, request_id: str) -> dict[str, Any]:
        settings, ledger, number = self._engine.settings, self._instance.ledger, next(self._numbers)
        first = number * 1000
        blocks = list(range(first, first + ledger.blocks(len(choice.prompt.tokens))))
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks if settings.shape == "old" else [blocks, []],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{request_id}-{number:08x}",
            "remote_host": self._instance.host,
            "remote_port": self._engine.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(choice.prompt.tokens),
            "remote_blocks_expiry_time": time.time() + settings.kv_lease_s,
            "transfer_mode": "read",
            # no connector has this: it must come back all the same
            "sim_sentinel": {"number": _BIG + 7 * number, "none": None, "nested": [[number, [None, 0.1]], [], {}]},
        }
        if settings.shape == "old":
            del params["remote_request_id"]
        for name in _LATER if settings.shape != "new" else ():
            del params[name]
        return params

    # --- decode, by the private calls

    async def open(self, request: web.Request) -> web.Response:
        """`POST /sim/kv/open`: decode begins to read; 404 with the reason if it may not."""
        given = await request.json()
        params = given["params"]
        offer = self._offers.get(canonical(params))
        reason = self._refusal(offer, params, given["request_id"])
        if offer is None or reason:
            self.refused[reason] += 1
            return web.json_response({"reason": reason}, status=404)
        offer.opened = True
        # heartbeats of the reader keep the lease alive, so it lasts as long as the reading
        self._lease(offer, self._engine.settings.kv_lease_s + given["transfer_s"])
        return web.json_response({"kv": offer.kv, "tokens": offer.kv_tokens})

    def _refusal(self, offer: Offered | None, params: dict[str, Any], request_id: str) -> str:
        if offer is not None:
            if offer.opened:
                return "used"
            other = self._engine.settings.same_request_id and offer.request_id != request_id
            return "request id" if other else ""
        past = self._past.get(canonical(params))
        if past is not None:
            return past
        if params.get("remote_engine_id") != self.engine_id:
            return "engine id"
        blocks = params.get("remote_block_ids")
        altered = any(canonical(o.params["remote_block_ids"]) == canonical(blocks) for o in self._offers.values())
        return "altered" if altered else "unknown"

    async def close(self, request: web.Request) -> web.Response:
        """`POST /sim/kv/close`: decode has read the KV, or gives it up; it is released here. 404 if it is gone."""
        given = await request.json()
        key = canonical(given["params"])
        offer = self._offers.get(key)
        if offer is None:
            return web.json_response({"reason": self._past.get(key, "unknown")}, status=404)
        if given["read"]:
            self.read += 1
            self._release(offer, "used", "read by decode")
        else:
            self.given_up += 1
            self._release(offer, "used", "given up by decode")
        return web.json_response({})

    # --- ends

    def _lease(self, offer: Offered, seconds: float) -> None:
        if offer.lease is not None:
            offer.lease.cancel()
        offer.lease = asyncio.get_running_loop().call_later(seconds, self._expire, offer)

    def _expire(self, offer: Offered) -> None:
        self.expired += 1
        self._release(offer, "expired", "expired")

    def _release(self, offer: Offered, past: str, why: str) -> None:
        key = canonical(offer.params)
        if self._offers.pop(key, None) is None:
            return
        if offer.lease is not None:
            offer.lease.cancel()
        self._past[key] = past
        if len(self._past) > _PAST_KEPT:
            self._past.popitem(last=False)
        self._instance.ledger.release(offer.key, why)

    def state(self) -> dict[str, Any]:
        """What is on offer and what became of the rest, as JSON."""
        return {
            "engine_id": self.engine_id,
            "offered": len(self._offers),
            "reading": sum(offer.opened for offer in self._offers.values()),
            "read": self.read,
            "expired": self.expired,
            "given_up": self.given_up,
            "refused": dict(self.refused),
        }
