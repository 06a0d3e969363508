"""What to do next about an incident, or about time that is lost: a row for each kind.

What stands between backticks is a command that runs as it stands, on the host that is named.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ddpwatch.analysis.diagnosis.incident import (
    AccountName,
    DeviceFigures,
    End,
    Evidence,
    Incident,
    LostTime,
    collective_failed,
    is_by_ctrl_c,
    is_by_launcher,
)
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.words.lost_time import lost_accounts
from ddpwatch.analysis.diagnosis.words.wording import processes_named, ranks_named
from ddpwatch.sampling.stack_order import EXPLAIN, FIRST_INCIDENT
from ddpwatch.wire.messages import OWN_COLLECTIVES, WORKERS_START, Bye, Hello, Layout, LayoutKind, Mark

_WHAT_IF = re.compile(r"`ddpwatch whatif [^`]*`")
ON_SCREEN = "key 8 (what-if)"
_EXPLAIN = re.compile(r"`ddpwatch explain(?![^`]*--steps)[^`]*`")  # keys choose the number
_PROFILE = re.compile(r"`ddpwatch explain[^`]*--how profiler[^`]*`")
EXPLAIN_ON_SCREEN, PROFILE_ON_SCREEN = "key x", "key X"
_IN_LOG = "press 7 (log): "
_READ, _ASK = "read the stacks", "`ddpwatch explain` shows the stacks"
_LOGGED = (_READ, "each of its incidents")
_HELPS = "what would help: other bucket sizes, comm hooks, links"
_OF_COLLECTIVES: Final[Mapping[str, str]] = {  # by `Layout.kind`
    "group": "prefetch earlier (set_modules_to_forward_prefetch), or shard larger blocks: see the timeline",
    "call": "start collectives earlier (async_op=True), and wait where results are used: see the timeline",
}
_BALANCE: Final = "give the pipeline more micro-batches per step, or its stages layers that take alike"
_OF_LAYERS: Final = ("forward", "backward", "optimizer", "")  # phases that take longer with more layers
_BY_MODULE: Final = {  # what issues collectives within torch, by the start of its places' names
    "pipelining.": f"{_BALANCE}: see the timeline",
    "fsdp.": "prefetch earlier (forward_prefetch=True), or wrap larger blocks: see the timeline",
    "tensor.": "share a layer among fewer ranks, or hide more by larger batches: see the timeline",
    "optim.zero": "give ZeroRedundancyOptimizer parameters_as_bucket_view=True: else it sends each parameter by itself",
    "nn.modules._functions": "give SyncBatchNorm a process_group of fewer ranks, or use a norm that needs no others",
    "algorithms.model_averaging": "average less often (the averager's period): see the timeline",
}
_OF_NOBODY: Final = ("backward", "unknown", "other")  # names of places that say nothing of who issues
_PY_SPY = "pip install py-spy"
_LENGTHS = "group samples of similar length, so that all ranks' batches take as long"
_TOO_SMALL = "the model is small for its network: larger batches per rank, or fewer updates, hide more"
MOSTLY_EXPOSED = 0.5  # of a step
BUSY = 10.0  # percent of a core that the busiest processes have together: less keeps nobody from one
OTHERS = 0.2  # of the busiest processes' CPU time: what others than the ranks have, if it is worth stopping them
_STOP, _FEWER = "stop what is not the job's", "start fewer threads and workers"
_MORE_CORES = "give each rank a core of its own"
AGAIN = 4  # starts of alike DataLoaders' workers: those of training, validation and a test start once each
_NO_SYNC = "within model.no_sync(), call both forward and backward of all batches of an update but the last"
_BUFFERS = "give DDP broadcast_buffers=False, unless ranks need rank 0's buffers before each forward"
_THREADS = "start torchrun with OMP_NUM_THREADS = cores / ranks, or call torch.set_num_threads"
_DOES_MORE = "see what the job does otherwise from step {step} on (batch, lengths, layers), then look at its devices"
_GAP_GROWS = "see what the loop averages, gathers or logs in the gap before the forward, from step {step} on"
_TOGETHER = "let all ranks skip a batch together: all_reduce whether one has to, or run the backward of a loss times 0"
_MEMORY = "`ps -eo pid,rss,comm --sort=-rss` shows who has the memory"
_BY_CAUSE: Final = {  # a device's signal, and what to do about it on its host
    "steal": "ask who runs the hypervisor: another guest has the CPU; or move the job",
    "cgroup_throttled": "raise the container's or the scheduler's CPU limit, or start fewer threads and workers",
    "memory_pressure": _MEMORY,
    "swap_bytes_s": _MEMORY,
    "lost_clock": "`nvidia-smi -q -d PERFORMANCE` shows what slows the clocks",
    "new_ecc_errors": "`nvidia-smi -q -d ECC` counts the errors; take the GPU out of service",
    "lost_pcie": "`nvidia-smi -q -d PCIE` shows the link; seat the card again, or take the GPU out of service",
    "new_link_errors": "`nvidia-smi nvlink -e` counts NVLink's errors, `nvidia-smi -q -d PCIE` replays",
    "nvlinks_down": "`nvidia-smi nvlink -s` shows which; take the GPU out of service",
    "new_xids": "`dmesg --level=err,warn` shows the XID in full; NVIDIA lists what each means",
    "io_pressure": "`ps -eo pid,stat,wchan:20,comm` shows who waits for a disk (state D)",
    "oom_kills_s": "`dmesg --level=err` shows which process; fewer DataLoader workers or a smaller cache may fit",
    "retransmits_s": "`ss -ti` shows which connections lose packets: look at that path's links and switches",
    "congestion_s": "look at the switches: too many senders share a port, or its PFC and ECN settings differ",
    **dict.fromkeys(
        ("net_rx_errors_s", "net_tx_errors_s", "net_rx_drops_s", "net_tx_drops_s", "link_downs_s"),
        "`ip -s link` counts errors and drops by interface",
    ),
}
_BY_WORKERS: Final = {  # what limits a DataLoader's workers
    "workers_run": "give the DataLoader {more}, or let a sample cost less",
    "workers_ready": "give each rank a core of its own, and let a batch be fewer tensors",
    "workers_read": "put the data on a faster disk, or into fewer and larger files; or give the DataLoader {more}",
}
_BY_PAUSE: Final = {
    "gc": "call gc.freeze() after the first steps, or gc.disable() and gc.collect() on all ranks in the same step",
    "checkpoint": "save less often, or with torch.distributed.checkpoint.async_save",
    "validation": "validate less often, or on fewer batches",
    "compilation": "run with TORCH_LOGS=recompiles: it says what is compiled again, and why",
}
_COMPILES_ONCE: Final = "none, if it stays the only one; a TORCHINDUCTOR_CACHE_DIR that stays spares it the next start"


class JobPlaces:
    """Where a job's ranks can be looked at, by what they said.

    Attributes:
        source: What `ddpwatch whatif` reads: a recording, as a run's ends with it; else the newest run of the job.
        layout_kind: What its wrapper's collectives carry, or those of its own calls, if there is no wrapper.
        explained: Ranks whose stacks were sampled: the newest such step of each, and what to do after that.
        reduces_again: Whether gradients are reduced more than once per update, of which nothing can be predicted.
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self._is_live = not source
        self.layout_kind: LayoutKind | None = None
        self.reduces_again = False
        self.explained: Mapping[int, tuple[int, str]] = {}
        self._calls: dict[int, str] = {}  # names of the places that issue the job's own collectives, by number
        self._hellos: dict[int, Hello] = {}
        self._ended: set[int] = set()
        self._starts = Counter[tuple[int, int, bool]]()  # of workers, by rank, for each kind of DataLoader
        self._waits: Counter[tuple[int, bool]] = Counter()  # for each kind of DataLoader (ns): workers, persistent

    def read_from(self, source: str) -> None:
        """Takes the recording that all comes from; empty if commands cannot read it. Its ranks cannot be asked."""
        self.source, self._is_live = source, False

    def add_hello(self, hello: Hello) -> None:
        """Takes a rank's introduction; a newer one counts."""
        self._hellos[hello.rank] = hello
        self._ended.discard(hello.rank)

    def add_layout(self, layout: Layout) -> None:
        """Takes what a rank's collectives carry."""
        if layout.kind != "call" or self.layout_kind is None:
            self.layout_kind = layout.kind
        if layout.kind == "call":
            self._calls |= {bucket.index: bucket.name for bucket in layout.buckets}

    def issued_within(self, place: int | None) -> str:
        """Returns the library, or the module of torch's, that issues a collective, or all (None); "" for the script."""
        names = self._calls.values() if place is None else [self._calls.get(place, "")]
        found = {"" if ".py:" in name else name.partition(" ")[0] for name in names}
        return found.pop() if len(found) == 1 else ""

    @property
    def has_pipeline(self) -> bool:
        """True if torch's own pipeline issues collectives."""
        return any(name.startswith("pipelining.") for name in self._calls.values())

    def add_mark(self, mark: Mark) -> None:
        """Takes a wait for a DataLoader."""
        if mark.workers is not None and mark.end_ns is not None:
            self._waits[mark.workers, mark.persistent] += max(0, mark.end_ns - mark.start_ns)
            self._starts[mark.rank, mark.workers, mark.persistent] += mark.name == WORKERS_START

    @property
    def _loader(self) -> tuple[int, bool] | None:
        """The kind of DataLoader that ranks have waited for longest, as a validation has one, too; None if unknown."""
        return next((kind for kind, _ in self._waits.most_common(1)), None)

    @property
    def faster_loader(self) -> str:
        """What to change in that DataLoader, so that ranks wait less."""
        starts = max((count for (_, *kind), count in self._starts.items() if tuple(kind) == self._loader), default=0)
        if starts >= AGAIN and self.workers_start_again:
            return f"give the DataLoader persistent_workers=True: its workers have started {starts} times"
        return f"give the DataLoader {self.more_workers}"

    @property
    def more_workers(self) -> str:
        """The workers to give that DataLoader, so that ranks wait less."""
        if self._loader is None:
            return "more workers (num_workers), with persistent_workers=True"
        workers, persistent = self._loader
        if not workers:
            return "workers: it has none (num_workers=0)"
        more = f"more than {workers} worker{'' if workers == 1 else 's'} (num_workers)"
        return more if persistent else f"{more}, with persistent_workers=True"

    @property
    def workers_start_again(self) -> bool:
        """True if its workers start again in each epoch, as far as is known."""
        return self._loader is None or (self._loader[0] > 0 and not self._loader[1])

    def add_bye(self, bye: Bye) -> None:
        """Takes the end of a rank, or of all."""
        self._ended.update(self._hellos if bye.rank is None else [bye.rank])

    @property
    def what_if(self) -> str:
        """The command that predicts what would help."""
        run = next((hello.run_id for hello in self._hellos.values()), "")
        return f"`ddpwatch whatif {shlex.quote(self.source or run)}`"

    def has_gpu(self) -> bool:
        """Returns whether some rank trains on one."""
        return any(hello.device_kind != "cpu" for hello in self._hellos.values())

    def host_of(self, incident: Incident) -> str:
        """Returns the host that an incident is about; empty if that is not known, or if there is only one."""
        device = incident.evidence.device
        named = device.host if isinstance(device, DeviceFigures) else ""
        named = named or (incident.evidence.host or "")
        hosts = {hello.host for hello in self._hellos.values()}
        of_ranks = {self._hellos[rank].host for rank in incident.ranks if rank in self._hellos}
        return named or (of_ranks if len(of_ranks) == 1 else hosts if len(hosts) == 1 else {""}).pop()

    def ranks_on(self, host: str) -> dict[int, int]:
        """Returns the ranks of a host by pid; of all where it is not known, as there is one."""
        return {hello.pid: rank for rank, hello in self._hellos.items() if host in ("", hello.host)}

    def can_start_fewer(self, host: str) -> bool:
        """Returns whether ranks of a host may have more than one thread that computes, or a DataLoader has workers."""
        threads = [hello.threads for hello in self._hellos.values() if host in ("", hello.host)]
        return any(workers for workers, _ in self._waits) or not all(count == 1 for count in threads)

    def are_there(self, ranks: Sequence[int]) -> bool:
        """Returns whether ranks can be asked, as far as is known; all, if none are given."""
        return self._is_live and all(rank in self._hellos and rank not in self._ended for rank in ranks or self._hellos)

    def stack_of(self, rank: int, lasts: bool = True) -> str:
        """Returns how to see what a rank does: now, or once what does not last comes again."""
        hello = self._hellos.get(rank)
        if hello is None or not self.are_there([rank]):
            return f"if it comes again, py-spy dump --pid shows what rank {rank} does meanwhile ({_PY_SPY})"
        shows = f"on {hello.host}, `py-spy dump --pid {hello.pid}` shows what rank {rank} does ({_PY_SPY})"
        return shows if lasts else f"if it comes again, {shows}"

    def lines_of(self, incident: Incident) -> str:
        """Returns how to see in which lines a late rank spends more time: now, or once it is late again.

        If that is known already, returns what to do about it.
        """
        rank = incident.ranks[0]
        until, answer = self.explained.get(rank, (-1, ""))
        if answer and until >= (incident.since_step or 0):
            return answer
        names = f"names the lines in which rank {rank} spends more"
        if not self.are_there([rank]):
            return f"run the job with {EXPLAIN}={FIRST_INCIDENT}: that {names}"
        command = f"`ddpwatch explain --rank {rank}` {names}"
        return command if incident.open else f"if it comes again, {command}"


