"""Decides where each request runs and keeps account of it: filter, rank, pick, lease; a bounded line for the rest."""

from .lease import Lease
from .scheduler import Scheduler

__all__ = ["Lease", "Scheduler"]
