"""What Ray's processes import, for the fork server to preload.

Each actor class draws an id as it is imported. If Ray's own generator drew them, it would be seeded then, and all forks
would go on with the same ids.
"""

import os

import ray.actor
from ray._raylet import ActorClassID


class _Drawn:
    @staticmethod
    def from_random() -> ActorClassID:
        return ActorClassID(os.urandom(ActorClassID.size()))


ray.actor.ActorClassID = _Drawn
import ray.train.torch  # noqa: E402 - with the actor classes

ray.actor.ActorClassID = ActorClassID
