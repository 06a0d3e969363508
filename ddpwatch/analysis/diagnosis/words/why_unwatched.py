"""Why nothing is watched, or no step has ended: one sentence for every place that has to say it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.run.startup import Process
from ddpwatch.wire.messages import Beat, Bye

PATIENCE_S: Final = 20.0  # that a job takes to start, before a hint says what to do
WATCHED: Final = (
    "what is watched: models in DistributedDataParallel or FSDP2, and loops whose torch.optim.Optimizer steps"
)
STEP: Final = "a loop without DDP or FSDP2 is watched from the first step of a torch.optim.Optimizer on"
KEEP_THE_PATH: Final = (
    "ddpwatch is loaded through PYTHONPATH: keep it when you set that (…:$PYTHONPATH), and start ranks on this host, "
    "outside containers, without -I and -E; or call ddpwatch.watch(model) in the script"
)
JOIN: Final = "call torch.distributed.init_process_group"


@dataclass(frozen=True, slots=True)
class Why:
    """A sentence, and what to do about it, if there is something to do by now."""

    text: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.text, self.hint)))


NOT_KNOWN: Final = Why()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job without steps.

    Attributes:
        processes: Those of this host that have reported; None if they could not.
        seconds: Since the job started.
        over: The job has ended.
        watched: How many ranks have a model that is watched.
        forwards: Whether one of these has called it, with gradients; None if that is not known.
    """

    processes: Sequence[Process] | None = None
    seconds: float = 0.0
    over: bool = False
    watched: int = 0
    forwards: bool | None = False


def why_unwatched(facts: Facts) -> Why:
    """Returns the sentence for what a job did last, of all that it does before its first step."""
    if facts.watched:
        return _without_step(facts.forwards)
    if facts.processes is None:
        return _so_far(facts, "no rank has reached what could be watched", WATCHED)
    found = facts.processes
    if any(process.model for process in found):
        return _about_to_report(found, facts)
    return _raised(found) or _refused(found) or _without_model(found, facts)


def forwards_known(before: bool | None, message: Beat | Bye) -> bool | None:
    """Returns whether a run's ranks have begun a forward with gradients, by one more message; None if nobody knows.

    A rank without steps stays in what follows its forward. Its phase is empty once it is no longer watched.
    """
    if before and message.phase:
        return True
    return message.phase != "input" if before is not None and message.phase else None


def _without_step(forwards: bool | None) -> Why:
    if forwards is None:
        return NOT_KNOWN
    if forwards:
        text = "no step has ended: no optimizer has stepped between two forwards of the model"
        return Why(text, "a step ends when a torch.optim.Optimizer has stepped, after the forward has returned")
    text = "no forward with gradients has gone through the wrapped model"
    return Why(
        text, "a step begins where the wrapper itself is called, model(batch), not model.module or another method"
    )


def _about_to_report(found: Sequence[Process], facts: Facts) -> Why:
    """Says why what could be watched has no run."""
    wrapped = any(process.model == "wrapped" for process in found)
    if refused := next((process.refused for process in found if process.refused), ""):
        return Why(f"{'a model in DDP or FSDP2' if wrapped else 'the loop'} cannot be watched: {refused}")
    what, is_there = ("a model was", "the model is") if wrapped else ("an optimizer has", "an optimizer has")
    did = "wrapped" if wrapped else "stepped"
    if facts.over:
        return Why(f"{what} {did}, and the job ended before its first report", "ddpwatch needs a second or two")
    return Why(f"{is_there} {did}, and the first report is under way")


def _raised(processes: Sequence[Process]) -> Why | None:
    """Returns the exception that has ended most ranks, once; that of another process, if no rank has raised one."""
    raised = [process for process in processes if process.error and not process.launches]
    ranks = [process for process in raised if process.rank is not None]
    errors = [process.error for process in ranks or raised]
    if not errors:
        return None
    error = max(errors, key=errors.count)
    named = sorted({process.rank for process in ranks if process.rank is not None and process.error == error})
    who = ranks_named(named) if named else "the job"
    return Why(f"{who} raised {error}, before anything was watched", "the job's output has the traceback")


def _refused(processes: Sequence[Process]) -> Why | None:
    """Returns why ddpwatch could not start in ranks, or in another process, if that is so."""
    refused = [process for process in processes if process.refused]
    if not refused:
        return None
    named = sorted({process.rank for process in refused if process.rank is not None})
    who = ranks_named(named) if named else "the job"
    return Why(f"{who} cannot be watched: {refused[0].refused}", "`ddpwatch doctor` shows what is missing")


def _without_model(found: Sequence[Process], facts: Facts) -> Why:
    """Returns how far the job has come."""
    ranks = list(_by_rank(found).values())
    launched = any(process.launches for process in found)
    size = max((process.group or 0 for process in ranks), default=0)
    importers = sum(process.torch for process in found)
    if size and (facts.over or all(process.group for process in ranks)):
        return _so_far(facts, f"a process group of {_count(size, 'rank')}, and no optimizer has stepped", STEP)
    if ranks and not facts.over:
        return Why(("torchrun has started, and " if launched else "") + _progress(ranks))
    if ranks:
        return Why(f"{_count(len(ranks), 'rank')}, and no process group", JOIN)
    if launched:
        return _so_far(facts, "torchrun has started, and none of its ranks has reported to ddpwatch", KEEP_THE_PATH)
    if importers:
        return _so_far(facts, f"{_count(importers, 'process')} with torch, and no optimizer has stepped", STEP)
    if found:
        return _so_far(facts, f"{_count(len(found), 'Python process')}, and torch has not been imported", WATCHED)
    return _so_far(facts, "no Python process of the job has reported to ddpwatch", KEEP_THE_PATH)


def _by_rank(processes: Sequence[Process]) -> dict[int, Process]:
    """Returns one process for each rank.

    The newest, but not one of those that a rank has started, which inherit its number.
    """
    found: dict[int, Process] = {}
    for process in processes:
        if process.rank is not None and (process.group or process.rank not in found):
            found[process.rank] = process
    return found


def _progress(ranks: Sequence[Process]) -> str:
    """Returns how far the ranks of this host have come, while some are not in a process group."""
    total = max(len(ranks), *(process.ranks or 0 for process in ranks))
    importing = sum(not process.torch for process in ranks)
    joined = sum(process.group is not None for process in ranks)
    parts = [
        f"{count} {what}"
        for count, what in (
            (total - len(ranks), "to come"),
            (importing, "importing torch"),
            (len(ranks) - importing - joined, "not in a process group yet"),
            (joined, "in a process group"),
        )
        if count
    ]
    return f"{len(ranks)} of {total} ranks are up: {', '.join(parts)}"


def _so_far(facts: Facts, text: str, hint: str) -> Why:
    """Returns what may still change; then a hint would come too early."""
    if facts.over:
        return Why(text, hint)
    return Why(f"{text} so far", hint if facts.seconds > PATIENCE_S else "")


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"one {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
