"""How a server process ends, asked to or because its engine died, and what it counts when it is asked to."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.served import sample


def engine_of(server: Any) -> psutil.Process | None:
    """The engine, whose process vLLM names before each line it logs. None before the first one."""
    named = re.search(r"\(EngineCore pid=(\d+)\)", server.log())
    return psutil.Process(int(named[1])) if named else None


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("moment", ["imports", "engine_logs"])
def test_sigterm_during_the_start_ends_with_zero_and_no_orphan(
    moment: str, tmp_path: Path, tiny_qwen2: Path, serving: Any
) -> None:
    with serving.own_cores() as cores:
        server = serving.start(tmp_path, serving.write_run(tmp_path, tiny_qwen2, cores))
        front, children = psutil.Process(server.process.pid), set[int]()
        status = tmp_path / "status" / f"{server.job.name}.json"

        def has_come() -> bool:
            children.update(child.pid for child in front.children(recursive=True))
            return engine_of(server) is not None or (moment == "imports" and status.exists())

        serving.wait_for(has_come, 200, server.log)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=180) == 0, server.log()[-3000:]
        serving.wait_for(lambda: all(is_gone(pid) for pid in children), 60, server.log)


def test_server_whose_engine_dies_ends_with_an_error_and_one_whose_front_dies_leaves_no_engine(
    tmp_path: Path, tiny_qwen2: Path, serving: Any
) -> None:
    """The first one is asked for vLLM's own metrics, too, and has them before it dies. The second one has no time."""
    wanted = ("+vllm_config.vllm_kwargs.disable_log_stats=false",)
    with serving.own_cores() as cores:
        for victim in ("engine", "front"):
            run_dir = tmp_path / victim
            overrides = wanted if victim == "engine" else ()
            server = serving.start(run_dir, serving.write_run(run_dir, tiny_qwen2, cores, overrides=overrides))
            if victim == "engine":
                serving.wait_until_up(server)
                check_metrics(server)
            serving.wait_for(lambda server=server: engine_of(server) is not None, 200, server.log)
            engine = engine_of(server)
            assert engine is not None
            os.kill(engine.pid if victim == "engine" else server.process.pid, signal.SIGKILL)
            code = server.process.wait(timeout=180)
            assert code != 0
            if victim == "engine":
                assert "the server ended without being asked to" in server.log()
            serving.wait_for(lambda pid=engine.pid: is_gone(pid), 60, server.log)


def check_metrics(server: Any) -> None:
    """vLLM's own count the tokens of answers."""
    completions = sample(server.job.url, list(range(40, 60)), max_tokens=7, n=3)
    assert [len(completion.token_ids) for completion in completions] == [7, 7, 7]
    lines = httpx.get(f"{server.job.url}/metrics", timeout=30).text.splitlines()
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:")}
    assert counted["vllm:generation_tokens_total"] == 3 * 7
    assert counted["vllm:e2e_request_latency_seconds_count"] == 3
