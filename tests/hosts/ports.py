"""Free ports of this machine, for servers that tests start."""

import random
import socket


def free_ports(count: int) -> int:
    """The first of so many free ports in a row; below those that the system gives to outgoing
    connections.
    """
    for port in random.sample(range(21_000, 30_000, count), 100):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")
