"""Measures what all-reduces cost on a job's own hosts and backend, as nccl-tests does, and writes ``wire.json``.

    torchrun --nproc-per-node=N -m ddpwatch.whatif.sweep -o wire.json

From 1 KiB to 256 MiB, or to what fits into 20 s: alone, beside compute, and two at once. ``ddpwatch whatif --wire
wire.json`` uses it. It is a job of its own: a watched job never gets an added collective.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.whatif.wire import LARGE_BYTES, Wire, WireSize, write_wire

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 256 << 20
PER_FACTOR_FOUR = 2  # sizes
SECONDS = 20.0
MOST_ROUNDS = 30
FEWEST_ROUNDS = 3
FEWEST_SIZES = 8
LEAST_REDUCES = 13  # per size: one to see how long it takes, three alone, three beside compute, three pairs
HOOK_BYTES = 16 << 20  # of gradients, for what comm hooks compute
BUCKET_BYTES = 4 << 20  # of those, in one bucket, or one matrix
COMPUTE_S = 0.05
MATRIX_ROWS = 256


def main(argv: list[str] | None = None) -> int:
    """Runs the sweep; the exit code is 1 if it failed, and 2 if it was called wrongly."""
    parser = argparse.ArgumentParser(prog="torchrun -m ddpwatch.whatif.sweep", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write wire.json")
    parser.add_argument("--backend", metavar="NAME", help="gloo or nccl (default: what the devices have)")
    parser.add_argument("--max-size", type=int, default=LARGEST_BYTES >> 20, metavar="MIB", help="of an all-reduce")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="how long to measure")
    options = parser.parse_args(argv)
    try:
        _run(options)
    except DdpwatchError as error:
        print(f"ddpwatch.whatif.sweep: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        raise UsageError("start it with torchrun", "torchrun --nproc-per-node=2 -m ddpwatch.whatif.sweep -o wire.json")
    if not 1 <= options.max_size <= 4096 or not 0.1 <= options.seconds <= 3600:
        raise UsageError("--max-size is from 1 to 4096 MiB, --seconds from 0.1 to 3600")
    device = device_of(options.backend)
    dist.init_process_group(options.backend or ("nccl" if device.type == "cuda" else "gloo"))
    try:
        if dist.get_world_size() < 2:
            raise UsageError("one rank alone has nothing to reduce", "give torchrun --nproc-per-node=2 or more")
        wire = Sweep(device, options.max_size << 20, options.seconds).run()
        if dist.get_rank() == 0:
            _write(options.output, wire)
    finally:
        dist.destroy_process_group()


def device_of(backend: str | None) -> torch.device:
    """Returns this rank's device: its GPU, where there is one and the backend is not Gloo."""
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def timed(device: torch.device, call: Callable[[], object]) -> float:
    """Returns seconds that a call takes, all that it started on a GPU included."""
    settle(device)
    started = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - started