# -- by kind -------------------------------------------------------------------------------------------------


def _late(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about late ranks: by what is wrong with their devices, else by the phase."""
    text, device = _device(incident, places), incident.evidence.device
    if incident.ranks and isinstance(device, DeviceFigures) and device.cause not in {**_BY_CAUSE, **_BY_WORKERS}:
        return f"{text}; else {_by_phase(incident, places)}"  # a shortage of cores, which its peers may have as well
    return text or _by_phase(incident, places)


def _by_phase(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about late ranks whose devices are well."""
    if incident.phase in _BY_PAUSE:
        return _BY_PAUSE[incident.phase]
    if incident.phase == "data":
        return _input(replace(incident, evidence=Evidence()), places)
    if not incident.ranks:
        return "find the phase that grows: record the run, and compare its first steps with its last (report --steps)"
    irregular = incident.kind == "intermittent" and incident.period is None
    if irregular and incident.phase in ("forward", "backward", ""):
        return f"if batches differ in length, {_LENGTHS}; else {places.lines_of(incident)}"
    if incident.evidence.own_stage and incident.phase in _OF_LAYERS:
        return f"{_BALANCE}: see the timeline; if they have as much to do, {places.lines_of(incident)}"
    return places.lines_of(incident)


def _device(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about a cause outside the job, on its host; empty if none is known."""
    device = incident.evidence.device
    if device is None:
        return ""
    at = f"on {host}, " if (host := places.host_of(incident)) else ""
    if isinstance(device, DeviceFigures) and device.cause in _BY_WORKERS:
        return _BY_WORKERS[device.cause].format(more=places.more_workers)
    if isinstance(device, DeviceFigures) and device.cause in _BY_CAUSE:
        return at + _BY_CAUSE[device.cause]
    busy = (device.busy if isinstance(device, DeviceFigures) else None) or []
    ranks = places.ranks_on(host)
    others = [one for one in busy if one.pid not in ranks]
    # What to do comes first: on a narrow screen, the end is cut
    used, taken = (sum(one.cpu for one in some) for some in (busy, others))
    or_else = _FEWER if places.can_start_fewer(host) else _MORE_CORES
    if used < BUSY:
        return f"{at}`ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores: {_STOP}, or {or_else}"
    if taken < OTHERS * used:
        return f"{at}{or_else}: most CPU time goes to the job: {processes_named(busy, ranks)}"
    besides = "besides the ranks, " if len(others) < len(busy) else ""
    return f"{at}{_STOP}, or {or_else}: {besides}most CPU time goes to {processes_named(others, ranks)}"


def _input(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about waits for data: in each step, or where the loader starts again."""
    if text := _device(incident, places):
        return text
    pinned = ", and pin_memory=True" if places.has_gpu() else ""
    if incident.kind in ("intermittent", "pause") and incident.period is not None and places.workers_start_again:
        return f"give the DataLoader persistent_workers=True: it waits again and again, as when workers start{pinned}"
    loader = f"{places.faster_loader}{pinned}"
    alone = len(incident.ranks) == 1 and incident.period is None  # then it is not the loader that all have
    return f"{places.lines_of(incident)}; or {loader}" if alone else loader


def _exposed_by(places: JobPlaces, module: int | None = None, bucket: int | None = None, is_much: bool = True) -> str:
    """Returns what to do about exposed transfers, by what collectives carry: only DDP's can be predicted.

    Args:
        places: What is known of the job.
        module: Whose are exposed most; None if that is not known.
        bucket: Which of it; the place, if the job issues them itself.
        is_much: Whether so much is exposed that something else should help.
    """
    kind = "call" if module == OWN_COLLECTIVES else places.layout_kind or "bucket"
    issuer = places.issued_within(bucket) if kind == "call" else ""
    if module is None and places.has_pipeline:
        issuer = "pipelining."
    for start, text in _BY_MODULE.items():
        if issuer.startswith(start):
            return text
    if issuer and issuer not in _OF_NOBODY:
        whose = f"torch's {issuer}" if "." in issuer else issuer
        return f"look for options of {whose} that overlap communication and compute: see the timeline"
    if found := _OF_COLLECTIVES.get(kind):
        return found
    predicted = f"{places.what_if} predicts" if is_much else f"see whether {places.what_if} finds"
    return _NO_SYNC if places.reduces_again else f"{predicted} {_HELPS}"


def _exposed(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about exposed transfers; of more than half of a step, no overlap could hide all."""
    text, other = _device(incident, places), _exposed_by(places, incident.module, incident.bucket)
    if text:
        return f"{other}; also, {text}" if _explains_a_part(incident) else f"{text}; else {other}"
    return f"{other}; {_TOO_SMALL}" if (incident.evidence.share_of_step or 0.0) > MOSTLY_EXPOSED else other


def _explains_a_part(incident: Incident) -> bool:
    """Returns whether a device denied less than what the incident takes of a step."""
    device = incident.evidence.device
    return isinstance(device, DeviceFigures) and device.value < (incident.evidence.share_of_step or 0.0)


def _pause(incident: Incident, places: JobPlaces) -> str:
    if incident.phase == "compilation" and incident.steps == 1:
        return _COMPILES_ONCE
    if incident.phase in _BY_PAUSE:
        return _BY_PAUSE[incident.phase]
    if text := _device(incident, places):
        return text
    if incident.phase == "data" and not incident.ranks:
        return _input(incident, places)
    if incident.ranks and incident.period is not None:
        return f"do it less often, or on a thread: the others wait for {ranks_named(incident.ranks)} meanwhile"
    if incident.ranks and (sites := incident.evidence.call_sites):
        return f"look at what {ranks_named(incident.ranks)} does, or waits for, at {sites[incident.ranks[0]]}"
    if incident.ranks:
        return places.stack_of(incident.ranks[0], incident.open)
    return f"look at step {incident.since_step} in the timeline, and at the job's output of that time"


def _slower(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about the cause; where cores are short, but were before, also what else it may be."""
    grows = _GAP_GROWS if incident.phase == "between" else _DOES_MORE
    text, other = _device(incident, places), grows.format(step=incident.since_step)
    return text if incident.device else f"{text}; else {other}" if text else other


def _imbalance(incident: Incident, places: JobPlaces) -> str:
    lengths, text = f"{_LENGTHS}; or compare the ranks' batch sizes", _device(incident, places)
    if _explains_a_part(incident):
        return f"{lengths}; also, {text}"
    return f"{text}; else {lengths}" if text else lengths


def _link(incident: Incident, places: JobPlaces) -> str:
    return _device(incident, places) or "on the hosts of these ranks, `ip -s link` counts errors and drops by interface"


def _hang(incident: Incident, places: JobPlaces) -> str:
    evidence = incident.evidence
    if incident.ranks and not (evidence.stacks or evidence.call_sites):
        return places.stack_of(incident.ranks[0])
    if evidence.why == "mismatch":
        return "look why ranks make different calls: one has fewer batches (drop_last=True evens them), or skips one"
    whose = "of the ranks that hold up the others" if evidence.stacks or evidence.call_sites else "of all ranks"
    can_ask = incident.open and places.are_there(incident.ranks)
    return f"{_ASK if can_ask else _READ} {whose}"


def _ended_by_others(end: End) -> bool:
    return is_by_launcher(end) or is_by_ctrl_c(end) or collective_failed(end)


def _death(incident: Incident, places: JobPlaces) -> str:
    all_ends = incident.evidence.ends or {}
    ends = all_ends.values()
    if not incident.ranks:
        return "wait some seconds: the rank that ended first says why; then read its output"
    if ends and not set(incident.ranks) & set(all_ends):  # others ended, as it did not come
        return places.stack_of(incident.ranks[0])
    at = f"on {host}, " if (host := places.host_of(incident)) else ""
    oom = "`dmesg -T` says whether the kernel ran out of memory (oom-kill)"
    if any(end.signal == signal.SIGKILL and not is_by_ctrl_c(end) for end in ends):  # nobody else says why
        return at + oom
    if incident.evidence.hung and ends and all(_ended_by_others(end) for end in ends):
        return "read the stacks of the ranks that held up the others: they are with the hang"  # which ended them all
    if all(end.signal == signal.SIGTERM for end in ends) and ends:
        return "find out who sent SIGTERM: a scheduler at its time limit, or whoever ended the launcher"
    lost = [all_ends[rank] for rank in incident.ranks if rank in all_ends and all_ends[rank].reason == "lost"]
    if any(not end.detail.startswith("exited with code") for end in lost):
        return f"read the exit code of {ranks_named(incident.ranks)} in the launcher's output; after -9, {at}{oom}"
    if lost:
        return f"read what {ranks_named(incident.ranks)} printed last: sys.exit and os._exit leave no traceback"
    return f"read the traceback of {ranks_named(incident.ranks)} in the job's output"


def _memory_grows(incident: Incident, places: JobPlaces) -> str:
    """Returns how to find what keeps memory: by torch's own record of a GPU's, by what Python holds of the host's."""
    memory, who = incident.evidence.memory, ranks_named(incident.ranks)
    if memory is not None and memory.of == "gpu":
        record = "torch.cuda.memory._record_memory_history()"
        return f"see what keeps tensors in {who}: {record}, some steps later _dump_snapshot('memory.pickle')"
    count = "sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())"
    return (
        f"print {count} in {who} now and then: if it grows, tensors are kept (losses not detached, lists); else "
        "tracemalloc, which sees no tensors"
    )


NEXT_STEPS: Final[Mapping[Kind, Callable[[Incident, JobPlaces], str]]] = {
    "straggler": _late,
    "intermittent": _late,
    "pause": _pause,
    "drift": _late,
    "slow_input": _input,
    "imbalance": _imbalance,
    "exposed_comm": _exposed,
    "repeated_reduction": lambda *_: _NO_SYNC,
    "buffers": lambda *_: _BUFFERS,
    "slow_link": _link,
    "slow_device": _slower,
    "too_many_threads": lambda *_: _THREADS,
    "slow_host": lambda incident, places: _device(incident, places) or places.stack_of(incident.ranks[0]),
    "memory": _memory_grows,
    "hang": _hang,
    "death": _death,
    "stopped": lambda *_: "none: somebody stopped the job",
    "not_reduced": lambda *_: "let the comm hook all-reduce, as torch's default_hooks.allreduce_hook does",
    "ranks_apart": lambda *_: _TOGETHER,
    "layouts_differ": lambda *_: "build the same model on all ranks: compare list(model.named_parameters())",
}


def next_step(incident: Incident, places: JobPlaces) -> str:
    """Returns what to do about an incident; never empty."""
    return NEXT_STEPS[incident.kind](incident, places)


# -- by account ----------------------------------------------------------------------------------------------

_BY_ACCOUNT: Final[Mapping[AccountName, str]] = {
    "jitter": f"give each rank cores of its own; or, if they have these, {_LENGTHS}",
    "pause": "each of its incidents says what to do",
    "waiting": "each of its incidents says what to do",
}


def next_step_for(lost: LostTime, places: JobPlaces) -> str:
    """Returns what to do about most of the lost time; empty if nothing is lost."""
    worst = next((account.name for account in lost_accounts(lost)), None)
    if worst is None:
        return ""
    if worst == "input":
        return places.faster_loader
    return _BY_ACCOUNT.get(worst) or _exposed_by(places, is_much=lost.much)


def on_screen(text: str, in_log: bool = False) -> str:
    """Returns a next step for the dashboard, which has keys for commands, and a view of incidents with their stacks.

    ``in_log`` is for that view itself.
    """
    if in_log:
        text = text.replace(_ASK, _READ)
    text = _PROFILE.sub(PROFILE_ON_SCREEN, _WHAT_IF.sub(ON_SCREEN, text))
    text = _EXPLAIN.sub(EXPLAIN_ON_SCREEN, text)
    return _IN_LOG + text if text.startswith(_LOGGED) and not in_log else text
