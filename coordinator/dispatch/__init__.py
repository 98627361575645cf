"""The whole life of one request: admit, place, serve, retry, resume, account."""

from coordinator.dispatch.dispatcher import Dispatcher, DispatchLimits

__all__ = ["DispatchLimits", "Dispatcher"]
