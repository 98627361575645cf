"""`python -m coordinator.workers SOCKET_FD BOARD_FD`: one worker; started by the supervisor."""

import sys

from coordinator.workers.worker import main

sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
