"""What a test may leave changed in its process, so that the tests after it depend on it."""

import asyncio
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

UNCOMPARED_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "AITER_")
"""torch sets its own when it first compiles, and vLLM's modules set those of kernels that they import."""
ROOT = Path(__file__).parents[1]
OWN = ("pipelinerl", "examples", "tests", "benchmarks")
"""Packages whose module variables are compared."""
_containers = defaultdict[str, tuple[int, list[str]]](lambda: (0, []))
"""Number of variables of a module, and the names of those that hold a container: found once, as most never change."""
SIGNALS = [number for number in signal.Signals if number != signal.SIGALRM]  # pytest-timeout's, another for every test
UNCOMPARED_SIGNALS = 0b11 << 31 | 1 << signal.SIGALRM - 1  # 32 and 33 are the C library's own
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
CHOSEN = (("pipelinerl.streams.api", "_backend"), ("pipelinerl.finetune.attention", "_announced"))
"""Variables that product code sets for its whole process before it uses them. `restore_choices` puts them back."""
CACHES = (("pipelinerl.world.network", "_looked_up"), ("pipelinerl.config.environment", "REFERRED"))
"""What product code keeps for its whole process. `restore_choices` empties them."""
LIBRARIES = ("vllm", "cv2", "ray", "deepspeed")
"""Their first import changes environment, caught signals, and hooks. Later files get the environment back."""
BY_IMPORT = ("environment variable", "process's", "logger", "interpreter's")
State = dict[str, dict[Any, Any]]
"""Groups of things, each with values that compare equal as long as nothing has changed."""


def process_state() -> State:
    """Values are references. Of a container in a module variable the length is kept, too."""
    state: State = {
        "environment variable": {k: v for k, v in os.environ.items() if not k.startswith(UNCOMPARED_VARIABLES)},
        "process's": _process(),
        "handler of": {number: signal.getsignal(number) for number in SIGNALS},
        "logger": _loggers(),
        "module": sys.modules.copy(),
        "sys.": {
            "path": [path for path in sys.path if "site-packages" not in path],  # setuptools adds its own
            "path_hooks": sys.path_hooks[:],
            "argv": sys.argv[:],
        },
        "interpreter's": _interpreter(),
    }
    for name, module in sys.modules.copy().items():
        if name.startswith(OWN) and isinstance(module, ModuleType):
            found = vars(module)
            state[f"variable of {name}:"] = found.copy()
            state[f"size of {name}'s"] = _sizes(name, found)
    if "torch" in sys.modules:
        state["torch's"] = _torch()
    return state


def _sizes(name: str, found: dict[str, Any]) -> dict[str, int]:
    """Lengths of the containers among a module's variables."""
    count, names = _containers[name]
    if count != len(found):
        names = [key for key, value in found.items() if type(value) in (dict, list, set)]
        _containers[name] = len(found), names
    return {key: len(found[key]) for key in names if isinstance(found.get(key), (dict, list, set))}


def chosen() -> State:
    """What `restore_choices` puts back, without the rest of a state."""
    return {
        f"variable of {name}:": {variable: getattr(sys.modules[name], variable)}
        for name, variable in CHOSEN
        if name in sys.modules
    }


def restore_choices(before: State) -> None:
    for name, variable in CHOSEN:
        if name in sys.modules:
            setattr(sys.modules[name], variable, before.get(f"variable of {name}:", {}).get(variable))
    for name, cache in CACHES:
        if name in sys.modules:
            getattr(sys.modules[name], cache).clear()


def restore(before: State) -> None:
    """Puts back what the first import of a library has changed, too."""
    restore_choices(before)
    if _imports(before):
        for name in os.environ.keys() - before["environment variable"].keys():
            if not name.startswith(UNCOMPARED_VARIABLES):
                del os.environ[name]
        os.environ.update(before["environment variable"])


def differences(before: State, after: State) -> list[str]:
    """One line for each thing that was changed, removed, or added where an import adds nothing."""
    return [
        f"{group} {name}: {_shown(old.get(name, 'nothing'))} -> {_shown(new.get(name, 'nothing'))}"
        for group, old in before.items()
        for new in [after.get(group, {})]
        if not (_equal(old, new) or (group in BY_IMPORT and _imports(before)))
        for name in sorted(old.keys() | new.keys(), key=str)
        if not (_may_appear(group, name, new) if name not in old else _is_kept(group, name, old, new))
    ]


def _imports(before: State) -> bool:
    return any(name in sys.modules and name not in before["module"] for name in LIBRARIES)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays
        return False


def _may_appear(group: str, name: Any, new: dict[Any, Any]) -> bool:
    if group == "module":  # another test may write a module of this name
        path = Path(getattr(new[name], "__file__", None) or "/")
        is_installed = any(path.is_relative_to(folder) for folder in (ROOT, sys.prefix, sys.base_prefix))
        return is_installed or not path.is_relative_to(tempfile.gettempdir())
    return group.startswith(("logger", "variable of", "size of"))


def _is_kept(group: str, name: Any, old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    if group == "module" and not name.startswith(OWN):  # transformers replaces its own
        return True
    return name in new and _equal(old[name], new[name])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "…"


def _process() -> dict[str, Any]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "umask": fields["Umask"].strip(),
        **{name: hex(int(fields[name], 16) & ~UNCOMPARED_SIGNALS) for name in ("SigCgt", "SigIgn", "SigBlk")},
        "working directory": os.getcwd(),
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "cores": os.sched_getaffinity(0),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "locale": locale.setlocale(locale.LC_ALL),
        "time zone": time.tzname,
        "temporary folder": tempfile.tempdir,
    }


def _loggers() -> dict[str, Any]:
    manager = logging.root.manager
    own = (logging.getLoggerClass(), logging.getLogRecordFactory(), manager.disable, logging.raiseExceptions)
    state: dict[str, Any] = {"classes": own, "captures warnings": logging._warnings_showwarning is not None}  # type: ignore[attr-defined]
    for logger in (logging.root, *manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and (
            logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate
        ):
            handlers = [handler for handler in logger.handlers if not type(handler).__module__.startswith("_pytest")]
            state[logger.name] = (logger.level, handlers, logger.filters[:], logger.disabled, logger.propagate)
    return state


def _interpreter() -> dict[str, Any]:
    return {
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, warnings.showwarning),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "start method": multiprocessing.get_start_method(allow_none=True) or "fork",  # the default
        "event loop policy": type(asyncio.get_event_loop_policy()),
        "decimal context": str(decimal.getcontext()),
        "numpy errors": np.geterr(),
    }


def _torch() -> dict[str, Any]:
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 precision": torch.get_float32_matmul_precision(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "shared memory": torch.multiprocessing.get_sharing_strategy(),
    }
