"""Every refusal of a command line: one message, exit code 2, soon, and nothing started or written."""

import io
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, to_container
from pipelinerl.errors import DomainError
from pipelinerl.launcher import preflight
from pipelinerl.launcher.command_line import main
from pipelinerl.launcher.domain_check import check_domains
from tests.ports import free_port
from tests.says import says

ROOT = Path(__file__).resolve().parents[2]
CONFIG_COST, DOMAIN_COST = 6.5, 7.0
"""Processor seconds in units of those of `UNIT`. With torch it would be three more."""
UNIT = [sys.executable, "-c", "import aiohttp, hydra, msgspec, numpy"]
DOMAIN = """
import aiohttp
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult


def load_problems(dataset_names, **params):
    return [{"question": f"{n}?", "answer": n, "dataset": name} for name in dataset_names for n in range(8)]


def load_dicts_of_something_else(dataset_names, **params):
    return [{"prompt": "1?"}] * 8


def load_dict(dataset_names, **params):
    return {"question": "1?", "answer": 1}


def load_strings(dataset_names, **params):
    return ["1?"]


def load_nothing(dataset_names, **params):
    return []


def load_and_raise(dataset_names, **params):
    raise FileNotFoundError("no such data set: " + dataset_names[0])


def load_and_die(dataset_names, **params):
    import os
    os._exit(3)


def load_without_arguments():
    return []


async def generate_rollout(cfg, llm, problem, session):
    call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": problem["question"]}]), session)
    text = make_training_text(llm, call)
    text.reward = float(call.output.content == str(problem["answer"]))
    metrics = BaseMetrics(reward=text.reward, success=text.reward > 0, no_error=True, no_answer=False)
    return RolloutResult(training_texts=[text], metrics=metrics, latency=0.0, dataset_name=problem.get("dataset"))


async def raise_at_once(cfg, llm, problem, session):
    raise RuntimeError("this domain is broken")


async def raise_after_the_answer(cfg, llm, problem, session):
    result = await generate_rollout(cfg, llm, problem, session)
    return result.no_such_field


async def return_a_number(cfg, llm, problem, session):
    return 1.0


async def reward_nothing(cfg, llm, problem, session):
    result = await generate_rollout(cfg, llm, problem, session)
    result.training_texts[0].reward = None
    return result


async def need_a_service(cfg, llm, problem, session):
    async with session.get("http://127.0.0.1:9/judge"):
        pass


def not_async(cfg, llm, problem, session):
    return None


async def three_arguments(cfg, llm, problem):
    return None


async def strict(cfg, llm, problem, session):
    return await generate_rollout(cfg, llm, problem, session)


strict.required_problem_keys = ("question", "difficulty")
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "toy_domain.py").write_text(DOMAIN)
    (tmp_path / "broken_domain.py").write_text("1 / 0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "torn.yaml").write_text("defaults: [base, _self_]\nattempts: [8\n")
    yield tmp_path
    sys.modules.pop("toy_domain", None)


def launch(place: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and everything printed but progress, by the command's main function in this process.

    Another --config-name stands alone.
    """
    if not any(argument.startswith("--config-name") for argument in arguments):
        own = ("--config-name=quickstart", "output_dir=run", "tiny_model=null", "model_path=model")
        arguments = (*own, *arguments)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.chdir(place)
        patch.setenv("PYTHONPATH", f"{place}{os.pathsep}{ROOT}")
        code = main(arguments)
    lines = said.getvalue().splitlines(keepends=True)
    return code, "".join(line for line in lines if not line.startswith("checking the "))


