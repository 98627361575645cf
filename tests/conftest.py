"""What all tests have in common."""

import signal

from hypothesis import HealthCheck, settings

# the first text of a run takes Hypothesis some seconds, longer than it allows itself on a slow machine; and any example
# may take longer than its deadline, however little there is to do, while others have the processors
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# a shell has what it starts in the background ignore Ctrl-C, and so would everything that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
