"""A run whose domain tells its secret wherever it can: neither the secret nor an escape sequence is in its folder."""

import base64
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "finetune.max_train_steps=3",
    "actor.max_domain_errors=100000",
    "tracker=[wandb,tensorboard]",
    "wandb.mode=offline",
    "wandb.sample_steps=1",
)


@pytest.fixture(scope="module")
def loud_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "loud.py").write_text(DOMAIN)
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={folder / 'run'}"]
    env = {**os.environ, "LOUD_KEY": f"Bearer {TOKEN}", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, *OVERRIDES], env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "run", done.stdout + done.stderr


def test_secret_and_escape_sequences_are_in_no_file_of_a_run(loud_run: tuple[Path, str]) -> None:
    run_dir, _ = loud_run
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


def test_secret_and_escape_sequences_reach_no_terminal(loud_run: tuple[Path, str]) -> None:
    run_dir, told = loud_run
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
