"""The other port: instances API, probes, metrics, and the calls of the MindIE controller."""

from .config_calls import ConfigCalls
from .controller import Controller
from .engine_metrics import EngineMetrics, EngineMetricsSettings
from .loads import LoadReader, Traffic, TrafficReader
from .server import Listen, Management
from .stages import StageWatch

__all__ = [
    "ConfigCalls",
    "Controller",
    "EngineMetrics",
    "EngineMetricsSettings",
    "Listen",
    "LoadReader",
    "Management",
    "StageWatch",
    "Traffic",
    "TrafficReader",
]
