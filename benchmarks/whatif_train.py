"""demo/train.py with options of DDP that it does not have, as `benchmarks/whatif.py` needs them.

whatif_train.py '{"gradient_as_bucket_view": true}' --model gpt …
"""

from __future__ import annotations

import json
import sys
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from demo.train import main
from trainer.strategies import ddp

if __name__ == "__main__":
    setattr(ddp, "DistributedDataParallel", partial(DistributedDataParallel, **json.loads(sys.argv[1])))  # noqa: B010
    sys.exit(main(sys.argv[2:]))
