"""One frame: what has been shown so far as lines of text."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.observability.moving import Latency

from .news import STAGES, news
from .paint import BAD, BOLD, GOOD, PLAIN, SOFT, WARN, Paint, Part
from .shown import Shown
from .table import chosen, table
from .view import View
from .words import clean, count, fit, span, spark, words

SPARK_COLUMNS = 30
RATE_COLUMNS = 22
LATENCY_COLUMNS = 48
LEAST_ROWS = 3


class Frame(NamedTuple):
    """Lines, and how they were made.

    `scroll`: rows that are left out at the top; `page`: rows that there was room for.
    """

    lines: list[str]
    scroll: int
    page: int


def draw(shown: Shown, view: View, paint: Paint, lines: int, lost: str = "") -> Frame:
    """Make a frame of exactly so many lines, or, for 0, of as many as it takes; `lost`: why there is no feed."""
    now_s = shown.at_s
    head = [*_title(shown, paint, lost), *_figures(shown, paint), ""]
    below = ["", *news(shown, paint, now_s)] if view.news else []
    foot = 1 if view.keys else 0
    rows = chosen(shown.instances, view)
    page = max(LEAST_ROWS, lines - len(head) - len(below) - foot - 1) if lines else max(1, len(rows))
    scroll = max(0, min(view.scroll, len(rows) - page))
    middle = table(rows[scroll : scroll + page], view, paint, now_s)
    keys = [_keys(view, paint, f"{scroll + 1}-{min(len(rows), scroll + page)} of {len(rows)}")] if view.keys else []
    if not lines:
        return Frame([*head, *middle, *below, *keys], scroll, page)
    body = [*head, *middle, *[""] * (page + 1 - len(middle)), *below][: lines - foot]
    return Frame([*body, *[""] * (lines - foot - len(body)), *keys], scroll, page)


def _title(shown: Shown, paint: Paint, lost: str) -> list[str]:
    about = shown.about
    parts = ["pd-coordinator", str(about.get("version", "")), str(about.get("model") or "")]
    if about.get("workers", 1) != 1:
        parts.append(f"{about['workers']} workers")
    clock = time.strftime("%H:%M:%S", time.localtime(shown.at_s)) if shown.events else ""
    told = f"LOST, {clean(lost)}; from {clock or 'nowhere'}" if lost else f"live {clock}" if clock else "connecting"
    name = clean("  ".join(part for part in parts if part))
    title = paint.line((BOLD, fit(name, paint.columns - len(told) - 1)), (PLAIN, " "), (BAD if lost else GOOD, told))
    if shown.figures is None:
        return [title, ""]
    ready = shown.figures.ready
    why = clean(shown.figures.why)
    return [title, paint.line((SOFT if ready else BAD, f"{'Ready' if ready else 'NOT READY'}: {why}"))]


def _figures(shown: Shown, paint: Paint) -> list[str]:
    figures = shown.figures
    if figures is None:
        return [""] * 4
    moving = figures.moving
    bars = max(0, min(SPARK_COLUMNS, paint.columns - RATE_COLUMNS - LATENCY_COLUMNS - 2))
    requests, tokens = [rate[0] for rate in shown.rates], [rate[1] for rate in shown.rates]
    stages = " > ".join(f"{stage} {count(figures.stages.get(stage))}" for stage in STAGES)
    return [
        paint.line(*_rate("requests/s", moving.requests_s, requests, bars), *_latency("first token", moving.ttft_s)),
        paint.line(*_rate("tokens/s", moving.tokens_s, tokens, bars), *_latency("between tokens", moving.itl_s)),
        paint.line(
            (PLAIN, f"in flight {count(figures.in_flight)}   queued {count(figures.queued)}   "),
            (BAD if moving.failures_s else PLAIN, f"failures/s {count(moving.failures_s)}"),
        ),
        paint.line(
            (PLAIN, stages), (WARN, f"   bottleneck: {words(figures.bottleneck)}" if figures.bottleneck else "")
        ),
    ]


def _rate(name: str, value: float | None, history: Sequence[float | None], bars: int) -> list[Part]:
    chart = spark(history, bars) + "  " if bars else ""
    return [(PLAIN, f"{name:<11}"), (BOLD, fit(count(value), 8, right=True)), (PLAIN, "   "), (SOFT, chart)]


def _latency(name: str, latency: Latency) -> list[Part]:
    others = f"  95% {span(latency.p95):>7}  99% {span(latency.p99):>7}"
    return [(PLAIN, f"{name:<15}"), (BOLD, fit(span(latency.p50), 7, right=True)), (PLAIN, others)]


def _keys(view: View, paint: Paint, shown: str) -> str:
    if view.typing:
        return paint.line((BOLD, f"filter: {clean(view.filter)}_"), (SOFT, "   Enter keeps it, Escape drops it"))
    chosen_filter = f" ({clean(view.filter)})" if view.filter else ""
    sort = words(view.sort.removesuffix("_s"))
    told = f"q quit   s sort ({sort})   r reverse   / filter{chosen_filter}   n news   arrows scroll   "
    return paint.line((SOFT, told + shown))
