"""One data port for several processes."""

import socket

import pytest

from coordinator.workers.port import ReservedPort

HOST = "127.0.0.1"


def shared_socket(port):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((HOST, port))
    return sock


def test_workers_may_listen_there_and_nobody_else():
    reserved = ReservedPort(HOST, 0)
    try:
        assert reserved.port
        with shared_socket(reserved.port) as one, shared_socket(reserved.port) as two:
            one.listen()
            two.listen()
            with socket.create_connection((HOST, reserved.port)):
                pass
        with socket.socket() as alien, pytest.raises(OSError, match="in use"):
            alien.bind((HOST, reserved.port))
    finally:
        reserved.close()
    with socket.socket() as free:
        free.bind((HOST, reserved.port))


def test_somebody_listens_there():
    with socket.socket() as alien:
        alien.bind((HOST, 0))
        alien.listen()
        with pytest.raises(OSError, match="in use"):
            ReservedPort(HOST, alien.getsockname()[1])


def test_somebody_shares_the_port_already():
    """Another coordinator's workers: the system would let us in beside them."""
    first = ReservedPort(HOST, 0)
    try:
        with shared_socket(first.port) as worker:
            worker.listen()
            with pytest.raises(OSError, match="in use"):
                ReservedPort(HOST, first.port)
        ReservedPort(HOST, first.port).close()  # nobody listens any more
    finally:
        first.close()


def test_the_port_of_connections_that_have_just_ended():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)):
            accepted, _ = server.accept()
            accepted.close()  # the first to close keeps the port for a while
    ReservedPort(HOST, port).close()


@pytest.mark.parametrize("host", ["localhost", "", "::1"])
def test_hosts_of_other_kinds(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        reserved = ReservedPort(host, 0)
    except OSError:
        if host == "::1":
            pytest.skip("no IPv6")
        raise
    assert reserved.port
    reserved.close()


def test_an_unknown_host():
    with pytest.raises(socket.gaierror):
        ReservedPort("no.such.host.invalid", 0)
