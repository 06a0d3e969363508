"""A port on loopback, for what is served to a browser or an agent on this machine, below a random token."""

from __future__ import annotations

import secrets
import socket

from ddpwatch.errors import UsageError

HOST = "127.0.0.1"


def listen(port: int) -> tuple[socket.socket, str, str]:
    """Opens a port, 0 for any that is free; returns its socket, a token, and the address below which to serve.

    Raises:
        UsageError: The port is taken.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise UsageError(f"port {port}: {error.strerror}", "--port chooses another") from error
    token = secrets.token_urlsafe(24)
    return listener, token, f"http://{HOST}:{listener.getsockname()[1]}/{token}/"
