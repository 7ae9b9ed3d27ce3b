"""A run that is interrupted, whose domain tells its secret wherever it can.

It leaves no process, and neither the secret nor an escape sequence is in its folder. A slow test moves and resumes it.
"""

import base64
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from tests.sender_kit import wait_for

RUN_TIMEOUT_S = 600
pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S + 60)
TOKEN, HOSTILE = "planted-sk-4711", "\x1b]0;owned\x07"
DOMAIN = """
import http.server, logging, os, sys
from pipelinerl.domains import largest

log = logging.getLogger(__name__)


def tell(key, who):
    assert key == os.environ["LOUD_KEY"], "the reference has its value here"
    print(f"{who} has {key} \\x1b]0;owned\\x07", flush=True)
    print(f"{who} has {key} \\x1b]0;owned\\x07", file=sys.stderr, flush=True)
    log.warning("%s has %s \\x1b]0;owned\\x07 \\r", who, {"key": key})


def load_problems(dataset_names, api_key, **params):
    tell(api_key, "the loader")
    return [problem | {"place": place} for place, problem in enumerate(largest.load_problems(dataset_names, **params))]


async def generate_rollout(cfg, llm, problem, session):
    tell(cfg.dataset_loader_params.api_key, "a rollout")
    if problem["place"] % 4 == 3:
        raise RuntimeError(f"\\x1b]0;owned\\x07 {cfg.my_api_key} was refused")
    return await largest.generate_rollout(cfg, llm, problem, session)


class Server:
    def __init__(self, api_key):
        tell(api_key, "a server")

    def launch(self, port):
        class Healthy(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

        http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
OVERRIDES = (
    "+dataset_loader_params.api_key={env: LOUD_KEY}",
    "extra_keys=[my_api_key]",
    "+my_api_key={env: LOUD_KEY}",
    "environments=[{_target_: loud.Server, key: loud, api_key: {env: LOUD_KEY}}]",
    "+vllm_config.env.SERVERS_TOKEN={env: LOUD_KEY}",
    "dataset_loader=loud.load_problems",
    "actor.rollout_policy=loud.generate_rollout",
    "dataset_loader_params.num_test_problems=16",
    "finetune.save_checkpoint_steps=4",
    *("eval.at_start=false", "eval.at_end=false"),
    "finetune.max_train_steps=1000",  # it must not end before it is interrupted
    "actor.max_domain_errors=100000",
    "tracker=[wandb,tensorboard]",
    "wandb.mode=offline",
    "wandb.sample_steps=1",
)


class LoudRun(NamedTuple):
    folder: Path
    told: str
    """Standard output and errors of the launcher."""
    code: int
    """Exit code of the launcher."""
    left: list[psutil.Process]
    """Processes of the run after its end."""
    env: dict[str, str]
    """Environment of the launcher."""


@pytest.fixture(scope="module")
def loud_run(tmp_path_factory: pytest.TempPathFactory) -> LoudRun:
    """The domain is a module in the working directory."""
    folder = tmp_path_factory.mktemp("secrets")
    project = folder / "project"
    project.mkdir()
    (project / "loud.py").write_text(DOMAIN)
    env = {**os.environ, "LOUD_KEY": f"Bearer {TOKEN}"}
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", "output_dir=run", *OVERRIDES]
    with (folder / "told").open("w+") as told:
        first = subprocess.Popen(command, cwd=project, env=env, stdout=told, stderr=told)
        wait_for(lambda: first.poll() is not None or trained(project / "run") >= 5, RUN_TIMEOUT_S)
        first.send_signal(signal.SIGINT)
        code = first.wait(timeout=200)
        left = [process for process in psutil.process_iter() if str(project / "run") in command_line(process)]
    return LoudRun(project / "run", (folder / "told").read_text(), code, left, env)


def trained(run_dir: Path) -> int:
    return max((point["step"] for point in read_metrics(run_dir, "finetune")), default=0)


def command_line(process: psutil.Process) -> str:
    try:
        return "" if process.pid == os.getpid() else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_interrupted_run_leaves_nothing(loud_run: LoudRun) -> None:
    assert (loud_run.code, loud_run.left) == (130, []), loud_run.told[-4000:]
    ledger = read_ledger(loud_run.folder)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == trained(loud_run.folder) * 64


@pytest.mark.slow
def test_interrupted_run_resumes_moved_and_from_another_folder(loud_run: LoudRun, tmp_path: Path) -> None:
    """The working directory of the first launch, where the domain's module is, is gone."""
    moved, project = shutil.copytree(loud_run.folder, tmp_path / "moved", symlinks=True), loud_run.folder.parent
    steps = trained(moved) + 6
    again = [sys.executable, "-m", "pipelinerl", "resume", "moved", f"finetune.max_train_steps={steps}"]
    away = project.rename(tmp_path / "away")
    try:
        done = subprocess.run(
            again, cwd=tmp_path, env=loud_run.env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
    finally:
        away.rename(project)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ledger = read_ledger(moved)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == steps * 64
    assert TOKEN not in done.stdout + done.stderr


def test_secret_and_escape_sequences_are_in_no_file_of_a_run(loud_run: LoudRun) -> None:
    run_dir = loud_run.folder
    contents = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    page = re.search(rb"[A-Za-z0-9+/=]{1000,}", contents[run_dir / "report.html"])
    assert page is not None
    contents[run_dir / "data of report.html"] = gzip.decompress(base64.b64decode(page[0]))
    assert len(contents) > 50
    assert [path for path, content in contents.items() if TOKEN.encode() in content] == []
    logs = [path for path in contents if path.name in ("log.txt", "launcher.log")]
    assert [path for path in logs if re.search(rb"[\x00-\x08\x0b-\x1f]", contents[path])] == []
    for job, who in (("actor_0", "a rollout has"), ("actor_0", "the loader has"), ("environment_0", "a server has")):
        log = (run_dir / job / "log.txt").read_text()
        assert f"{who} *** ␛]0;owned␇\n" in log
        assert f"{who} {{'key': '***'}} ␛]0;owned␇ {'' if job == 'environment_0' else '␍'}\n" in log
    assert "LOUD_KEY" in (run_dir / "conf" / "config.yaml").read_text()


def test_secret_and_escape_sequences_reach_no_terminal(loud_run: LoudRun) -> None:
    run_dir, told = loud_run.folder, loud_run.told
    commands = (
        ["rollouts", "--all"],
        ["rollouts", "--json"],
        ["status"],
        ["why"],
        ["streams", "tail", "actor", "--text", "--last=1000"],
    )
    for command in commands:
        place = 2 if command[0] == "streams" else 1
        argv = [sys.executable, "-m", "pipelinerl", *command[:place], str(run_dir), *command[place:]]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (0, 1), done.stderr
        told += done.stdout + done.stderr
    assert TOKEN not in told
    assert re.search(r"[\x00-\x08\x0b-\x1f]", told) is None
    assert "*** was refused" in told  # the reason of a dropped group
