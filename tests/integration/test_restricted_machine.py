"""A run on no developer's machine: behind a proxy, beside a Service `vllm`, in a folder with brackets."""

from pathlib import Path

import pytest

from tests.launches import run_experiment
from tests.unit.config.test_services import service

RUN_TIMEOUT_S = 600
DEAD = "127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_agent_learns_on_a_restricted_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = {"HTTP_PROXY": f"http://{DEAD}", "HTTPS_PROXY": f"http://{DEAD}", "ALL_PROXY": f"socks5://{DEAD}"}
    for name, value in {**proxies, **service("VLLM"), "VLLM_PLUGINS": "lora_filesystem_resolver"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", ".corp")
    monkeypatch.delenv("no_proxy", raising=False)
    summary = run_experiment("quickstart_agent", tmp_path / "run[1]", timeout_s=RUN_TIMEOUT_S)
    assert summary["success_after"] >= 0.68
    assert summary["aborted_requests"] == 0
