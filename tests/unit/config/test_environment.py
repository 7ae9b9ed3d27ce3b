import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.config import load
from pipelinerl.config.environment import VARIABLES, checked_variables, is_on
from pipelinerl.errors import ConfigError
from tests.says import says

SET_BY_US = {
    "ACCELERATE_USE_DEEPSPEED",
    "HYDRA_FULL_ERROR",
    "LD_BIND_NOW",
    "PYTHONUTF8",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_WORKER_MULTIPROC_METHOD",
} | {
    "PIPELINERL_NO_API_KEY"  # named to another library, and never set
}
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")


@pytest.mark.parametrize("value", ["true", "YES", "On", "1"])
def test_boolean_variable_is_true_in_any_spelling(value: str) -> None:
    assert checked_variables({"DRY_RUN": value}) == {"DRY_RUN": "1"}
    assert is_on({"DRY_RUN": value}, "DRY_RUN")


@pytest.mark.parametrize("value", ["false", "No", "OFF", "0"])
def test_boolean_variable_is_false_in_any_spelling(value: str) -> None:
    assert checked_variables({"HF_HUB_OFFLINE": value}) == {"HF_HUB_OFFLINE": "0"}
    assert not is_on({"HF_HUB_OFFLINE": value}, "HF_HUB_OFFLINE")


def test_empty_and_foreign_variables_are_not_judged() -> None:
    assert checked_variables({"DRY_RUN": "", "OMP_NUM_THREADS": "", "VLLM_PORT": "tcp://10.0.0.1:80"}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "4,2"),
        ("OMP_NUM_THREADS", " 8 "),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c,MIG-GPU-89/1/0"),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("WANDB_MODE", "Offline"),
        ("SANDBOX_ENDPOINT", "https://sandbox.example:8080/x"),
    ],
)
def test_value_of_its_type_passes(name: str, value: str) -> None:
    assert checked_variables({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("DRY_RUN", "ja", "true, yes, on, 1, false, no, off or 0"),
        ("DRY_RUN", "2", "true, yes, on, 1, false, no, off or 0"),
        ("WANDB_MODE", "ofline", "online, offline, disabled, run or dryrun"),
        ("OMP_NUM_THREADS", "abc", "a whole number of at least 1, or several such as 4,2"),
        ("OMP_NUM_THREADS", "0", "a whole number of at least 1, or several such as 4,2"),
        ("OMP_NUM_THREADS", "4,", "a whole number of at least 1, or several such as 4,2"),
        ("MKL_NUM_THREADS", "2.5", "a whole number of at least 1, or several such as 4,2"),
        ("RANK", "first", "a whole number"),
        ("SANDBOX_ENDPOINT", "localhost:8080", "an address such as http://127.0.0.1:8080"),
        ("CUDA_VISIBLE_DEVICES", "all", "numbers or names of GPUs"),
    ],
)
def test_value_of_another_type_is_refused_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=says(f"environment variable {name}={value!r}: it may be {allowed}")):
        checked_variables({name: value})


def test_server_variables_of_the_configuration_have_the_same_types() -> None:
    cfg = load.compose("quickstart", ["output_dir=x", "+vllm_config.env.OMP_NUM_THREADS=abc"])
    with pytest.raises(ConfigError, match=says("`vllm_config.env`: environment variable OMP_NUM_THREADS='abc'")):
        load.validate(cfg)


def test_every_variable_that_the_package_reads_is_declared() -> None:
    folder = Path(pipelinerl.__file__).parent
    read = {
        (name, path.name)
        for path in folder.rglob("*.py")
        for name in variables_read(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {name for name, _ in read} > {"WORLD_SIZE", "SLURM_NODEID", "NETRC", "DRY_RUN", "HF_HUB_OFFLINE"}
    assert {(name, file) for name, file in read if name not in VARIABLES.keys() | SET_BY_US} == set()


def variables_read(tree: ast.Module) -> Iterator[str]:
    """Literal names in `env.get(…)`, `env[…]`, `… in env`, and `helper(env, …)`, and constants `…_VARIABLE`."""
    for node in ast.walk(tree):
        names: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_environment(node.func.value):
            names = node.args[:1] if node.func.attr in ("get", "pop") else []
        elif isinstance(node, ast.Call) and node.args and is_environment(node.args[0]):
            names = node.args[1:2]
        elif isinstance(node, ast.Subscript) and is_environment(node.value) and isinstance(node.ctx, ast.Load):
            names = [node.slice]
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            names = [node.left]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = [node.value] if node.targets[0].id.endswith("_VARIABLE") else []
        for name in names:
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and NAME.fullmatch(name.value):
                yield name.value


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "env", "environ", "environment")
