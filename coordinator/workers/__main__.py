"""`python -m coordinator.workers SOCKET_FD BOARD_FD`: one worker; started by the supervisor."""

import signal
import sys

# meant for the supervisor, which tells its workers; before the imports, which take long enough to be interrupted
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)

from coordinator.workers.running import main  # noqa: E402

sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
