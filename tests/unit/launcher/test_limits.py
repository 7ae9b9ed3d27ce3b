"""Limits of the launcher that a user waits for or reads: what happens just below and just above each."""

import asyncio
import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest

from pipelinerl.config.keys import declared
from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config, LauncherSection
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import domain_check, existing_servers, preflight, run_dir, terminal
from pipelinerl.launcher.doctor.policies import candidates
from pipelinerl.launcher.engine import stop_in_waves
from pipelinerl.launcher.peers import ending_fields
from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.jobset import render as render_jobset
from pipelinerl.launcher.render.slurm import render as render_slurm
from pipelinerl.launcher.reporting import RunReports
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.records import SamplesProcessed
from pipelinerl.streams import set_streams_backend
from tests.evidence import config as config_with_metrics

LIMITS = LauncherSection(**{key.name: key.default for key in declared(LauncherSection)})


def config(*overrides: str) -> Config:
    return parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", *overrides]))


class Clock:
    """Takes the place of the module `time`. Every look is at the next of these times, and a sleep takes none."""

    def __init__(self, *times: float):
        self._times = iter(times)

    def monotonic(self) -> float:
        return next(self._times)

    def time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None: ...


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits of trials, none of which is made."""
    limits: list[float] = []

    def run(*_: str, job: Any = None, timeout_s: float) -> dict[str, Any]:
        limits.append(timeout_s)
        return {"refusal": None, "names": [], "warnings": []}

    monkeypatch.setattr(preflight, "run_trial", run)
    return limits


def test_start_waits_half_a_minute_for_a_domain_and_five_for_torch(trials: list[float], tmp_path: Path) -> None:
    """Four rounds of rollouts, one after the other, fit into the domain's own time."""
    preflight.check_domain({})
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    preflight.check_architecture(config(f"model_path={tmp_path}"), 1)
    assert trials == [28.0, 300.0]
    assert trials[0] / 2 > 4 * domain_check.ROLLOUT_TIMEOUT_S


def test_start_waits_eight_seconds_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def model_info(self: object, name: str, timeout: float) -> None:
        limits.append(timeout)
        raise TimeoutError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ConfigError, match=r"the hub cannot be asked \(TimeoutError\)"):
        preflight.check_model("nobody/nothing")
    assert limits == [8.0]


def test_start_waits_a_minute_for_an_existing_server(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Client(httpx.Client):
        def __init__(self, *, timeout: float, **_: Any):
            limits.append(timeout)
            super().__init__(transport=httpx.MockTransport(lambda request: httpx.Response(500)))

    monkeypatch.setattr(httpx, "Client", Client)
    with pytest.raises(ConfigError, match="status 500"):
        existing_servers.check_existing(config("debug.existing_llms=[http://127.0.0.1:9]"), {})
    assert limits == [60.0]


def test_start_waits_a_minute_for_the_reaper_of_a_killed_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "time", Clock(0.0, 59.9, 60.1))
    path = tmp_path / "lock"
    path.write_text("4194305 1.0")  # above the largest pid
    with open(path, encoding="utf-8") as reaper, open(path, "a+", encoding="utf-8") as lock:
        fcntl.flock(reaper, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="have not ended within 60 s"):
            run_dir.take_lock(lock, tmp_path)


@pytest.mark.parametrize(("kind", "limit_s"), [("failed", 60.0), ("stopped", 15.0)])
async def test_page_of_a_stopped_run_is_awaited_shorter_than_that_of_a_failed_one(
    kind: Any, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def write_page(self: RunReports, host: Any, limit_s: float, hurried: asyncio.Event) -> None:
        limits.append(limit_s)

    monkeypatch.setattr(RunReports, "_write_page", write_page)
    reports = RunReports(config(), tmp_path, lambda line: None, SimpleNamespace())  # type: ignore[arg-type]
    await reports.unfinished(Ending(kind=kind, reason="SIGINT"), SimpleNamespace())  # type: ignore[arg-type]
    assert limits == [limit_s]


def test_stores_get_a_fifth_of_the_time_when_a_run_does_not_end_in_order() -> None:
    waves: list[tuple[set[str], float]] = []
    kinds = ["actor", "actor_llm", "redis"]
    stop_in_waves(kinds, lambda kinds, s: waves.append((set(kinds), s)), LIMITS, orderly=False, report=lambda: None)
    assert waves == [({"actor", "actor_llm"}, 8.0), ({"redis"}, pytest.approx(1.6))]


def test_reason_in_a_lease_has_at_most_4000_characters() -> None:
    assert [len(ending_fields(Ending(kind="failed", reason=n * "x"))["reason"]) for n in (4000, 4001)] == [4000, 4000]


def test_platforms_get_three_minutes_for_the_last_save_and_ten_restarts() -> None:
    """A last save takes up to `launcher.save_timeout_s`, and more where a user raises that."""
    deployment = Deployment(arguments=("--config-name=quickstart", "output_dir=/results/x"), image="image")
    assert "#SBATCH --signal=B:TERM@180\n" in render_slurm(deployment)
    assert "maxRestarts: 10\n" in render_jobset(deployment)
    assert "cpu: '8'\n" in render_jobset(deployment)


def step(number: int) -> SamplesProcessed:
    return SamplesProcessed(samples_processed=number, step=number, timestamp=1.0)


def test_optimizer_step_stays_on_the_terminal_every_30_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_streams_backend("files")
    monkeypatch.setattr(terminal, "time", Clock(0.0, 29.9, 30.1))
    said: list[str] = []
    lines = ProgressLines(tmp_path, cfg=config_with_metrics("finetune.max_train_steps=9"), say=said.append)
    for number in (1, 2, 3):
        lines.add_message(step(number))
    assert [line.split()[1] for line in said] == ["1/9", "3/9"]


def test_value_of_up_to_2000_characters_is_tried_as_an_answer() -> None:
    rows = [{"short": f"{row}" * 2000, "long": f"{row}" * 2001} for row in (1, 2)]
    assert {option.field for option in candidates(rows, ())} == {"short"}
