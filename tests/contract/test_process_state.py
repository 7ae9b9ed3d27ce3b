"""The suite itself sees what a test may leave behind."""

import faulthandler
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.finetune import attention
from pipelinerl.streams import api as streams
from pipelinerl.streams import set_streams_backend
from tests import conftest, process_state

REGISTER: dict[str, int] = {}
COLOR = "red"
FOLDER, UMASKS = os.getcwd(), deque[int]()


class Noted(logging.Handler):
    pass


def import_from(folder: Path) -> None:
    module = types.ModuleType("prl_written_by_a_test")
    module.__file__ = str(folder / "prl_written_by_a_test.py")
    sys.modules[module.__name__] = module


HANDLER, LOGGER, ROOT = Noted(), logging.getLogger("pipelinerl.noted"), logging.getLogger()
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "environment variable PRL_ADDED": (lambda: os.environ.update(PRL_ADDED="1"), lambda: os.environ.pop("PRL_ADDED")),
    "process's working directory": (lambda: os.chdir("/"), lambda: os.chdir(FOLDER)),
    "process's umask": (lambda: UMASKS.append(os.umask(0o027)), lambda: os.umask(UMASKS.pop())),
    "process's limits": (
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[0] - 1, FILES[1])),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, FILES),
    ),
    "process's SigCgt": (
        lambda: faulthandler.register(signal.SIGUSR2),
        lambda: faulthandler.unregister(signal.SIGUSR2),
    ),
    "handler of 10": (lambda: signal.signal(10, lambda *_: None), lambda: signal.signal(10, signal.SIG_DFL)),
    "logger root": (lambda: ROOT.setLevel(logging.INFO), lambda: ROOT.setLevel(logging.WARNING)),
    "logger pipelinerl.noted": (lambda: LOGGER.addHandler(HANDLER), lambda: LOGGER.removeHandler(HANDLER)),
    "logger captures warnings": (lambda: logging.captureWarnings(True), lambda: logging.captureWarnings(False)),
    "interpreter's garbage collector": (gc.disable, gc.enable),
    "interpreter's numpy errors": (lambda: np.seterr(divide="raise"), lambda: np.seterr(divide="warn")),
    "sys. path": (lambda: sys.path.append("/nowhere"), lambda: sys.path.remove("/nowhere")),
    "torch's default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch's gradients": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    f"size of {__name__}'s REGISTER": (lambda: REGISTER.update(a=1), REGISTER.clear),
    f"variable of {__name__}: COLOR": (
        lambda: globals().update(COLOR="blue"),
        lambda: globals().update(COLOR="red"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_the_process_is_seen_and_named(name: str) -> None:
    change, undo = CHANGES[name]
    if name == "logger pipelinerl.noted":
        LOGGER.setLevel(logging.DEBUG)
    before = process_state.process_state()
    change()
    try:
        found = process_state.differences(before, process_state.process_state())
    finally:
        undo()
    assert process_state.differences(before, process_state.process_state()) == []
    LOGGER.setLevel(logging.NOTSET)
    assert any(line.startswith(f"{name}:") for line in found), found


def test_module_that_a_test_wrote_is_seen_and_a_library_is_not(tmp_path: Path) -> None:
    before = process_state.process_state()
    sys.modules["prl_library"] = types.ModuleType("prl_library")
    assert process_state.differences(before, process_state.process_state()) == []
    import_from(tmp_path)
    [found] = process_state.differences(before, process_state.process_state())
    del sys.modules["prl_library"], sys.modules["prl_written_by_a_test"]
    assert found.startswith("module prl_written_by_a_test: 'nothing'")


@pytest.mark.parametrize(
    ("temporary", "place", "is_change"),
    [
        ("work/tmp", "work/tmp/written", True),
        ("work/tmp", "work/tmp-env/site-packages", False),
        ("work", "work/env/site-packages", False),
    ],
)
def test_import_from_an_environment_beside_or_in_the_temporary_folder_is_no_change(
    monkeypatch: pytest.MonkeyPatch, temporary: str, place: str, is_change: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/nowhere/{temporary}")
    monkeypatch.setattr(sys, "prefix", "/nowhere/work/env")
    before = process_state.process_state()
    import_from(Path("/nowhere") / place)
    found = process_state.differences(before, process_state.process_state())
    del sys.modules["prl_written_by_a_test"]
    assert bool(found) is is_change


def test_choices_of_product_code_are_put_back() -> None:
    before = process_state.process_state()
    set_streams_backend("files")
    attention.announce((3, 4), torch.device("cpu"))
    assert len(process_state.differences(before, process_state.process_state())) == 2
    process_state.restore_choices(before)
    assert (streams._backend, attention._announced) == (None, None)
    assert process_state.differences(before, process_state.process_state()) == []


def test_effects_of_a_librarys_first_import_are_undone_after_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "LIBRARIES", ("prl_library",))
    before = process_state.process_state()
    sys.modules["prl_library"] = types.ModuleType("prl_library")
    os.environ["PRL_ADDED"] = "1"
    assert process_state.differences(before, process_state.process_state()) == []
    process_state.restore(before)
    del sys.modules["prl_library"]
    assert "PRL_ADDED" not in os.environ
    assert process_state.differences(before, process_state.process_state()) == []


def test_shared_memory_that_cuda_made_for_another_living_process_is_no_leak() -> None:
    """CUDA keeps no mapping, so nobody seems to use it. What it made for a process of ours that died is a leak."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    paths = [Path(f"/dev/shm/cuda.shm.0.{maker:x}.99") for maker in (os.getppid(), child.pid)]
    try:
        for path in paths:
            path.write_bytes(b"x")
        assert [conftest._is_left(path.name) for path in paths] == [False, True]
    finally:
        for path in paths:
            path.unlink()