def run_command(place: Path, *arguments: str) -> tuple[int, str]:
    """The same, by the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl.launch", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def toy(rollout: str = "generate_rollout", loader: str = "load_problems") -> list[str]:
    return [f"actor.rollout_policy=toy_domain.{rollout}", f"dataset_loader=toy_domain.{loader}"]


REFUSALS = {
    "unknown override": (
        ["finetune.learnin_rate=1"],
        says("`finetune.learnin_rate`", "`finetune.learning_rate`"),
    ),
    "unknown added key": (["+finetune.nope=1"], "`finetune.nope` is not a configuration key"),
    "key of a free section": (["llm.parameters.top_p=0.9"], says("+llm.parameters.top_p=")),
    "unknown config": (["--config-name=quikstart"], says("'quikstart'", "quickstart")),
    "broken override": (["seed=[1"], says("`seed=[1`", "quote")),
    "name with an equals sign": (["output_dir=a=b"], says("quote", "'output_dir=\"a=b\"'")),
    "name with a tilde": (["output_dir=~x"], says("quote", "'output_dir=\"~x\"'")),
    "name with a space": (["output_dir=my", "run"], says("`run`", "key=value", "spaces")),
    "forgotten output_dir": (["--config-name=base"], says("`output_dir`", "set output_dir=")),
    "YAML that cannot be read": (["--config-name=torn"], r"conf/torn.yaml:\d+: not valid YAML"),
    "no GPU": (["world.accelerator=auto"], says("GPUs", "NVML", "none")),
    "server's port": (["+vllm_config.vllm_kwargs.port=80"], "ports come from the world map"),
    "server option twice": (
        ["+vllm_config.vllm_kwargs.max-model-len=5"],
        says("max_model_len=256", "max-model-len=5", "set max_model_len"),
    ),
    "server's log-probabilities": (
        ["+vllm_config.vllm_kwargs.logprobs-mode=raw_logprobs"],
        "training needs the processed log-probabilities",
    ),
    "out of bounds": (["attempts=0"], says("`attempts` is 0", "greater than 0")),
    "wrong type": (["seed=many"], says("`seed` is 'many'", "integer")),
    "sequence too short": (["finetune.seq_length=100"], says("`finetune.seq_length`", 100, "max_model_len`", 256)),
    "truncated sampling": (["+llm.parameters.top_p=0.9"], "`llm.parameters.top_p`=0.9"),
    "kl without reference": (["finetune.rl.kl_coef=0.1"], "`world.preprocessor_fraction` is 0"),
    "impossible world": (["world.cpu_slots=1"], "1 node"),
    "missing model folder": (["model_path=/no/such/model"], says("`model_path` is '/no/such/model'", "not exist")),
    "folder without a model": (["model_path=."], says("`model_path`", "holds no config.json")),
    "module that raises": (["actor.rollout_policy=broken_domain.f"], "importing it raised ZeroDivisionError"),
    "loader ends the process": (toy(loader="load_and_die"), "ended the process that imported it"),
    "rollout raises": (toy("raise_at_once"), says("every rollout", "RuntimeError: this domain is broken")),
    "rollout returns something else": (
        toy("return_a_number"),
        says("float", "pipelinerl.rollouts.RolloutResult"),
    ),
}
DOMAIN_REFUSALS = {
    "rollout without module": (
        ["actor.rollout_policy=nowhere.rollout"],
        says("`actor.rollout_policy`", "no module 'nowhere'"),
    ),
    "rollout without function": (["actor.rollout_policy=toy_domain.nope"], says("toy_domain", "'nope'")),
    "rollout not async": (toy("not_async"), says("async", "`async def`")),
    "rollout with other arguments": (toy("three_arguments"), r"cannot be called with \(cfg, llm, problem, session\)"),
    "loader without arguments": (toy(loader="load_without_arguments"), "it cannot be called with"),
    "loader returns one dict": (toy(loader="load_dict"), says("list of dicts", "not dict")),
    "loader returns strings": (toy(loader="load_strings"), "every problem must be a dict"),
    "loader returns nothing": (toy(loader="load_nothing"), "returned no problems"),
    "loader raises": (toy(loader="load_and_raise"), says("FileNotFoundError: no such data set: train")),
    "problems without what the domain needs": (
        toy(loader="load_dicts_of_something_else"),
        says("needs 'question'", "has ['prompt']"),
    ),
    "problems without declared keys": (toy("strict"), says("problem 0", "'difficulty'", "toy_domain.strict")),
    "rollout raises late": (toy("raise_after_the_answer"), says("every rollout", "AttributeError")),
    "rollout without a reward": (toy("reward_nothing"), says("training_texts[0].reward", "None")),
}
"""What the check of the domain refuses besides."""


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_is_one_message(place: Path, case: str) -> None:
    arguments, message = REFUSALS[case]
    assert_refused(launch(place, *arguments), message)
    assert not (place / "run").exists()


@pytest.mark.parametrize("case", DOMAIN_REFUSALS)
def test_check_of_the_domain_says_in_one_line_what_is_wrong(place: Path, case: str, monkeypatch: pytest.MonkeyPatch):
    """The command makes it in a process of its own and prints the line."""
    arguments, message = DOMAIN_REFUSALS[case]
    monkeypatch.syspath_prepend(place)
    with pytest.raises(DomainError, match=message) as refusal:
        check_domains(to_container(compose("quickstart", arguments)), [])
    assert len(str(refusal.value).splitlines()) == 1


def assert_refused(done: tuple[int, str], message: str) -> None:
    code, output = done
    assert code == 2, output
    assert re.search(message, output), output
    assert output.startswith("error: "), output
    assert len(output.strip().splitlines()) == 1, output


@pytest.mark.parametrize(
    ("case", "limit"), [("missing model folder", CONFIG_COST), ("rollout returns something else", DOMAIN_COST)]
)
def test_command_refuses_with_one_message_in_time(place: Path, case: str, limit: float) -> None:
    """The last refusal without a try of the domain, and the last of all."""
    arguments, message = REFUSALS[case]
    own = ("--config-name=quickstart", "output_dir=run", "tiny_model=null", "model_path=model")
    before = children_cpu_s()
    assert_refused(run_command(place, *own, *arguments), message)
    between = children_cpu_s()
    subprocess.run(UNIT, check=True)
    assert between - before < limit * (children_cpu_s() - between)


def children_cpu_s() -> float:
    """Of the processes that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "modernbert-decoder"}, "ModernBertDecoderForCausalLM's own logits"),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 32}, "set finetune.seq_packing=false"),
    ],
)
def test_refusal_of_a_model_that_the_trainer_computes_otherwise(place: Path, config: dict, message: str) -> None:
    """It takes as long as importing torch does, so it has no limit of seconds."""
    (place / "model" / "config.json").write_text(json.dumps(config))
    code, output = launch(place)
    assert code == 2, output
    (refusal,) = output.splitlines()
    assert refusal.startswith("error: model_path: "), output
    assert message in refusal


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("modle", "correct it, or build it with"),
        ("some/name", "correct it, add `tiny_model=null` if it is a Hugging Face name, or build it with"),
    ],
)
def test_refusal_of_a_mistyped_model_path_beside_a_recipe(place: Path, model: str, advice: str) -> None:
    """A path typed by hand is never built silently: it would train a toy."""
    code, output = launch(place, "--config-name=quickstart", "output_dir=run", f"model_path={model}")
    assert code == 2
    assert f"`model_path` is {model!r}: it does not exist; {advice}" in output


