"""Engine protocol `disaggpb`: two gRPC calls, and the KV between them travels through the coordinator."""

from coordinator.engines.disaggpb.engine import DisaggpbEngine

__all__ = ["DisaggpbEngine"]
