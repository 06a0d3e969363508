"""Runs at the start of every Python process below `ddpwatch run`, so that modules of DDP and FSDP2 are watched.

Costs a process that never imports torch next to nothing, and must never break one. Runs the ``sitecustomize`` that
Python would have found without this one.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next_sitecustomize() -> None:
    """Runs the next sitecustomize on the path, under its own name."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib in every process
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch_torch() -> None:
    """Calls `ddpwatch.bootstrap.auto` once torch's DDP or FSDP2 is imported, if it ever is."""
    try:
        from wrapt import register_post_import_hook
    except ImportError:
        sys.stderr.write("ddpwatch: not installed for this Python, its processes are not watched\n")
        return
    register_post_import_hook(_install, "torch.nn.parallel.distributed")
    register_post_import_hook(_install, "torch.distributed.fsdp._fully_shard._fsdp_state")


def _install(module):  # type: ignore[no-untyped-def]
    try:
        from ddpwatch.bootstrap.auto import install, install_sharded

        (install if module.__name__ == "torch.nn.parallel.distributed" else install_sharded)(module)
    except Exception as error:  # an import of the job's must never fail because of ddpwatch
        sys.stderr.write(f"ddpwatch: does not watch: {error}\n")


if os.environ.get("DDPWATCH") != "0":
    _watch_torch()
_run_next_sitecustomize()
