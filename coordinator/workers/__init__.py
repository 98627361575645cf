"""Several processes on one data port (`server.workers`).

    supervisor: cluster, health checks, management plane, every standing stream of an engine
        │ channel (one socket pair per worker): views and stream messages down; failures and metrics up
        │ board (shared memory): each worker's loads, one row per worker
    worker (N): front door, dispatcher, scheduler, engine calls; all listen on the same port

The supervisor serves no client, so it is not what breaks; a worker that dies takes its own requests with it, its row is
cleared and another process takes its place.
"""
