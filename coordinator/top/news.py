"""The lower part of a frame: the last failures and the last requests."""

from coordinator.core.errors import EngineFailed, Outcome
from coordinator.observability.recent import Failure, Path

from .paint import BAD, PLAIN, SOFT, WARN, Paint
from .shown import Shown
from .words import age, clean, count, fit, span, words

MOST_FAILURES = 4
MOST_PATHS = 5
STAGES = ("queue", "prefill", "handoff", "decode")


def news(shown: Shown, paint: Paint, now_s: float) -> list[str]:
    """Failures by kind and requests that have ended, the newest first; `now_s` by the coordinator's clock."""
    failures = [paint.line(_failure(one, now_s)) for one in shown.failures[:MOST_FAILURES]]
    paths = [paint.line(_path(one, now_s)) for one in shown.paths[:MOST_PATHS]]
    return [
        paint.title("LAST FAILURES, BY KIND"),
        *(failures or [paint.line((SOFT, "none since the start"))]),
        "",
        paint.title("LAST REQUESTS"),
        *(paths or [paint.line((SOFT, "none has ended yet"))]),
    ]


def _failure(failure: Failure, now_s: float) -> tuple[str, str]:
    name = ": ".join(part for part in (failure.code, failure.reason) if part)
    if failure.code == EngineFailed.code and failure.reason:
        name = failure.reason
    who = f"{failure.side} {failure.instance}".strip()
    good = f", {count(failure.survived)} made good elsewhere" if failure.survived else ""
    text = f"{age(now_s - failure.at_s):>4} ago  {words(name)} x{failure.count}, {who}{good}  {failure.request}"
    return (WARN if failure.survived == failure.count else BAD, clean(text))


def _path(path: Path, now_s: float) -> tuple[str, str]:
    where = path.prefill if path.prefill == path.decode else f"{path.prefill} > {path.decode}"
    spent = zip(STAGES, (path.queue_s, path.prefill_s, path.handoff_s, path.decode_s), strict=True)
    stages = "  ".join(f"{stage} {span(s):>7}" for stage, s in spent)
    text = (
        f"{age(now_s - path.at_s):>4} ago  {fit(clean(where) or 'not placed', 16)}  {stages}"
        f"  total {span(path.duration_s):>7}  {fit(words(path.outcome), 12)}  {clean(path.id)}"
    )
    return (PLAIN if path.outcome == Outcome.OK else BAD, clean(text))
