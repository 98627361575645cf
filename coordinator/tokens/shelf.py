"""The tokenizers of a cluster: which one an instance has, and the threads in which they work."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Final

from coordinator.core.errors import InternalError, NoInstance
from coordinator.core.instance import Instance

from .tokenizer import Tokenizer

OPTION: Final = "tokenizer"
THREADS: Final = 2
RETRY_S: Final = 30.0
Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of the files in a folder."""
Loaded = tuple[Tokenizer, Stamp]
_NO_MODELS: Mapping[str | None, Path] = MappingProxyType({})


class Tokenizers:
    """Finds and keeps tokenizers, one for each folder.

    Those that the configuration names are loaded at the start. One of an instance that comes later is loaded in a
    thread; until it is there, whoever asks for it is sent away for a second.

    Args:
        default: folder of instances that name none; None: they have no tokenizer.
        by_model: folder of each model, as far as it is not the default one.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        default: Path | None = None,
        by_model: Mapping[str | None, Path] = _NO_MODELS,
        *,
        log: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._by_model = dict(by_model)
        self._log = log or logging.getLogger("pd_coordinator.tokens")
        self._clock = clock
        self._loaded: dict[Path, Tokenizer] = {}
        self._stamps: dict[Path, Stamp] = {}
        self._loading: dict[Path, Future[Tokenizer]] = {}
        self._failed_s: dict[Path, float] = {}
        self._pool: ThreadPoolExecutor | None = None

    def load(self, folders: Iterable[Path]) -> None:
        """Load tokenizers here and now; for the start.

        Raises:
            ValueError: one cannot be loaded, in a sentence.
        """
        for folder in folders:
            if folder not in self._loaded:
                self._loaded[folder] = Tokenizer.load(folder, self._threads())

    def fresh(self, folder: Path) -> dict[Path, Loaded]:
        """Load a folder that is not there yet, or whose files have changed; nothing else changes. For any thread.

        Raises:
            ValueError: it cannot be loaded, in a sentence.
        """
        stamp = _stamp(folder)
        if folder in self._loaded and self._stamps.get(folder, stamp) == stamp:
            return {}
        return {folder: (Tokenizer.load(folder, self._threads()), stamp)}

    def adopt(self, default: Path | None, by_model: Mapping[str | None, Path], loaded: Mapping[Path, Loaded]) -> None:
        """Go by these folders from here on, with what `fresh` has loaded; requests that run keep what they have."""
        self._default = default
        self._by_model = dict(by_model)
        self._failed_s.clear()
        for folder, (tokenizer, stamp) in loaded.items():
            self._loaded[folder], self._stamps[folder] = tokenizer, stamp

    def of(self, instance: Instance) -> Tokenizer | None:
        """The tokenizer of an instance; None: it has none.

        Raises:
            NoInstance: it is still being loaded.
            InternalError: it cannot be loaded; the log says why.
        """
        given = instance.options.get(OPTION)
        folder = Path(given) if isinstance(given, str) else self._default
        if folder is None:
            return None
        self._by_model.setdefault(instance.model, folder)
        return self._of(folder)

    def for_model(self, model: str | None) -> Tokenizer | None:
        """The tokenizer of a model, for those who choose an instance by what is in the prompt; None: unknown.

        Raises:
            NoInstance, InternalError: as `of`.
        """
        folder = self._by_model.get(model, self._default)
        if folder is None and len(set(self._by_model.values())) == 1:
            folder = next(iter(self._by_model.values())) if model is None or None in self._by_model else None
        return None if folder is None else self._of(folder)

    def expect(self, instance: Instance) -> None:
        """Begin to load the tokenizer of an instance that has just come, before its first request."""
        try:
            self.of(instance)
        except (NoInstance, InternalError):
            return

    async def aclose(self) -> None:
        """Begin nothing more in the threads; what runs there is left to end by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, folder: Path) -> Tokenizer:
        found = self._loaded.get(folder)
        if found is not None:
            return found
        loading = self._loading.get(folder)
        if loading is None:
            self._begin(folder)
        elif loading.done():
            del self._loading[folder]
            return self._take(folder, loading)
        raise NoInstance("the tokenizer of this model is being loaded")

    def _begin(self, folder: Path) -> None:
        failed_s = self._failed_s.get(folder)
        if failed_s is not None and self._clock() - failed_s < RETRY_S:
            raise InternalError(f"no tokenizer in {folder}")
        self._loading[folder] = self._threads().submit(Tokenizer.load, folder, self._threads())

    def _take(self, folder: Path, loading: Future[Tokenizer]) -> Tokenizer:
        try:
            tokenizer = self._loaded[folder] = loading.result(timeout=0)
        except ValueError as error:
            self._failed_s[folder] = self._clock()
            self._log.error("a tokenizer cannot be loaded: %s", error)
            raise InternalError(str(error)) from error
        return tokenizer

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        return self._pool


def _stamp(folder: Path) -> Stamp:
    """Tells whether the files of a folder have changed; empty for one that cannot be read."""
    try:
        stats = sorted((entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return ()
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats)
