"""The ranks' store is a class of Python, and threads of C++ call it: NCCL's watchdogs read and write it every second.

They must get through while Python computes, waits in a collective or runs many of them, and none may be left when
Python ends: a thread that asks for the interpreter then takes the process down, and the exit code no longer tells why.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch.utils.cpp_extension as extension

from tests.engine_runs import ROOT
from tests.ports import free_port

RANKS = ROOT / "tests" / "ranks"
LEAST_LOOKS = 10


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled watchdog."""
    folder = tmp_path_factory.mktemp("watchdog")
    includes = [f"-I{path}" for path in (*extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in extension.library_paths()] + ["-ltorch_python", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *includes, str(RANKS / "store_watchdog.cpp")]
    subprocess.run([*command, "-o", str(folder / "store_watchdog.so"), *libraries], check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ending", "code"), [("well", 0), ("error", 1)])
def test_threads_of_cpp_use_the_store_and_none_is_left_at_the_end(library: Path, ending: str, code: int) -> None:
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PIPELINERL_SECRET": "s" * 16}
    env |= {"PYTHONPATH": os.pathsep.join([str(library), str(ROOT)])}
    env.pop("PIPELINERL_RANKS_FILE", None)
    command = [sys.executable, str(RANKS / "watched_rank.py"), ending]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == code, errors.decode()[-2000:]
        told = {name: value for line in output.splitlines() for name, value in json.loads(line).items()}
        assert not told.pop("in a group")
        assert len(told) == 3
        assert min(told.values()) >= LEAST_LOOKS, told
