"""What all tests have in common."""

from hypothesis import HealthCheck, settings

# the first text of a run takes Hypothesis some seconds, longer than it allows itself on a slow machine
settings.register_profile("any-machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