def settle(device: torch.device) -> None:
    """Waits for all that was started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _write(path: Path, wire: Wire) -> None:
    try:
        path.write_bytes(write_wire(wire))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "give a path that can be written") from None
    largest = wire.sizes[-1]
    print(f"{path}: {len(wire.sizes)} sizes, {largest.nbytes >> 20} MiB in {largest.alone_ms:.1f} ms", file=sys.stderr)


def sizes_up_to(largest: int) -> list[int]:
    """Returns the sizes to measure, in bytes: two for each factor of four."""
    count = PER_FACTOR_FOUR * max(1, (largest // SMALLEST_BYTES).bit_length() // 2)
    found = {int(SMALLEST_BYTES * (largest / SMALLEST_BYTES) ** (i / count)) // 4 * 4 for i in range(count + 1)}
    return sorted(found)


class Sweep:
    """One rank's part. All ranks take the same measurements in the same order.

    Args:
        device: Where the tensors are.
        largest: The largest size, in bytes.
        seconds: About how long to measure.
    """

    def __init__(self, device: torch.device, largest: int, seconds: float) -> None:
        self._device = device
        self._sizes = sizes_up_to(largest)
        self._seconds = seconds
        self._share_s = seconds / (2.5 * len(self._sizes))
        self._buffers = [torch.zeros(self._sizes[-1] // 4, device=device) for _ in range(2)]
        self._matrix = torch.ones(MATRIX_ROWS, MATRIX_ROWS, device=device)

    def run(self) -> Wire:
        """Measures everything; the result is the same on every rank but for its host's compute."""
        started = time.perf_counter()
        timed(self._device, self._reduce(LARGE_BYTES))  # opens the connections
        hosts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        sizes: list[WireSize] = []
        for nbytes in self._sizes:
            if len(sizes) >= FEWEST_SIZES and self._too_long(sizes[-1], nbytes, started):
                break
            sizes.append(self._size(nbytes))
        power_sgd = {f"powersgd-{rank}": self._power_sgd(rank) for rank in (1, 2)}
        return Wire(
            backend=str(dist.get_backend()),
            world_size=dist.get_world_size(),
            hosts=sorted({str(host) for host in hosts}),
            torch=str(torch.__version__),
            device=self._device.type,
            sizes=sizes,
            compute_beside=self._compute_beside(),
            encode_ns_per_byte={
                name: self._cast(dtype) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
            }
            | {name: sum(parts) for name, parts in power_sgd.items()},
            launch_share={name: parts[0] / sum(parts) for name, parts in power_sgd.items() if sum(parts)},
        )

    def _too_long(self, before: WireSize, nbytes: int, started: float) -> bool:
        """Returns whether another size would take more than the time that is left, judged by the one before."""
        left = self._seconds - self._agreed(time.perf_counter() - started)
        return LEAST_REDUCES * before.alone_ms / 1e3 * nbytes / before.nbytes > left

    def _size(self, nbytes: int) -> WireSize:
        once = self._agreed(timed(self._device, self._reduce(nbytes)))
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(self._share_s / once / 3)))
        alone = [self._agreed(timed(self._device, self._reduce(nbytes))) for _ in range(rounds)]
        low, _, high = quantiles(alone, n=4)
        large = nbytes >= LARGE_BYTES
        beside = self._beside(nbytes, rounds) if large else None
        pair = [self._agreed(timed(self._device, self._two(nbytes))) for _ in range(rounds)] if large else []
        return WireSize(
            nbytes=nbytes,
            alone_ms=1e3 * median(alone),
            low_ms=1e3 * low,
            high_ms=1e3 * high,
            beside_ms=beside,
            pair_ms=1e3 * median(pair) if pair else None,
        )

    def _beside(self, nbytes: int, rounds: int) -> float | None:
        """Measures beside compute on this rank (ms); not on a GPU, where compute would have to be one of its own."""
        if self._device.type != "cpu":
            return None
        with self._computing():
            taken = [self._agreed(timed(self._device, self._reduce(nbytes))) for _ in range(rounds)]
        return 1e3 * median(taken)

    def _compute_beside(self) -> float | None:
        """Returns how many times longer compute takes beside all-reduces of 4 MiB or more."""
        if self._device.type != "cpu":
            return None
        nbytes = min(self._sizes[-1], 4 * LARGE_BYTES)
        products = max(1, int(COMPUTE_S / max(1e-6, timed(self._device, self._multiply))))
        alone, beside = [], []
        for _ in range(5):
            dist.barrier()
            alone.append(timed(self._device, lambda: self._products(products)))
            rounds = self._rounds_for(nbytes, 3 * COMPUTE_S)
            works = [dist.all_reduce(self._buffers[0][: nbytes // 4], async_op=True) for _ in range(rounds)]
            beside.append(timed(self._device, lambda: self._products(products)))
            for work in works:
                work.wait()
        return max(1.0, self._agreed(median(beside)) / max(1e-9, self._agreed(median(alone))))

    def _rounds_for(self, nbytes: int, seconds: float) -> int:
        return max(1, min(200, int(seconds / max(1e-6, self._agreed(timed(self._device, self._reduce(nbytes)))))))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Computes products on a thread of their own, meanwhile."""
        stop = threading.Event()

        def compute() -> None:
            while not stop.is_set():
                self._products(4)

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _multiply(self) -> None:
        self._matrix @ self._matrix

    def _products(self, count: int) -> None:
        for _ in range(count):
            self._multiply()

    def _reduce(self, nbytes: int) -> Callable[[], None]:
        part = self._buffers[0][: max(1, nbytes // 4)]
        return lambda: _wait(dist.all_reduce(part, async_op=True))

    def _two(self, nbytes: int) -> Callable[[], None]:
        parts = [buffer[: max(1, nbytes // 4)] for buffer in self._buffers]

        def both() -> None:
            for work in [dist.all_reduce(part, async_op=True) for part in parts]:
                _wait(work)

        return both

    def _cast(self, dtype: torch.dtype) -> float:
        """Returns the ns per byte of gradient for what torch's hook does, bucket by bucket.

        A cast, a division, and a cast back.
        """
        full, ranks, most = self._buffers[0][: HOOK_BYTES // 4], dist.get_world_size(), BUCKET_BYTES // 4
        buckets = [full[at : at + most] for at in range(0, len(full), most)]

        def there_and_back() -> None:
            for bucket in buckets:
                bucket.copy_(bucket.to(dtype).div_(ranks))

        return self._ns_per_byte(there_and_back, full)

    def _power_sgd(self, rank: int) -> tuple[float, float]:
        """Returns the ns per byte that torch's PowerSGD hook computes for square matrices, its error included.

        The first number is what it does before the first all-reduce, on the thread that launches it; the second is the
        rest.
        """
        full = self._buffers[0][: HOOK_BYTES // 4]
        rows = math.isqrt(min(len(full), BUCKET_BYTES // 4))
        gradients = full[: len(full) // rows**2 * rows**2].view(-1, 1, rows, rows)
        errors = torch.zeros_like(gradients)
        left, right = (torch.rand(1, rows, rank, device=self._device) for _ in range(2))
        kept = gradients.clone()

        def orthogonal(factor: torch.Tensor) -> torch.Tensor:
            return factor.copy_(torch.linalg.qr(factor).Q)  # its memory stays contiguous: products differ by factors

        def before() -> None:
            kept.copy_(gradients.add_(errors))
            for matrix in gradients:
                torch.bmm(matrix, orthogonal(right), out=left)

        def after() -> None:
            for matrix in gradients:
                torch.bmm(matrix.transpose(1, 2), orthogonal(left), out=right)
                torch.bmm(left, right.transpose(1, 2), out=matrix)
            torch.sub(kept, gradients, out=errors)

        return self._ns_per_byte(before, gradients), self._ns_per_byte(after, gradients)

    def _ns_per_byte(self, call: Callable[[], object], gradients: torch.Tensor) -> float:
        taken = [timed(self._device, call) for _ in range(5)]
        return 1e9 * self._agreed(median(taken)) / gradients.nbytes

    def _agreed(self, seconds: float) -> float:
        """Returns the longest of all ranks, so that all take the same number of rounds.

        It also lets them start together.
        """
        longest = torch.tensor(seconds, device=self._device, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


if __name__ == "__main__":
    sys.exit(main())
