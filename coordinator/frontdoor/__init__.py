"""The front door: HTTP requests of clients in, requests for the dispatcher out; answers of our own."""

from coordinator.frontdoor.door import DoorSettings, FrontDoor, Telemetry
from coordinator.frontdoor.models import ModelNames

__all__ = ["DoorSettings", "FrontDoor", "ModelNames", "Telemetry"]
