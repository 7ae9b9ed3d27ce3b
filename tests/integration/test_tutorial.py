"""The code of README.md and docs/domains.md, taken from the pages, runs as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.site_proxy import proxied

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall((ROOT / page).read_text()) if kind == language]


def run(folder: Path, *command: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def write_domain(folder: Path, name: str, code: str, config: str) -> None:
    (folder / f"{name}.py").write_text(code)
    (folder / "conf").mkdir()
    (folder / "conf" / f"{name}.yaml").write_text(config)


def check_domain(folder: Path, name: str, *overrides: str) -> None:
    """A dry run by the page's command, and the launcher's own trial of loader and rollout."""
    arguments = [f"--config-dir={folder / 'conf'}", f"--config-name={name}", "output_dir=run", "wandb.mode=disabled"]
    shown = run(folder, "-m", "pipelinerl.launch", *arguments, "dry_run=true", *overrides)
    assert "nothing was started" in shown
    trial = (
        "from pathlib import Path; from pipelinerl.launcher.preflight import check_domain\n"
        "from pipelinerl.config.load import compose, to_container\n"
        f"cfg = compose({name!r}, ['output_dir=run'], config_dir=Path('conf'))\n"
        "print(check_domain({**to_container(cfg), 'jobs': []}))\n"
    )
    assert run(folder, "-c", trial).strip() == "[]"


def test_readme_domain_runs(tmp_path: Path):
    (code,) = [block for block in blocks("README.md", "python") if block.startswith("# my_domain.py")]
    (config,) = [block for block in blocks("README.md", "yaml") if "my_domain" in block]
    write_domain(tmp_path, "my_domain", code, config)
    check_domain(tmp_path, "my_domain")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """The tutorial's files: what belongs to sums.py in the order of the page, its test, its configuration."""
    code = blocks("docs/domains.md", "python")
    own = [block for block in code if block.startswith("# sums.py") or "generate_rollout(\n" in block]
    (config,) = [block for block in blocks("docs/domains.md", "yaml") if block.startswith("# conf/sums.yaml")]
    write_domain(tmp_path, "sums", "\n".join(own), config)
    (test,) = [block for block in code if "def test_" in block]
    (tmp_path / "test_sums.py").write_text(test)
    return tmp_path


def test_tutorial_domain_runs(sums: Path):
    check_domain(sums, "sums", "world.gpus_per_node=8")


def test_tutorial_domain_on_cpu_has_its_model(sums: Path):
    (config,) = [block for block in blocks("docs/domains.md", "yaml") if block.startswith("# conf/sums_cpu.yaml")]
    (sums / "conf" / "sums_cpu.yaml").write_text(config)
    launch = ["-m", "pipelinerl.launch", "--config-dir=conf", "--config-name=sums_cpu", "output_dir=run"]
    shown = run(sums, *launch, "dry_run=true", "world.cpu_slots=2")
    assert "nothing was started" in shown
    talk = (
        "from random import Random; from pipelinerl.tiny_model.recipes import make_recipe\n"
        "asked, answered = make_recipe('sums.warm_up', {'limit': 3}).conversation(Random(0))\n"
        "print(asked['content'].endswith(' = ?'), answered['content'].isdecimal())\n"
    )
    assert run(sums, "-c", talk).strip() == "True True"


def test_tutorial_test_passes(sums: Path):
    assert "1 passed" in run(sums, "-m", "pytest", "test_sums.py")


def test_tutorial_agent_runs_behind_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = [block for block in blocks("docs/guides/agent.md", "python") if "record_agent" in block]
    agent = (
        "async def my_agent(client, question):\n"
        "    answer = await client.chat.completions.create(\n"
        "        model='policy', messages=[{'role': 'user', 'content': question}])\n"
        "    return answer.choices[0].message.content\n"
    )
    play = (
        "import asyncio\nfrom pipelinerl.testing import run_rollout\n"
        "problem = {'question': '2 + 3?', 'answer': '5', 'dataset': 'train'}\n"
        "result = asyncio.run(run_rollout(generate_rollout, problem, ['5']))\n"
        "print(result.metrics.reward, result.training_texts[0].output_text)\n"
    )
    (tmp_path / "agent.py").write_text(code + agent + play)
    with proxied(monkeypatch) as reached:
        for own in ("http://127.0.0.1:9", "socks5://127.0.0.1:9", "socks5h://127.0.0.1:9"):
            monkeypatch.setenv("ALL_PROXY", own)
            assert run(tmp_path, "agent.py").strip() == "1.0 5<|im_end|>"
    assert reached == []
