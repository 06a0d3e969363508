"""The kinds of incidents, and all that the rest of ddpwatch knows of a kind: one row each."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal[
    "straggler",
    "intermittent",
    "pause",
    "drift",
    "slow_input",
    "imbalance",
    "exposed_comm",
    "repeated_reduction",
    "buffers",
    "slow_link",
    "slow_device",
    "too_many_threads",
    "slow_host",
    "memory",
    "hang",
    "death",
    "stopped",
    "not_reduced",
    "layouts_differ",
    "ranks_apart",
]


class KindOf(NamedTuple):
    """What is known of a kind.

    Attributes:
        letter: In a strip of steps: it sets the kinds apart without colour.
        name: In tables and before a message.
        in_sentences: Its name where nothing else explains it; empty for the same.
        late: Whether it is one of late ranks. These are called by what they do most: one goes on as another.
        blames: Whether its ranks are late by themselves.
        of_host: Whether a slow host replaces those of its ranks.
        for_good: Whether ranks train different models since then, even if it is over.
        comes_back: Whether one that comes soon after another is the same one.
        general: Whether it says only where time goes: not who, nor why, unless a device shows that.
    """

    letter: str
    name: str
    late: bool = False
    blames: bool = False
    of_host: bool = False
    for_good: bool = False
    comes_back: bool = False
    general: bool = False
    in_sentences: str = ""


KINDS: Final[dict[Kind, KindOf]] = {
    # A rank is late in nearly every step, or now and then
    "straggler": KindOf("S", "straggler", late=True, blames=True, of_host=True, comes_back=True),
    "intermittent": KindOf(
        "I", "intermittent", late=True, blames=True, comes_back=True, in_sentences="late now and then"
    ),
    # A single stall, of one rank or of all
    "pause": KindOf("P", "pause"),
    # A rank, or all of them, gets slower and slower
    "drift": KindOf("D", "drift", late=True, blames=True, of_host=True, comes_back=True),
    # The loop waits for data in nearly every step
    "slow_input": KindOf("W", "slow input", late=True, of_host=True, comes_back=True),
    # Another rank is last in each step
    "imbalance": KindOf("J", "imbalance", comes_back=True),
    # Transfers that no compute hides
    "exposed_comm": KindOf("E", "exposed", comes_back=True, general=True, in_sentences="exposed transfer"),
    # Gradients are reduced more than once per update
    "repeated_reduction": KindOf("R", "repeated reduction", comes_back=True),
    # DDP sends its buffers before each forward
    "buffers": KindOf("F", "buffers", comes_back=True, in_sentences="broadcast of buffers"),
    # Transfers have become slower
    "slow_link": KindOf("L", "slow link", comes_back=True),
    # All ranks are slower from a step on: their devices show why, or it is known in which phase
    "slow_device": KindOf("C", "all ranks slower", comes_back=True, general=True),
    # Ranks have more CPU threads than cores
    "too_many_threads": KindOf("T", "too many threads"),
    # Most ranks of one host are late
    "slow_host": KindOf("M", "slow host", late=True, blames=True, comes_back=True),
    # A rank takes more and more memory
    "memory": KindOf("G", "memory grows", comes_back=True),
    # A rank does not go on
    "hang": KindOf("H", "hang"),
    # A rank ended before it finished
    "death": KindOf("X", "death"),
    # Somebody ended the job by Ctrl-C
    "stopped": KindOf("K", "stopped"),
    # The comm hook communicates nothing
    "not_reduced": KindOf("N", "not reduced", for_good=True),
    # Ranks of one group have different buckets
    "layouts_differ": KindOf("B", "layouts differ", for_good=True),
    # A rank has left out a backward
    "ranks_apart": KindOf("A", "ranks apart", for_good=True),
}
