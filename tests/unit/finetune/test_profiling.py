"""Which steps a profile covers, what its file holds, and what the server is told."""

import gzip
import json
from pathlib import Path

import httpx
import pytest
import torch

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.finetune import profiling
from pipelinerl.finetune.profiling import ServerProfile, StepProfile
from pipelinerl.membership.watch import PlacedJobs
from pipelinerl.world import Job


class Told(ServerProfile):
    def __init__(self) -> None:
        self.commands: list[str] = []

    def start(self) -> None:
        self.commands.append("start")

    def stop(self) -> None:
        self.commands.append("stop")

    def close(self) -> None:
        self.commands.append("close")


def run_steps(profile: StepProfile, steps: range) -> None:
    """Each step multiplies matrices of its own size."""
    for step in steps:
        profile.before(step)
        with torch.profiler.record_function(f"step_{step}"):
            torch.ones(4, 4).mm(torch.ones(4, 4))
        profile.after(step)
    profile.close()


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [(range(5), [1, 2]), (range(2, 5), [2]), (range(2), [1])],
    ids=["whole", "resumed_within", "ends_within"],
)
def test_profile_holds_the_operations_of_its_steps_alone(tmp_path: Path, steps: range, recorded: list[int]) -> None:
    profile, told = StepProfile(1, 2, tmp_path, server := Told()), server.commands
    run_steps(profile, steps)
    names = [event["name"] for event in json.loads(gzip.decompress(profile.path.read_bytes()))["traceEvents"]]
    assert [name for name in names if name.startswith("step_")] == [f"step_{step}" for step in recorded]
    assert names.count("aten::mm") == len(recorded)
    assert told == ["start", "stop", "close"]


def test_run_that_never_reaches_the_steps_writes_nothing(tmp_path: Path) -> None:
    server = Told()
    run_steps(StepProfile(7, 8, tmp_path, server), range(3))
    assert server.commands == ["close"]
    assert not list(tmp_path.iterdir())


def test_first_policy_server_is_told_and_one_that_refuses_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200 if request.url.path == "/start_profile" else 404)

    monkeypatch.setenv(SECRET_VARIABLE, "s")
    monkeypatch.setattr(profiling, "own_client", lambda: {"transport": httpx.MockTransport(answer)})
    jobs = [Job(name=f"actor_llm_{n}", kind="actor_llm", replica_idx=n, url=f"http://h{n}") for n in (1, 0)]
    server = ServerProfile(PlacedJobs(jobs))
    server.start()
    server.stop()
    server.close()
    assert [str(request.url) for request in asked] == ["http://h0/start_profile", "http://h0/stop_profile"]
    assert {request.headers["authorization"] for request in asked} == {"Bearer s"}
    assert [record.message.split(" error=")[0] for record in caplog.records] == [
        "event=server_not_profiled url=http://h0 path=/stop_profile"
    ]


def test_run_without_servers_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = ServerProfile(PlacedJobs([]))
    server.start()
    server.close()
    assert "event=server_not_profiled url=None" in caplog.text