def test_refusal_of_a_used_port_names_it(place: Path) -> None:
    port = free_port() + 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, output = launch(place, f"world.port_base={port - 1}")
    assert code == 2
    assert f"port {port} of actor_llm_0 is in use" in output


def test_refusal_of_another_experiments_folder(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "thesis.tex").touch()
    code, output = launch(place)
    assert code == 2
    assert "it holds thesis.tex and no run" in output
    assert [path.name for path in (place / "run").iterdir()] == ["thesis.tex"]


def test_warning_of_a_service_that_is_not_up_is_no_refusal(place: Path) -> None:
    container = to_container(compose("quickstart", toy("need_a_service")))
    previous = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{place}{os.pathsep}{ROOT}"
    try:
        warnings = preflight.check_domain(container)
    finally:
        os.environ.pop("PYTHONPATH") if previous is None else os.environ.update(PYTHONPATH=previous)
    assert len(warnings) == 1
    assert "could not be tried without its services" in warnings[0]


def test_domain_check_that_cannot_end_in_time_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "DOMAIN_TIMEOUT_S", 0.01)
    (warning,) = preflight.check_domain(to_container(compose("quickstart")))
    assert warning == "the domain's functions were not checked: the check did not end within 0.02 s"


def test_dry_run_prints_commands_and_writes_nothing(place: Path) -> None:
    constant = ("finetune.lr_scheduler_type=constant", "finetune.num_warmup_steps=3")
    code, output = launch(place, "+dry_run=true", *constant)
    assert code == 0, output
    assert "-m pipelinerl.finetune --run-dir" in output
    assert "-m pipelinerl.inference --run-dir" in output
    assert "warning: finetune.num_warmup_steps has no effect" in output
    assert "dry run: nothing was started or written" in output
    assert not (place / "run").exists()


