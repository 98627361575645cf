"""Patterns in files of their own."""

import importlib.util
import sys
import traceback
import zlib
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

LOADING: ContextVar[bool] = ContextVar("LOADING", default=False)
"""True while a pattern's file is loaded by the coordinator, so that a `serve(...)` at its end does nothing."""


def load_file(path: Path) -> ModuleType:
    """The module of a Python file; a file is executed once in a process, however often it is asked for.

    Raises:
        ValueError: it cannot be loaded, with the file and line at fault.
    """
    path = path.absolute()
    name = f"pd_pattern_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does, for classes that ask for their module
    token = LOADING.set(True)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be loaded: {place_of(error, path)}") from error
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        LOADING.reset(token)
    return module


def place_of(error: BaseException, path: Path | str) -> str:
    """The kind of an error and where in a file it came up: the last line of that file on its way, else of any file."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    last = (own or list(frames))[-1:]
    return type(error).__name__ + "".join(f" in {frame.filename}, line {frame.lineno}" for frame in last)
