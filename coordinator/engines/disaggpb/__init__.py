"""Engine protocol `disaggpb`: two gRPC calls, and the KV between them travels through the coordinator."""
