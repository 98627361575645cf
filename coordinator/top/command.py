"""The command: its arguments, and the ways in which it can show the feed."""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from .feed import FeedLost, KeyRefused, Source, listen
from .frame import draw
from .paint import Paint
from .shown import Shown
from .terminal import Terminal
from .view import SORTS, View, step

URL = "http://127.0.0.1:1026"
KEY_VARIABLE = "PD_COORDINATOR_KEY"
FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
ENOUGH_EVENTS = 2  # rates need two
ONCE_S = 15.0
LOOK_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
COLUMNS_OF_A_PIPE = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pd-coordinator top`."""
    parser.add_argument("--url", default=URL, help="management port of the coordinator (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--json", action="store_true", help="JSON, one line a second; with --once one alone")
    parser.add_argument(
        "--sort", choices=[name.removesuffix("_s") for name in SORTS], default="id", help="order of rows"
    )
    key = f"file with a management key in its first line (default: the variable {KEY_VARIABLE})"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=key)
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file with the authorities to go by")
    parser.add_argument(
        "--cert-file", type=Path, metavar="FILE", help="PEM file with a certificate of yours and its key"
    )


def run(args: argparse.Namespace) -> int:
    """Show the feed; returns the exit status."""
    try:
        source = Source(args.url, _key(args.key_file), args.ca_file, args.cert_file)
        source.trust()
    except (OSError, ValueError) as error:
        return _complain(str(error), WRONG_USAGE)
    if not source.url.startswith(("http://", "https://")):
        return _complain("--url must begin with http:// or https://", WRONG_USAGE)
    view = View(sort=next(name for name in SORTS if name.removesuffix("_s") == args.sort))
    if not (args.once or args.json) and not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _complain("this is no terminal: ask for --once or --json", WRONG_USAGE)
    try:
        if args.once:
            return asyncio.run(_once(source, view, as_json=args.json))
        return asyncio.run(_lines(source) if args.json else _screen(source, view))
    except FeedLost as error:
        return _complain(f"{error} ({source.url})", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _complain(sentence: str, status: int) -> int:
    sys.stderr.write(f"top: {sentence}\n")
    return status


def _key(path: Path | None) -> str:
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    return path.read_text("utf-8").partition("\n")[0].strip()


# --- for programs and scripts


async def _once(source: Source, view: View, *, as_json: bool) -> int:
    """Print one frame, with rates if the coordinator still answers after a second."""
    shown = Shown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ONCE_S), contextlib.aclosing(listen(source)) as events:
            async for kind, data in events:
                _take(shown, kind, data)
                if shown.events >= ENOUGH_EVENTS:
                    break
    if not shown.events:
        raise FeedLost("nothing has come")
    if as_json:
        _print_json(shown)
    else:
        columns = shutil.get_terminal_size((COLUMNS_OF_A_PIPE, 0)).columns
        paint = Paint(columns, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
        _print("\n".join(draw(shown, replace(view, keys=False), paint, 0).lines))
    return 0


async def _lines(source: Source) -> int:
    """Print everything as a line of JSON, each second, until the feed ends."""
    shown = Shown()
    async with contextlib.aclosing(listen(source)) as events:
        async for kind, data in events:
            _take(shown, kind, data)
            _print_json(shown)
    return 0


def _print_json(shown: Shown) -> None:
    _print(msgspec.json.encode(shown.as_data()).decode())


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _take(shown: Shown, kind: str, data: dict[str, object]) -> None:
    try:
        shown.take(kind, data)
    except (ValueError, KeyError, IndexError, TypeError):
        raise FeedLost("what came is no live feed of this version") from None


# --- for people


async def _screen(source: Source, view: View) -> int:
    """Show the feed until the person leaves."""
    with Terminal(sys.stdin.fileno(), sys.stdout.fileno()) as terminal:
        return await _Session(source, view, terminal).run()


class _Session:
    """The feed, the keys and the size of a terminal, and the frames that are made of them."""

    def __init__(self, source: Source, view: View, terminal: Terminal) -> None:
        self._source = source
        self._view: View | None = view
        self._terminal = terminal
        self._shown = Shown()
        self._lost = ""
        self._page = 1
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Draw whenever something has changed."""
        loop = asyncio.get_running_loop()
        feed = asyncio.create_task(self._follow(), name="live feed")
        loop.add_reader(self._terminal.source, self._read_keys)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave)
        try:
            while self._view is not None and not feed.done():
                self._changed.clear()
                self._draw(self._view)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
            if feed.done():
                await feed
        finally:
            loop.remove_reader(self._terminal.source)
            feed.cancel()
            await asyncio.wait([feed])
        return 0

    def _draw(self, view: View) -> None:
        columns, lines = self._terminal.size
        paint = Paint(columns, colours=not os.environ.get("NO_COLOR"))
        frame = draw(self._shown, view, paint, lines, self._lost)
        self._view, self._page = replace(view, scroll=frame.scroll), frame.page
        self._terminal.show(frame.lines)

    def _read_keys(self) -> None:
        keys = self._terminal.keys()
        if not keys:
            self._leave()
        for key in keys:
            if self._view is not None:
                self._view = step(self._view, key, self._page)
        self._changed.set()

    def _leave(self) -> None:
        self._view = None
        self._changed.set()

    async def _follow(self) -> None:
        """Listen again and again; raises KeyRefused, where that would not help."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with contextlib.aclosing(listen(self._source)) as events:
                    async for kind, data in events:
                        _take(self._shown, kind, data)
                        self._lost, pause_s = "", FIRST_PAUSE_S
                        self._changed.set()
            except KeyRefused:
                self._changed.set()
                raise
            except FeedLost as error:
                self._lost = str(error)
                self._changed.set()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
