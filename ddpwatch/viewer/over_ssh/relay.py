"""The end on the run's host (``ddpwatch _stdio``): a viewer that passes on all it receives."""

from __future__ import annotations

import os
import signal
import sys
import time

import zmq

from ddpwatch.errors import DdpwatchError
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.over_ssh import protocol
from ddpwatch.wire import transport

BATCH = 1000  # messages between two looks at stdin


class Relay:
    """Publishes a run on stdout and takes requests from stdin, until that closes.

    Writing blocks: what a slow connection does not take stays in the socket's queue, and is lost when that is full, as
    for any viewer. A viewer that gives no sign of life ends it by SIGALRM, even then.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._context = transport.Context()
        self._socket = transport.viewer_socket(self._context, info.publish)
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._requests = b""
        self._heard_s = time.monotonic()

    def run(self, silence_s: float) -> None:
        """Relays until stdin closes.

        Args:
            silence_s: After so long without a frame, the collector counts as gone if the run is not live any more.

        Raises:
            DdpwatchError: It is gone.
        """
        self._write(protocol.opening(self._info.run_id, self._info.world_size).line())
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._in, zmq.POLLIN)
        signal.alarm(protocol.VIEWER_GONE_S)
        while True:
            ready = dict(poller.poll(500))
            if self._in in ready and not self._take_requests():
                return
            self._pass_on()
            silent = time.monotonic() - self._heard_s > silence_s
            if silent and not rundir.is_live(self._info.publish):
                raise DdpwatchError(f"no frame from the collector for {silence_s:.0f} s: it is gone")

    def close(self) -> None:
        """Closes the socket."""
        signal.alarm(0)
        self._socket.close()
        self._context.term()

    def _take_requests(self) -> bool:
        """Subscribes as asked. Returns False at the end of stdin."""
        data = os.read(self._in, 1 << 16)
        signal.alarm(protocol.VIEWER_GONE_S)
        *lines, self._requests = (self._requests + data).split(b"\n")
        for sign, topic in filter(None, map(protocol.parse_request, lines)):
            (self._socket.subscribe if sign == b"+" else self._socket.unsubscribe)(topic)
        return bool(data) and len(self._requests) < 1 << 16

    def _pass_on(self) -> None:
        packed: list[bytes] = []
        while len(packed) < BATCH and self._socket.poll(0):
            topic, envelopes = transport.parse_published(self._socket.recv_multipart()) or (b"", [])
            packed += [protocol.pack(envelope.parts(topic)) for envelope in envelopes]
        if packed:
            self._heard_s = time.monotonic()
            self._write(b"".join(packed))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._out, left) :]
