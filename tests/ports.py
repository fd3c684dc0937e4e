"""Free ports on the loopback interface."""

import socket

# Ports of a Ray node that collide with another node's on the same host.
NODE_PORTS = ["dashboard-agent-listen-port", "dashboard-agent-grpc-port", "node-manager-port"]
NODE_PORTS += ["object-manager-port", "runtime-env-agent-port", "metrics-export-port"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports
