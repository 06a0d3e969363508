"""Where a figure becomes a finding: high enough to be worth an engineer's time."""

from __future__ import annotations

EXPOSED_SHARE = 0.10  # of a step; so much lost time is a warning, whatever it is for
INPUT_SHARE = 0.04  # of a step
LONGER_SHARE = 0.15  # than before, or than at first, is a step of all ranks
WORTH_SHARE = 0.01  # of a step: a late rank that costs less is no warning

WORTH_SAYING = 0.005  # of a step, or of the run: what an incident costs at least, to be mentioned
COSTLY_SHARE = 0.05  # of the run, or of a step: what is lost is said then, whatever it is for

OVER_SHARE = 0.7  # of what an incident starts at: below that, it is over
KEEP_ENDED = 64  # of what slowed all ranks and is over, by kind
KEEP_INCIDENTS = 256  # that are over, of one run: the costliest
ENOUGH_STEPS = 8  # for a first verdict

# Of device causes. Below these shares of the time, a rank is not late by `LATE_SHARE` of a step.
DENIED_SHARE = 0.05  # waiting for a core, stolen, throttled by a cgroup, or lost to a lower clock
PRESSURE_SHARE = 0.20  # some thread of the host waited for a core or for memory: mostly not one of the job's
SWAP_BYTES_S = 1e6  # 250 pages: a disk takes 1 % to 10 % of a second for them. At rest, a host swaps less
NET_ERRORS_S = 10.0  # a broken cable or port makes hundreds, a healthy one none for days
NET_DROPS_S = 100.0  # a healthy interface drops a few packets per second that nobody wants
RETRANSMITS_S = 20.0  # each costs a round trip at least; a healthy network makes a few, where routes change
CONGESTION_S = 1_000.0  # each makes a sender of RDMA slower for some 50 µs
LINK_ERRORS_S = 1.0  # a healthy PCIe or NVLink makes none for hours
ANY_S = 1e-3  # any at all: uncorrected memory errors, XIDs, OOM kills, links that go down
WORSE_FACTOR = 1.5  # than before, or than with the peers, is a device or a link: what load does is less
