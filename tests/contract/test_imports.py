"""Modules that are imported everywhere load nothing heavy. Who may import whom stands in `pyproject.toml`."""

import subprocess
import sys

LIGHT = (
    "pipelinerl.launch",
    "pipelinerl.launcher.program",
    "pipelinerl.launcher.domain_check",
    "pipelinerl.inspect.status",
    "pipelinerl.state",
    "pipelinerl.streams",
    "pipelinerl.world",
    "pipelinerl.records",
    "pipelinerl.config.load",
    "pipelinerl.config.rules",
    "pipelinerl.membership.role",
    "pipelinerl.observability.metrics",
    "pipelinerl.rollouts",
    "pipelinerl.llm",
    "pipelinerl.async_llm",
    "pipelinerl.actor.role",
    "pipelinerl.actor.worker_pool",
)
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "wandb", "matplotlib")


def test_imports_of_light_modules_load_nothing_heavy() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_help_of_the_command_loads_no_configuration_and_a_start_no_client_of_other_servers() -> None:
    code = (
        "import sys, pipelinerl.__main__\n"
        "assert not {'pydantic', 'msgspec', 'pipelinerl.world'} & set(sys.modules)\n"
        "import pipelinerl.launcher.existing_servers\n"
        "assert 'httpx' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
