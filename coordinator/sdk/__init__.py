"""The public interface for orchestration patterns: a router in a few lines of Python (docs/patterns.md)."""

from . import microserving_entrypoints, openai_api_protocol
from .router import Router
from .run import Run, Server
from .serving import serve

__all__ = ["Router", "Run", "Server", "microserving_entrypoints", "openai_api_protocol", "serve"]
