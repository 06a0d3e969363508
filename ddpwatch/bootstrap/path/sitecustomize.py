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


_INSTALL = {  # in `ddpwatch.bootstrap.auto`, by the module that calls it
    "torch.nn.parallel.distributed": "install",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "install_sharded",
    "ray.train.v2._internal.execution.worker_group.worker": "install_ray",
}


def _watch_imports() -> None:
    """Calls `ddpwatch.bootstrap.auto` once one of these modules is imported, if it ever is."""
    try:
        from wrapt import register_post_import_hook
    except ImportError:
        sys.stderr.write("ddpwatch: not installed for this Python, its processes are not watched\n")
        return
    for name in _INSTALL:
        register_post_import_hook(_install, name)


def _install(module):  # type: ignore[no-untyped-def]
    try:
        from ddpwatch.bootstrap import auto

        getattr(auto, _INSTALL[module.__name__])(module)
    except Exception as error:  # an import of the job's must never fail because of ddpwatch
        sys.stderr.write(f"ddpwatch: does not watch: {error}\n")


if os.environ.get("DDPWATCH") != "0":
    _watch_imports()
_run_next_sitecustomize()
