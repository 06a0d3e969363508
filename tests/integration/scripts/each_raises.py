"""Whatever of ddpwatch's raises, the job does not notice: ``each_raises.py FOLDER SHAPE`` tries it, one by one.

A traced training finds every function of ddpwatch's that the job's own threads enter. Then it is trained again for
each, which raises when it is called for the first time in a later step (and once when it is called at all, if it is not
called there). Parameters must be those of the unwatched job. What only a signal can bring (``KeyboardInterrupt``, or
the ``SystemExit`` of a handler) must arrive at the job; then the next model, that of the next error, trains as if
nothing had been.

``--list`` only finds the functions, ``--part=TEXT`` tries some, ``--not-in=SHAPE`` those that another shape does not
call, or calls from elsewhere. With ``--quick`` a function raises on one of the two ranks, while another does on the
other, and a signal comes in every third. Leaves ``RANK.json``: the functions, those that the job's code calls directly,
and all that went wrong.
"""

import contextlib
import gc
import hashlib
import io
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6
LATER = 3  # the step from which on a function raises
SHAPES: dict[str, Callable[[], nn.Module]] = {}


def shape(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    SHAPES[build.__name__] = build
    return build


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


@shape
def ddp() -> nn.Module:
    return DistributedDataParallel(layers(), bucket_cap_mb=0.0002)


@shape
def ddp_with_collectives() -> nn.Module:
    """Collectives of the job's own in the forward, of which one is waited for later."""

    class Gathering(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            work = dist.all_reduce(batch.sum(0), async_op=True)
            dist.barrier()
            work.wait()
            return super().forward(batch)

    return DistributedDataParallel(Gathering(*layers()), bucket_cap_mb=0.0002)


@shape
def ddp_with_a_comm_hook() -> nn.Module:
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.0002)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


@shape
def fsdp2() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


@shape
def loop() -> nn.Module:
    """Without a wrapper: gradients are reduced as soon as they are there, one of two without waiting at once."""
    model = layers()

    def reduce(parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=parameter.dim() > 1)
        if work is not None:
            work.wait()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return model


def train(build: Callable[[], nn.Module], reached: Callable[[int], None] = lambda step: None) -> str:
    """Trains a new model; a digest of its losses and parameters."""
    torch.manual_seed(3)
    sha, model = hashlib.sha256(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step, (batch,) in enumerate(DataLoader(TensorDataset(rows), batch_size=4)):
        reached(step)
        if step == LATER:
            with torch.no_grad():
                model.eval()(batch)
            model.train()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sha.update(repr(loss.item()).encode())
        if step >= LATER:
            torch.save(torch.zeros(1), io.BytesIO())
            gc.collect(0)  # for whoever looks at collections, of any generation
    for tensor in model.state_dict().values():
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


# -- what is called, and what raises -----------------------------------------------------------------------------------


class InjectedError(Exception):
    """An error of ddpwatch's."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


class Ended(SystemExit):
    """What a signal handler raises to end the process."""


class Tracer:
    """Profiles the job's threads: notes which of ddpwatch's functions are called, or lets one of them raise once.

    Args:
        target: The function that is to raise, None for none.
        error: What it raises.
    """

    def __init__(self, target: str | None = None, error: BaseException | None = None) -> None:
        self.step = -1
        self.called: defaultdict[str, set[str]] = defaultdict(set)  # by which functions
        self.later: set[str] = set()
        self.doors: dict[str, str] = {}
        self.fired = False
        self.armed_from = LATER
        self._target, self._error = target, error

    def start(self) -> None:
        """Traces this thread."""
        sys.setprofile(self._note if self._target is None else self._raise_in(CODES[self._target]))

    def _raise_in(self, codes: set[int]) -> Callable[[FrameType, str, Any], None]:
        """By identity, as a code's hash takes longer than all else here."""

        def look(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and id(frame.f_code) in codes and self.step >= self.armed_from and self._can_come():
                self.fired = True
                assert self._error is not None
                raise self._error

        return look

    def _can_come(self) -> bool:
        """Once; a signal is handled on the main thread."""
        here = isinstance(self._error, Exception) or threading.current_thread() is threading.main_thread()
        return here and not self.fired

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (name := name_of(frame.f_code)) is None:
            return
        CODES[name].add(id(frame.f_code))
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_qualname
        ours = frame.f_back and name_of(frame.f_back.f_code)
        self.called[name].add(ours or caller)
        if LATER <= self.step < STEPS:
            self.later.add(name)
        if ours is None:
            self.doors.setdefault(name, caller)


CODES: defaultdict[str, set[int]] = defaultdict(set)  # of each function that was called
NAMES: dict[CodeType, str | None] = {}
PACKAGE = ""


def name_of(code: CodeType) -> str | None:
    """Module, qualified name and line of a function of ddpwatch's; None for others."""
    if code not in NAMES:
        ours = code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
        module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace("/", ".")
        NAMES[code] = f"{module}:{getattr(code, 'co_qualname', code.co_name)}" if ours else None
    return NAMES[code]


tracer: Tracer | None = None


def trace_completions(completions: Any) -> None:
    """Traces what is called when a collective is done, too: it may run on another thread."""
    original = completions.follow

    def follow(self: Any, pending: Any, call: Callable[[], object]) -> None:
        def traced_call() -> None:
            before = sys.getprofile()
            if tracer is not None:
                tracer.start()
            try:
                call()
            finally:
                sys.setprofile(before)  # it may run on this thread, too

        original(self, pending, traced_call)

    completions.follow = follow


@contextlib.contextmanager
def traced(by: Tracer) -> Any:
    global tracer
    tracer = by
    if by.armed_from < 0:
        by.start()
    try:
        yield
    finally:
        sys.setprofile(None)
        tracer = None


numbers = itertools.count()
seen: list[Any] = []


def seen_calls(*arguments: Any, **options: Any) -> Any:
    """Notes whose calls are seen: one that has raised is not seen any more."""
    from ddpwatch.probe.calls import SeenCalls

    seen.append(SeenCalls(*arguments, **options))
    return seen[-1]


class Warnings(logging.Handler):
    """Counts what ddpwatch says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


# -- the trial ---------------------------------------------------------------------------------------------------------


def watched(build: Callable[[], nn.Module], by: Tracer, session: ModuleType) -> str:
    """Trains, traced, and closes the session."""

    def reached(step: int) -> None:
        by.step = step
        if step == by.armed_from:  # not before: a traced step takes twice as long
            by.start()
        mark("a step")
        count(samples=4, tokens=32)

    from ddpwatch.job import auto
    from ddpwatch.probe.watch import count, mark

    session._sessions = next(numbers)  # type: ignore[attr-defined] # one may fail on one rank only
    auto._told = False
    auto.install_loops(sys.modules["torch.optim.optimizer"])
    auto.install(sys.modules["torch.nn.parallel.distributed"])
    auto.install_sharded(sys.modules["torch.distributed.fsdp._fully_shard._fsdp_state"])
    try:
        with traced(by):
            return train(build, reached)
    finally:
        by.step = STEPS
        while seen:
            seen.pop().close()
        with traced(by) if by.armed_from < 0 else contextlib.nullcontext():
            close(session)


def close(session: ModuleType) -> None:
    """Closes as the end of the process does."""
    if (ours := session.current) is not None:
        ours.guard.run("closing", ours.close)


class Trial:
    """All of one shape's functions, one after the other."""

    def __init__(self, name: str, unwatched: str, session: ModuleType, said: list[str]) -> None:
        self.name, self._unwatched, self._session, self._said = name, unwatched, session, said
        self.wrong: list[str] = []
        self.raised: set[str] = set()
        self.tried: Counter[str] = Counter()
        self._interrupted = ""  # what a signal has ended right before

    def functions(self) -> Tracer:
        found = Tracer()
        found.armed_from = -1  # traced to the end of the session
        digest = watched(SHAPES[self.name], found, self._session)
        self._expect(digest == self._unwatched, "watched, it trains otherwise")
        return found

    def error(self, function: str, later: bool) -> None:
        """An error of ddpwatch's, on this rank only if it is called here: one warning at most."""
        by = Tracer(function, InjectedError("of nobody's business"))
        by.armed_from = LATER if later else -1
        self._note(function)
        self._said.clear()
        after, self._interrupted = self._interrupted, ""
        try:
            digest = watched(SHAPES[self.name], by, self._session)
        except BaseException as error:
            self._expect(False, f"{function} raises {type(error).__name__} in the job{after}")
            close(self._session)
            return
        if by.fired:
            self.raised.add(function)
        self._expect(digest == self._unwatched, f"{function} changes the parameters{after}")
        self._expect(len(self._said) <= 1, f"{function} warns more than once: {self._said}")
        self._expect("nobody's" not in " ".join(self._said), f"{function}: the error's own words are ours")

    def signal(self, function: str, number: int) -> None:
        """What a signal brings arrives at the job, and the next model trains: that of the next error."""
        brought = (Interrupt(), Ended(3))[number % 2]
        by = Tracer(function, brought)
        self._note(f"{function} {brought!r}")
        arrived: BaseException | None = None
        try:
            watched(SHAPES[self.name], by, self._session)
        except BaseException as error:
            arrived = error
        if not by.fired:
            return
        self.tried["signal"] += 1
        self._expect(arrived is brought, f"{function}: the job gets {arrived!r} in place of {brought!r}")
        close(self._session)
        self._interrupted = f", after a signal in {function}"

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(f"{self.name}: {what}")
            self._note(f"wrong: {what}")

    def _note(self, line: str) -> None:
        """For whoever looks why a trial stands still."""
        with open(f"{sys.argv[1]}/{RANK}.log", "a") as log:
            print(f"{time.monotonic():.1f} {self.name}: {line}", file=log)


def turns(tried: list[str], shared: set[str]) -> list[str]:
    """This rank's half of the functions, by way of two ranks: rank 0 takes those that it alone calls."""
    alone, both = [one for one in tried if one not in shared], [one for one in tried if one in shared]
    cut = max(0, len(both) - len(alone)) // 2
    halves = [*alone, *both[:cut]], both[cut:]
    return list(itertools.islice(itertools.cycle(halves[RANK] or tried), max(map(len, halves))))


def main() -> None:
    global PACKAGE
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.set_num_threads(1)
    unwatched = {name: train(build) for name, build in SHAPES.items()}

    import ddpwatch
    from ddpwatch.job import auto
    from ddpwatch.probe import activity, calls, completion, gc_pauses, sender, session
    from ddpwatch.sampling import schedule
    from tests.integration.scripts.each_raises_doors import DOORS, NOT_FOR_SIGNALS

    calls._TOOL_IDS = ()  # so wrappers: what the interpreter's own events call cannot be traced
    PACKAGE = str(Path(ddpwatch.__file__).parent) + "/"
    sender.STARTING_S = 0.2  # what the other rank has not sent will not come
    activity.MIN_WAIT_NS = gc_pauses.MIN_PAUSE_NS = 0  # type: ignore[misc]
    schedule.SamplingSchedule.is_light = lambda self, step: step == LATER + 1  # type: ignore[method-assign]
    schedule.SamplingSchedule.is_bare = lambda self, step: step == LATER + 2  # type: ignore[method-assign]
    schedule.DEAR_OWN_NS, schedule.DEAR_OWN, schedule.CPU_PERIOD = 0, 0.0, 1  # type: ignore[misc] # not by chance
    trace_completions(completion.Completions)
    warnings = Warnings()
    logging.getLogger("ddpwatch").addHandler(warnings)
    logging.getLogger("ddpwatch").propagate = False
    auto.SeenCalls = seen_calls  # type: ignore[misc, assignment]

    store = dist.distributed_c10d._get_default_store()
    result: dict[str, Any] = {"torch": str(torch.__version__), "doors": {}, "wrong": []}
    result |= {"functions": {}, "tried": {}, "not called again": {}}
    only = [word for word in sys.argv[2:] if not word.startswith("--")]
    part = next((word.removeprefix("--part=") for word in sys.argv if word.startswith("--part=")), "")
    apart_from = [word.removeprefix("--not-in=") for word in sys.argv if word.startswith("--not-in=")]
    tried_there = [Trial(name, unwatched[name], session, []).functions().called for name in apart_from]
    for name in only or SHAPES:
        trial = Trial(name, unwatched[name], session, warnings.said)
        found = trial.functions()
        functions = [one for one in found.called if one not in DOORS and part in one]
        result["functions"][name] = functions
        result["doors"] |= found.doors
        if RANK == 0:
            new = [one for one in functions if not any(found.called[one] <= there[one] for there in tried_there)]
            store.set(f"functions/{name}", json.dumps(new))
        if "--list" in sys.argv:
            result["wrong"] += trial.wrong
            continue
        tried = json.loads(store.get(f"functions/{name}"))  # by both ranks
        store.set(f"called/{name}/{RANK}", json.dumps([*found.called]))
        steady = [one for one in tried if one in found.later and not one.startswith(NOT_FOR_SIGNALS)]
        store.set(f"steady/{name}/{RANK}", json.dumps(steady))
        others = [json.loads(store.get(f"steady/{name}/{rank}")) for rank in range(dist.get_world_size())]
        signals = [one for one in others[0] if all(one in other for other in others)]
        if "--quick" in sys.argv:
            signals, tried = signals[::3], turns(tried, set(json.loads(store.get(f"called/{name}/1"))))
        for number, function in enumerate(tried):
            if number < len(signals):
                trial.signal(signals[number], number)
                dist.barrier()
            trial.error(function, function in found.later)
            dist.barrier()
        missed = [one for one in functions if one in tried and one not in trial.raised]
        store.set(f"missed/{name}/{RANK}", json.dumps(missed))
        for rank in range(dist.get_world_size()):  # what comes with a delay, say, may come now
            for function in json.loads(store.get(f"missed/{name}/{rank}")):
                trial.error(function, function in found.later)
                dist.barrier()
        result["wrong"] += trial.wrong
        result["tried"][name] = {"error": len(trial.raised), **trial.tried}
        result["not called again"][name] = [one for one in missed if one not in trial.raised]
    (folder / f"{RANK}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    start = time.monotonic()
    main()
    print(f"the job's own line; {time.monotonic() - start:.0f} s" if "--time" in sys.argv else "the job's own line")
