"""Decides where each request runs and keeps account of it: filter, rank, pick, lease; a bounded line for the rest."""

from .board import LoadBoard, size_bytes
from .lease import Lease
from .scheduler import Scheduler
from .shared import SharedLoads

__all__ = ["Lease", "LoadBoard", "Scheduler", "SharedLoads", "size_bytes"]
