"""A change as text: its name, the code that makes it, and what its prediction assumes."""

from __future__ import annotations

from collections.abc import Iterator

from ddpwatch.whatif.assignment import DEFAULT_CAP_BYTES, MIB
from ddpwatch.whatif.recorded import Recorded
from ddpwatch.whatif.scenarios import Change

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
AT_MOST = " (at most)"
_ACCUMULATION = """\
import contextlib
for number, (inputs, targets) in enumerate(loader, 1):
    reduces = number % {batches} == 0
    with contextlib.nullcontext() if reduces else model.no_sync():
        (loss_function(model(inputs), targets) / {batches}).backward()
    if reduces:
        optimizer.step()
        optimizer.zero_grad()"""


def name_of(change: Change) -> str:
    """Returns the change in a few words."""
    return " + ".join(_names(change)) or "nothing"


def _names(change: Change) -> Iterator[str]:
    if change.cap_mib is not None and change.first_mib is None:
        yield f"bucket cap {change.cap_mib:g} MiB"
    elif change.first_mib is not None:
        cap = DEFAULT_CAP_BYTES / MIB if change.cap_mib is None else change.cap_mib
        yield f"bucket cap {cap:g} MiB, the first {change.first_mib:g} MiB"
    if change.bucket_view:
        yield "gradient_as_bucket_view"
    if change.static_graph:
        yield "static_graph"
    if change.hook:
        yield f"{change.hook} hook"
    if change.accumulate > 1:
        yield f"accumulation over {change.accumulate} batches"
    if change.link != 1:
        yield f"a link {change.link:g} times as fast"
    if change.world is not None:
        yield f"{change.world} ranks"
    if change.without_lateness_of is not None:
        yield f"rank {change.without_lateness_of} as fast as the others"
    if change.no_input:
        yield "no wait for data"
    if change.perfect:
        yield f"any cap, hook or link{AT_MOST}"


def code_of(change: Change) -> str:
    """Returns code that runs as it stands, on what a script has by these names; empty if the change is none of code."""
    return "\n".join(_lines(change))


def _lines(change: Change) -> Iterator[str]:
    options = []
    if change.first_mib is not None:
        cap = DEFAULT_CAP_BYTES / MIB if change.cap_mib is None else change.cap_mib
        options.append(f"bucket_cap_mb_list=[{change.first_mib:g}, {cap:g}]")
    elif change.cap_mib is not None:
        options.append(f"bucket_cap_mb={change.cap_mib:g}")
    options += ["gradient_as_bucket_view=True"] if change.bucket_view else []
    options += ["static_graph=True"] if change.static_graph else []
    if options:
        yield "from torch.nn.parallel import DistributedDataParallel"
        yield f"model = DistributedDataParallel(model, {', '.join(options)})"
    if change.powersgd_rank:
        state = f"PowerSGDState(None, matrix_approximation_rank={change.powersgd_rank})"
        yield f"from {_HOOKS}.powerSGD_hook import PowerSGDState, powerSGD_hook"
        yield f"model.register_comm_hook({state}, powerSGD_hook)"
    elif change.hook:
        yield f"from {_HOOKS} import default_hooks"
        yield f"model.register_comm_hook(None, default_hooks.{change.hook}_compress_hook)"
    if change.accumulate > 1:
        yield _ACCUMULATION.format(batches=change.accumulate)


def statement_of(code: str) -> str:
    """Returns the only line of a snippet that is no import; empty if there are others."""
    lines = [line for line in code.splitlines() if not line.startswith(("import ", "from "))]
    return lines[0] if len(lines) == 1 else ""


def assumptions(change: Change, recorded: Recorded, measured_wire: bool) -> Iterator[str]:
    """Yields what must be true for the prediction to hold."""
    if change.moves_buckets or change.hook or change.world is not None:
        source = "wire.json" if measured_wire else "the recorded ones"
        yield f"collectives of other sizes cost what the line through {source} says"
    if change.first_mib is not None:
        yield "torch 2.13 or newer, for bucket_cap_mb_list"
    if change.hook:
        cast = not measured_wire and not change.powersgd_rank
        yield "no comm hook is registered now" + ("; a cast costs about two copies" if cast else "")
    if change.hook == "bf16" and not recorded.gpu:
        yield "torch is built with CUDA and NCCL, without which DDP refuses this hook"
    if change.powersgd_rank:
        cost = "what the sweep found" if measured_wire else "about 20 copies of the gradients (10 with rank 1)"
        same = ", with any rank from 2 on" if change.powersgd_rank > 2 else ""
        yield f"PowerSGD has started (start_powerSGD_iter), and costs the hosts {cost}{same}"
    if change.hook or change.accumulate > 1:
        yield "training still converges as well"
    if change.accumulate > 1:
        yield "times are per batch"
    if change.bucket_view:
        yield "only the copying back after the wait goes away"
    if change.link != 1:
        yield "latency stays, and so does what the hosts add to the link's time"
    if change.world is not None:
        yield "a ring (or NCCL's tree) over equal links"
        if change.world < len(recorded.ranks):
            yield f"the first {change.world} ranks stay"
        elif change.world > len(recorded.ranks):
            yield "further ranks are like those recorded, on cores of their own"
    if change.without_lateness_of is not None:
        yield f"rank {change.without_lateness_of} works like the rank in the middle of the others"
        yield "all of these steps count, where a verdict's gain is of the steps that its incident struck"
    if change.perfect:
        yield "communication takes no time, and ranks still wait for each other"
        if not recorded.gpu:
            yield "what collectives wait for a core counts as communication, though no cap, hook or link ends that"
    if recorded.flag("broadcast_buffers") and change.without_lateness_of is not None:
        yield "the forward waits for no broadcast of buffers"