def test_help_and_cfg_answer(place: Path) -> None:
    code, output = run_command(place, "--config-name=quickstart", "--help")
    assert code == 0
    assert "max_lag_steps" in output
    code, output = run_command(place, "--config-name=quickstart", "--cfg", "job")
    assert code == 0
    assert "seq_packing: true" in output


def test_users_config_directory_is_found(place: Path) -> None:
    (place / "conf" / "mine.yaml").write_text(
        "defaults: [base, _self_]\nactor: {rollout_policy: toy_domain.generate_rollout}\n"
        "dataset_loader: toy_domain.load_problems\nuse_deepspeed: false\nworld: {accelerator: cpu}\nattempts: 0\n"
    )
    done = launch(place, "--config-dir=conf", "--config-name=mine", "output_dir=run")
    assert_refused(done, says("`attempts` is 0"))


def test_no_arguments_name_the_quickstart(place: Path) -> None:
    code, output = run_command(place)
    assert_refused((code, output), says("`--config-name=quickstart`", "`output_dir=...`"))


@pytest.mark.parametrize("option", [[], ["--config-dir=conf"]])
def test_own_configuration_wins_over_the_packaged_one_of_its_name(place: Path, option: list[str]) -> None:
    (place / "conf" / "guessing.yaml").write_text("defaults: [base, _self_]\nattempts: 0\n")
    code, output = run_command(place, *option, "--config-name=guessing", "output_dir=run")
    assert_refused((code, output), says("`attempts` is 0"))


def test_model_name_without_network_is_one_message(place: Path) -> None:
    code, output = launch(place, "model_path=nobody/nothing")
    assert code == 2
    assert re.fullmatch(r"error: `model_path` is 'nobody/nothing': no such folder here, not in .*\n", output), output


def test_dry_run_refuses_what_a_start_refuses(place: Path) -> None:
    for arguments in (toy("reward_nothing"), ["+vllm_config.vllm_kwargs.port=80"], ["model_path=/no/such/model"]):
        code, output = launch(place, "dry_run=true", *arguments)
        assert code == 2
        assert (code, output) == launch(place, *arguments)
    assert not (place / "run" / "conf").exists()


def test_dry_run_of_a_missing_redis_server(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    code, output = launch(place, "dry_run=true", "streams=redis")
    assert code == 2
    assert output.startswith("error: streams=redis needs the program redis-server: install it")


def test_dry_run_of_base_alone_says_what_a_run_needs_besides(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # without a network, a question to it would wait for its time-out
    code, output = run_command(place, "dry_run=true", "world.gpus_per_node=8")
    assert code == 0, output
    assert "World: " in output
    assert "warning: `output_dir` must be given" in output


def test_loggers_that_exist_before_hydra_still_speak(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("pipelinerl.launcher.imported_before_hydra")
    assert main(["--config-name=quickstart", "dry_run=true", f"output_dir={tmp_path / 'run'}"]) == 0
    logger.warning("event=heard")
    assert "event=heard" in caplog.text
