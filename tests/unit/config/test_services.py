"""Kubernetes describes every Service of a namespace in the environment of its pods, also one that is called `vllm`."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.config.environment import drop_services
from pipelinerl.launcher.command_line import main


def service(name: str, scheme: str = "tcp") -> dict[str, str]:
    """The variables of a Service with the port 8000, which is called `http` (kubernetes.io, "Service environment")."""
    port = f"{name}_PORT_8000_{scheme.upper()}"
    return {
        f"{name}_SERVICE_HOST": "10.0.0.7",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": f"{scheme}://10.0.0.7:8000",
        port: f"{scheme}://10.0.0.7:8000",
        f"{port}_PROTO": scheme,
        f"{port}_PORT": "8000",
        f"{port}_ADDR": "10.0.0.7",
    }


@pytest.mark.parametrize(
    "dropped", [service("VLLM"), service("VLLM_DP_MASTER"), service("RAY_HEAD", "udp"), service("WANDB")]
)
def test_service_called_like_a_program_is_dropped(dropped: dict[str, str]) -> None:
    kept = {
        **service("REDIS"),
        **service("VLLMS"),
        **service("KUBERNETES"),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_DP_MASTER_IP": "10.0.0.9",
        "WANDB_SERVICE_WAIT": "300",
    }
    env = {**dropped, **kept}
    assert drop_services(env) == sorted(dropped)
    assert env == kept


def test_port_that_the_user_chose_stays() -> None:
    env = {"VLLM_PORT": "8000", "VLLM_SERVICE_HOST": "judge.corp"}
    assert drop_services(env) == []
    assert len(env) == 2


def test_launch_and_a_role_without_a_launcher_say_what_they_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in service("VLLM").items():
        monkeypatch.setenv(name, value)
    assert main(["--config-name=quickstart", f"output_dir={tmp_path / 'run'}", "dry_run=true"]) == 0
    assert ", ".join(sorted(service("VLLM"))) in capsys.readouterr().out
    role = [sys.executable, "-m", "pipelinerl.inference", "--run", str(tmp_path / "none"), "--job", "actor_llm_0"]
    done = subprocess.run(role, capture_output=True, text=True, check=False)
    assert ", ".join(sorted(service("VLLM"))) in done.stdout + done.stderr
