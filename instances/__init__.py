"""Simulated engine instances that speak the real wire protocols."""
