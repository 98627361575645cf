"""The one mutable set of instances: who is there, how well, and the views that everybody else reads."""

from .cluster import Changes, Cluster
from .health import HealthSettings

__all__ = ["Changes", "Cluster", "HealthSettings"]
