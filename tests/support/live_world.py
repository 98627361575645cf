"""A made-up cluster for the live feed: what a test says is on it, in the shapes of the real thing."""

import random

from coordinator.core.errors import EngineFailed, NoInstance, Outcome, Side
from coordinator.management.live_picture import Look, Row
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.observability.moving import own_part
from coordinator.observability.recent import Recent

SINCE_S = 1_795_990_000


def row(ident="p0", **changed):
    role = {"p": "prefill", "d": "decode", "h": "hybrid"}[ident[0]]
    number = int(ident[1:])
    given = {
        "id": ident,
        "role": role,
        "engine": "vllm",
        "url": f"http://10.0.{number // 250}.{number % 250 + 1}:8000",
        "model": "m",
        "state": "ready",
        "since_s": SINCE_S,
        "reason": "",
        "requests": 0,
        "pinned": 0,
        "blocks": 0,
    }
    return Row(**{**given, **changed})


def look(rows=(), **changed):
    given = {
        "rows": list(rows),
        "recently": Recent().read(),
        "parts": [],
        "ready": True,
        "why": "prefill instance p0 and decode instance d0 take requests",
        "in_flight": 0,
        "queued": 0,
        "stages": {"queue": 0, "prefill": 0, "handoff": 0, "decode": 0},
        "bottleneck": None,
    }
    return Look(**{**given, **changed})


class FixedSight:
    """Gives the look that a test has set."""

    def __init__(self, *rows):
        self.rows = list(rows)
        self.looks = 0
        self.error = None
        self.changed = {}

    async def look(self):
        self.looks += 1
        if self.error is not None:
            raise self.error
        return look(self.rows, **self.changed)


class BusySight:
    """A cluster under load that a seed decides upon, another moment with each look."""

    def __init__(self, prefill=4, decode=8, *, seed=1, rate=40, failing=0.02, days_s=1_795_993_800.0):
        self.rng = random.Random(seed)
        self.names = {"prefill": [f"p{i}" for i in range(prefill)], "decode": [f"d{i}" for i in range(decode)]}
        self.rate = rate
        self.failing = failing
        self.states = {}
        self.metrics = Metrics(["openai"])
        self.days_s = days_s
        self.recent = Recent(lambda: self.days_s)
        self.number = 0

    async def look(self):
        return self.now()

    def set_state(self, ident, state, reason=""):
        self.states[ident] = (state, reason)

    def now(self):
        """The next second."""
        self.days_s += 1
        rng = self.rng
        for _ in range(rng.randint(self.rate * 2 // 3, self.rate * 4 // 3)):
            self.finish()
        rows = [self._row(ident) for idents in self.names.values() for ident in idents]
        by_role = {role: [r for r in rows if r.role == role] for role in self.names}
        prefill = sum(r.requests for r in by_role["prefill"])
        handoff = sum(r.pinned for r in by_role["prefill"])
        placed = sum(r.requests for r in by_role["decode"])
        stages = {
            "queue": rng.randint(0, 6),
            "prefill": prefill,
            "handoff": handoff,
            "decode": max(0, placed - prefill - handoff),
        }
        return look(
            rows,
            recently=self.recent.read(),
            parts=[own_part(self.metrics)],
            in_flight=placed + stages["queue"],
            queued=stages["queue"],
            stages=stages,
            bottleneck="prefill",
        )

    def finish(self, **changed):
        """One request ends."""
        rng, self.number = self.rng, self.number + 1
        queue_s, prefill_s = rng.expovariate(40), rng.lognormvariate(-1.6, 0.5)
        handoff_s, tokens = rng.lognormvariate(-3.8, 0.4), rng.randint(40, 220)
        gap_s = rng.lognormvariate(-4.0, 0.2)
        record = RequestRecord(f"{rng.getrandbits(64):016x}", "openai", "/v1/chat/completions", stream=True)
        record.prefill, record.decode = rng.choice(self._ready("prefill")), rng.choice(self._ready("decode"))
        record.attempts, record.events = 1, tokens
        record.queue_s, record.prefill_s, record.handoff_s = queue_s, prefill_s, handoff_s
        record.decode_s = gap_s * tokens
        record.ttft_s = queue_s + prefill_s + handoff_s
        record.duration_s = record.ttft_s + record.decode_s
        if rng.random() < self.failing:
            record.blame(EngineFailed(Side.DECODE, record.decode, rng.choice(["reset", "link_lost", "closed"])))
            record.attempts = 2
        elif rng.random() < self.failing / 5:
            record.failed(NoInstance("no instance"))
        for key, value in changed.items():
            setattr(record, key, value)
        cells = self.metrics.for_api("openai")
        cells.outcome(record.outcome).inc()
        if record.outcome is Outcome.OK:
            cells.ttft.observe(record.ttft_s)
            for _ in range(tokens - 1):
                cells.itl.observe(rng.lognormvariate(-4.0, 0.2))
        self.recent.take(record)
        return record

    def _ready(self, role):
        return [ident for ident in self.names[role] if self.states.get(ident, ("ready",))[0] == "ready"]

    def _row(self, ident):
        state, reason = self.states.get(ident, ("ready", ""))
        if state == "down":
            return row(ident, model="qwen3-32b", state=state, reason=reason)
        prefill = ident.startswith("p")
        requests = self.rng.randint(0, 4) if prefill else self.rng.randint(6, 24)
        return row(
            ident,
            model="qwen3-32b",
            state=state,
            reason=reason,
            requests=requests,
            pinned=self.rng.randint(0, 2) if prefill else 0,
            blocks=requests * self.rng.randint(18, 30),
        )
