"""Simulated disaggpb workers."""
