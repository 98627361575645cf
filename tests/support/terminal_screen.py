"""A terminal: a process on a pseudo-terminal, and what would stand on its screen."""

import asyncio
import codecs
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios

WITHIN_S = 30.0
TAKE_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""  # a program of its own: what runs between fork and exec in a process with gRPC's threads, gRPC complains about
_cut = re.compile(r"\x1b(\[\??[\d;]*)?\Z")  # a sequence whose rest comes with the next read
_piece = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]+", re.DOTALL)


class Screen:
    """Takes what a program writes: positions, erasing, modes, text."""

    def __init__(self, columns, lines):
        self.columns, self.lines = columns, lines
        self.cells = {}
        self.at = (0, 0)
        self.modes = set()
        self.unknown = []
        self._kept = ""

    def take(self, text):
        text, self._kept = self._kept + text, ""
        if cut := _cut.search(text):
            text, self._kept = text[: cut.start()], cut.group()
        for found in _piece.finditer(text):
            private, numbers, final = found.groups()
            if final:
                self._command(private, [int(n or 0) for n in numbers.split(";")], final)
            elif found.group() == "\r":
                self.at = (self.at[0], 0)
            elif found.group() == "\n":
                self.at = (self.at[0] + 1, self.at[1])
            elif found.group().startswith("\x1b"):
                self.unknown.append(found.group())
            else:
                for c in found.group():
                    self.cells[self.at] = c
                    self.at = (self.at[0], self.at[1] + 1)

    def _command(self, private, numbers, final):
        line, column = self.at
        if private:
            (self.modes.add if final == "h" else self.modes.discard)(numbers[0])
        elif final == "H":
            self.at = (numbers[0] - 1, (numbers[1] if len(numbers) > 1 else 1) - 1)
        elif final == "K":
            self.cells = {at: c for at, c in self.cells.items() if at[0] != line or at[1] < column}
        elif final == "J":
            self.cells = {} if numbers[0] == 2 else {at: c for at, c in self.cells.items() if at < self.at}
        elif final != "m":
            self.unknown.append(final)

    @property
    def text(self):
        rows = []
        for line in range(self.lines):
            at = [column for row, column in self.cells if row == line]
            rows.append("".join(self.cells.get((line, column), " ") for column in range(max(at, default=-1) + 1)))
        return "\n".join(rows)

    @property
    def outside(self):
        """Whether anything was written beside the screen, where a real terminal would have wrapped or scrolled."""
        return any(line >= self.lines or column >= self.columns for line, column in self.cells)


class TerminalProcess:
    """A program on a terminal of its own."""

    def __init__(self, *command, columns=120, lines=40):
        self._command = command
        self.screen = Screen(columns, lines)
        self.raw = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    async def __aenter__(self):
        self._master, slave = pty.openpty()
        self._set_size()
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", TAKE_TERMINAL, *self._command,
            stdin=slave, stdout=slave, stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_):
        asyncio.get_running_loop().remove_reader(self._master)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def _read(self):
        with contextlib.suppress(OSError):
            text = self._decode(os.read(self._master, 65536))
            self.raw += text
            self.screen.take(text)

    def _set_size(self):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0))

    def resize(self, columns, lines):
        """Another size; the program is told."""
        self.screen.columns, self.screen.lines = columns, lines
        self.screen.cells = {}
        self._set_size()

    def press(self, text):
        """Send keys."""
        os.write(self._master, text.encode())

    @property
    def modes(self):
        """How the terminal is set."""
        return termios.tcgetattr(self._slave)

    async def sees(self, pattern):
        """Wait until a text is on the screen; returns the match."""
        for _ in range(int(WITHIN_S / 0.02)):
            if found := re.search(pattern, self.screen.text, re.MULTILINE):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"never seen: {pattern}\n{self.screen.text}")

    async def end(self):
        """Wait for its end; returns status and what it complained about."""
        async with asyncio.timeout(WITHIN_S):
            _, told = await self.process.communicate()
        self._read()
        return self.process.returncode, told.decode()
