"""The viewer's end: a subscriber whose connection is a process of ssh.

It has the methods of a ZeroMQ socket that `LiveSource` uses. Reading never waits longer than asked for. What a viewer
does not read stays in the pipe, and then on the other host, so nothing grows here. A connection that breaks is made
again, for the same run; `LiveSource` finds what was lost meanwhile by its numbers, and asks for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections import deque

import zmq

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.viewer.over_ssh import protocol
from ddpwatch.viewer.over_ssh.address import Address
from ddpwatch.viewer.over_ssh.ending import Ending, ending
from ddpwatch.wire.transport import SNAPSHOT

PAUSES_S = (1.0, 2.0, 5.0, 10.0)  # between two attempts to connect again
GIVE_UP_S = 600.0  # after so long without a connection
SILENT_S = 30.0  # the collector sends twice a second; after so long without a byte, the connection counts as dead
ENDED_S = 1.0  # in which ssh ends after it has closed its output


class SshLink:
    """Subscribes to a run on another host.

    The first connection may ask for a password on the terminal; later ones cannot, as a dashboard may have it.

    Attributes:
        opening: What the other end has said of itself and the run.
        trouble: Why nothing comes at present, or why nothing more will; empty while connected.
        over: It has given up.

    Raises:
        DdpwatchError: There is no such run, or no way to it.
    """

    def __init__(self, address: Address) -> None:
        self.trouble = ""
        self.over = False
        self._address = address
        self._topics: list[bytes] = []
        self._messages: deque[list[bytes]] = deque()
        self._attempts = 0  # to connect again, since the connection broke
        self._retry_s = self._broke_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start(first=True)
        try:
            self.opening = self._first_opening()
        except BaseException:
            self._kill()
            raise
        self._address = address._replace(run=self.opening.run_id)

    def poll(self, timeout_ms: int) -> bool:
        """Returns whether a message is there; waits for one up to ``timeout_ms``."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._messages:
            left = deadline - time.monotonic()
            self._turn(max(left, 0.0))
            if left <= 0:
                break
        return bool(self._messages)

    def recv_multipart(self, flags: int = zmq.DONTWAIT) -> list[bytes]:
        """Returns the next message.

        Raises:
            zmq.Again: There is none.
        """
        if not self.poll(0):
            raise zmq.Again
        return self._messages.popleft()

    def subscribe(self, topic: bytes) -> None:
        """Asks for messages on a topic; again, when the connection is made again, unless it is a snapshot's."""
        self._topics.append(topic)
        self._send(protocol.request(b"+", topic))

    def unsubscribe(self, topic: bytes) -> None:
        """Asks for them no more."""
        self._topics = [other for other in self._topics if other != topic]
        self._send(protocol.request(b"-", topic))

    def close(self) -> None:
        """Ends ssh."""
        self.over = True
        self._kill()

    def _turn(self, timeout_s: float) -> None:
        """Reads; connects again when that is due."""
        if self._process is None:
            now = time.monotonic()
            time.sleep(timeout_s if self.over else min(timeout_s, max(self._retry_s - now, 0.0)))
            if not self.over and time.monotonic() >= self._retry_s:
                self._start_again()
            return
        try:
            if not self._read(timeout_s):
                self._broken(self._ending())
        except DdpwatchError as error:
            self._broken(Ending(error, final=True))
        if self._process is not None:
            self._check()

    def _check(self) -> None:
        """Checks whether the connection is there, or there again, or only seems to be."""
        now = time.monotonic()
        if self._unpacker.opening is not None:
            self.trouble, self._attempts = "", 0
        if now - self._heard_s > SILENT_S:
            self._broken(Ending(DdpwatchError(f"{self._address.node}: nothing came for {SILENT_S:.0f} s"), final=False))
        elif now - self._sent_s > protocol.HERE_S:
            self._send(protocol.HERE)

    def _broken(self, end: Ending) -> None:
        """Gives up, or tries again after a pause."""
        self._kill()
        now = time.monotonic()
        self._broke_s = self._broke_s if self.trouble else now
        self.over = end.final or now - self._broke_s > GIVE_UP_S
        self.trouble = str(end.error) if self.over else f"{end.error.message}; trying again"
        self._retry_s = now + PAUSES_S[min(self._attempts, len(PAUSES_S) - 1)]
        self._attempts += 1

    def _start_again(self) -> None:
        try:
            self._start()
        except DdpwatchError as error:
            self._broken(Ending(error, final=False))
            return
        self._topics = [topic for topic in self._topics if not topic.startswith(SNAPSHOT)]
        for topic in self._topics:
            self._send(protocol.request(b"+", topic))

    # -- one connection --------------------------------------------------------------------------------------

    def _start(self, first: bool = False) -> None:
        """Starts ssh. Without a terminal of its own, it asks nothing."""
        command = self._address.command()
        pipe = subprocess.PIPE
        quiet = {} if first else {"SSH_ASKPASS_REQUIRE": "never"}
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0,
                start_new_session=not first, env={**os.environ, **quiet},
            )  # fmt: skip
        except OSError as error:
            hint = "install OpenSSH's client, or name another command in DDPWATCH_SSH"
            raise UsageError(f"cannot start {command[0]}: {error.strerror}", hint) from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unpacker, self._stderr, self._stderr_open = protocol.Unpacker(), b"", True
        self._heard_s = self._sent_s = time.monotonic()

    def _first_opening(self) -> protocol.Opening:
        """Waits for it as long as the user does: ssh may be asking for a password."""
        while self._unpacker.opening is None:
            if not self._read(0.2):
                raise self._ending().error
        return self._unpacker.opening

    def _read(self, timeout_s: float) -> bool:
        """Takes what ssh has written. Returns False at its end.

        Raises:
            DdpwatchError: It is not what ddpwatch writes.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, err = self._process.stdout.fileno(), self._process.stderr.fileno()
        poller = select.poll()
        poller.register(out, select.POLLIN)
        if self._stderr_open:
            poller.register(err, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(int(timeout_s * 1000) + bool(timeout_s))}
        if err in ready:
            self._read_stderr(err)
        if out not in ready:
            return True
        data = os.read(out, 1 << 20)
        self._heard_s = time.monotonic()
        self._messages += self._unpacker.feed(data)
        return bool(data)

    def _read_stderr(self, file: int) -> None:
        said = os.read(file, 1 << 16)
        self._stderr_open = bool(said)
        self._stderr = (self._stderr + said)[-4096:]

    def _ending(self) -> Ending:
        """Returns why ssh has closed its output."""
        process, node = self._process, self._address.node
        assert process is not None
        assert process.stderr is not None
        try:
            code = process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            return Ending(DdpwatchError(f"{node}: ssh has closed its output"), final=False)
        os.set_blocking(process.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while self._stderr_open:
                self._read_stderr(process.stderr.fileno())
        return ending(node, code, self._stderr.decode(errors="replace"), self._unpacker.printed)

    def _send(self, data: bytes) -> None:
        """Sends a request. If it cannot, the connection is broken, which reading finds."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), data)
                self._sent_s = time.monotonic()

    def _kill(self) -> None:
        """Ends ssh, and thereby the other end."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
