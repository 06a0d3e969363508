"""Runs at the start of every Python process below `ddpwatch run`, so that modules of DDP and FSDP2 are watched.

Costs a process that never imports torch a few milliseconds, and must never break one. Runs the ``sitecustomize`` that
Python would have found without this one.
"""

import atexit
import importlib.machinery
import importlib.util
import os
import sys

_STARTUP = os.environ.get("DDPWATCH_STARTUP")


def _tell(word: str, text: str = "") -> None:
    """Appends a line to the job's start-up file (`ddpwatch.run.startup`), unless that is full. Never fails."""
    if not _STARTUP:
        return
    try:
        file = os.open(_STARTUP, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size < 1 << 20:
                os.write(file, f"{os.getpid()} {word} {text}\n".encode(errors="replace"))
        finally:
            os.close(file)
    except Exception:  # the file is for a user who wonders: the job does without
        return


def _tell_start() -> None:
    """Says that this process is there, and which of its host's ranks it is."""
    about = [os.environ.get(name, "") for name in ("RANK", "LOCAL_WORLD_SIZE")]
    _tell("start", " ".join(about).strip())


def _tell_error() -> None:
    """Names the exception that ends this process: in one line, which is the last of one that quotes another's."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return
    try:
        lines = str(error).split("\n")
        quotes = [line for line in lines if line.strip()] if "Traceback (most recent call last)" in lines else []
        _tell("error", (quotes[-1] if quotes else f"{type(error).__name__}: {lines[0]}")[:400])
    except Exception:
        return


def _run_next_sitecustomize() -> None:
    """Runs the next sitecustomize on the path, under its own name."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib in every process
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_INSTALL = {  # in `ddpwatch.job.auto`, by the module that calls it
    "torch.nn.parallel.distributed": "install",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "install_sharded",
    "ray.train.v2._internal.execution.worker_group.worker": "install_ray",
    "torch.distributed.distributed_c10d": "install_groups",
    "torch.distributed.device_mesh": "install_roles",
    "torch.distributed.pipelining.stage": "install_roles",
    "torch.optim.optimizer": "install_loops",
}
_TOLD = {"torch": "torch", "torch.distributed.elastic.agent.server.api": "launcher"}  # once they are imported


def _watch_imports() -> None:
    """Calls `ddpwatch.job.auto` once one of these modules is imported, if it ever is."""
    try:
        from wrapt import register_post_import_hook
    except ImportError:
        sys.stderr.write("ddpwatch: not installed for this Python, its processes are not watched\n")
        _tell("refused", "ddpwatch is not installed for its Python")
        return
    for name in _INSTALL:
        register_post_import_hook(_install, name)
    for name in _TOLD if _STARTUP else ():
        register_post_import_hook(_told, name)


class _BeforeTorch:
    """Waits for the first import of torch: wrapt imports what takes 60 ms, of which torch imports most itself."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        try:
            sys.meta_path.remove(cls)
        except ValueError:  # another thread imports it, too
            return None
        _watch_imports()
        return importlib.util.find_spec(name)  # past what has been put before the other finders


def _told(module):  # type: ignore[no-untyped-def]
    _tell(_TOLD[module.__name__])


def _install(module):  # type: ignore[no-untyped-def]
    try:
        from ddpwatch.job import auto

        auto.tell = _tell
        getattr(auto, _INSTALL[module.__name__])(module)
    except Exception as error:  # an import of the job's must never fail because of ddpwatch
        sys.stderr.write(f"ddpwatch: does not watch: {error}\n")
        _tell("refused", " ".join(str(error).split())[:400])


if os.environ.get("DDPWATCH") != "0":
    if _STARTUP:
        _tell_start()
        atexit.register(_tell_error)
    if "torch" in sys.modules:
        _watch_imports()
    else:
        sys.meta_path.insert(0, _BeforeTorch)
_run_next_sitecustomize()
