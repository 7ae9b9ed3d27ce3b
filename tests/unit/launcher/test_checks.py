"""What a start refuses before anything is started: here the memory plan, on a machine whose GPUs are told."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl.config.load import compose, parse_container, to_container
from pipelinerl.domains import contract
from pipelinerl.errors import ConfigError, DatasetError, PipelineRLError
from pipelinerl.launcher import checks, vllm_options
from pipelinerl.launcher.commands import role_command
from pipelinerl.launcher.run_plan import Experiment, RunPlan, plan_run
from pipelinerl.plan import speed
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES
from pipelinerl.plan.training_memory import GIB
from pipelinerl.world import Cluster, Node, map_world
from tests.says import says


def start(*overrides: str, gpus: int = 8) -> RunPlan:
    required = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b", "model_path=Qwen/Qwen2.5-7B"]
    container = to_container(compose("base", [*required, *overrides]))
    config = parse_container(container)
    node = Node(rank=0, hostname="127.0.0.1", devices=gpus)
    world = map_world(config, Cluster(accelerator="cuda", nodes=(node,)), check=False)
    asked = Experiment(
        config=config, container=container, overrides=overrides, command_of=role_command, node_rank=0, started=0.0
    )
    return plan_run(asked, world)


def test_memory_plan_that_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "gpu_memory_bytes", lambda: [16 * GIB] * 8)
    monkeypatch.setattr(checks, "gpu_memory_bytes", lambda: [16 * GIB] * 8)
    with pytest.raises(ConfigError, match=says("memory plan", "finetune", "16 GiB", "it fits")):
        checks.memory(start())


def test_memory_plan_that_fits_passes_and_that_of_a_launcher_without_gpus_too() -> None:
    assert checks.memory(start("world.gpu=H200")) == []
    assert checks.memory(start("model_path=Qwen/Qwen2.5-72B")) == []


@pytest.mark.parametrize("warned", [False, True])
def test_memory_plan_that_nearly_fills_the_trainers_device_is_a_warning(
    warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = SimpleNamespace(kind="finetune", fits=True, is_tight=warned, total=95, capacity=100)
    monkeypatch.setattr(checks, "memory_plan", lambda *_: (need,))
    assert bool(checks.memory(start("world.gpu=H200"))) is warned


def test_cache_that_holds_no_whole_sequence_is_a_warning_with_what_would() -> None:
    """Weights and a step take 18.9 GiB of 19.1, and 10,000 tokens 0.5. vLLM refuses such a cache at its start."""
    share = "vllm_config.vllm_kwargs.gpu-memory-utilization"
    [warning] = checks.memory(start("dry_run=true", "world.gpu=H100", f"{share}=0.24"))
    assert "actor_llm" in warning
    assert warning.endswith(f"it has room to spare with {share}=0.9")


@pytest.mark.parametrize(
    ("free_mb", "found"), [(255 + 14, "refused"), (257 + 14, "warned"), (255 + 3 * 14, "warned"), (257 + 3 * 14, "")]
)
def test_disk_has_room_for_a_checkpoint_and_256_mb(free_mb: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 2**20 parameters takes 14 MB. The run keeps two, and one is in the making."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mb << 20))
    monkeypatch.setattr(checks, "find_model_shape", lambda _: SimpleNamespace(parameters=1 << 20))
    asked = start("finetune.keep_checkpoints=2", "finetune.dtype=bfloat16")
    if found == "refused":
        with pytest.raises(ConfigError, match=says("output_dir", "GiB free")):
            checks.disk(asked)
    else:
        assert bool(checks.disk(asked)) is (found == "warned")


@pytest.mark.parametrize(("lora", "room_gb"), [(True, 20), (False, 107)])
def test_disk_of_a_lora_run_has_room_for_its_adapter_and_the_merged_model(
    lora: bool, room_gb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7.6e9 parameters 2 bytes each are exported. 12 bytes are kept of what is trained: of all, or of 40 million."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=room_gb * 10**9))
    monkeypatch.setattr(checks, "find_model_shape", lambda _: PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"])
    asked = start(f"finetune.lora.enabled={str(lora).lower()}", "finetune.lora.r=16", "finetune.dtype=bfloat16")
    checks.disk(asked)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(room_gb * 0.75 * 10**9)))
    with pytest.raises(ConfigError, match=says("output_dir", "GiB free")):
        checks.disk(asked)


@pytest.mark.parametrize("gpu", ["null", "A100-40GB"])
def test_memory_plan_for_another_machine_is_refused_in_a_dry_run(gpu: str) -> None:
    asked = start("dry_run=true", "model_path=Qwen/Qwen2.5-32B", f"world.gpu={gpu}")
    with pytest.raises(ConfigError, match=says("memory plan", "H100 assumed" if gpu == "null" else gpu)):
        checks.run_checks(asked, only_shown=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for files, on a machine where only the checks of files are made."""
    monkeypatch.setattr(checks, "OF_THIS_MACHINE", (checks.templates, checks.conversations))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "name", "text"),
    [
        ("sft.datasets", "rows.jsonl", '{"question": "x"}\n'),
        ("sft.datasets", "rows.jsonl", "{no JSON\n"),
        ("sft.datasets", "rows.csv", "question\nx\n"),
        ("llm.chat_template", "chat.jinja", "{% for m in messages %}"),
        ("llm.chat_template", "chat.jinja", "{{ messages }"),
    ],
)
def test_dry_run_for_another_machine_refuses_a_file_that_is_wrong_and_forgives_one_that_is_missing(
    key: str, name: str, text: str, machine: Path
) -> None:
    file = machine / name
    planned = start("stage=sft", f"{key}={[str(file)] if key == 'sft.datasets' else file}")
    assert checks.is_for_elsewhere(planned), "there are no 8 GPUs here"
    (warning,) = [one for one in checks.run_checks(planned, only_shown=True) if "on this machine" in one]
    assert str(file) in warning
    with pytest.raises(PipelineRLError, match=name):
        checks.run_checks(planned)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PipelineRLError, match=name):
        checks.run_checks(planned, only_shown=True)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (KeyError("answer"), True),
        (DatasetError("1 of 1 rows cannot be used", "rows.jsonl"), True),
        (DatasetError("no such file or folder", "/data/missing.jsonl"), False),
        (DatasetError("it cannot be reached", "some/set"), False),
        (ConnectionError("cannot be reached"), False),
    ],
)
def test_loaders_refusal_is_forgiven_where_it_is_about_another_data_set(
    error: Exception, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()

    def load(names: list[str]) -> None:
        raise error

    monkeypatch.setattr(contract, "resolve_function", lambda dotted: load)
    (domain,) = contract.domains_of(start().config)
    with pytest.raises(DatasetError, match="loading") as raised:
        domain.problems(["rows.jsonl", "/data/missing.jsonl", "some/set"])
    assert checks.is_of_a_file_here(raised.value) is refused


def test_template_without_a_path_may_be_the_tokenizers(machine: Path) -> None:
    checks.templates(start("llm.chat_template=tool_use"))
    (machine / "chat.jinja").write_text("{% generation %}{{ messages }}{% endgeneration %}", encoding="utf-8")
    checks.templates(start(f"llm.chat_template={machine / 'chat.jinja'}"))


@pytest.mark.parametrize(
    ("hard", "warned"),
    [(256 + 2 * 4 * 64, []), (checks.resource.RLIM_INFINITY, []), (767, ["768", "255 requests", "not 256"])],
)
def test_low_limit_on_open_files_is_told_with_the_number_needed(
    hard: int, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 servers of 64 rollouts at one worker: 256 connections, as many idle ones, and 256 other files are 768."""
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (256, hard))
    found = checks.open_files(start("actor.llm_max_rollouts=64"))
    assert len(found) == (1 if warned else 0)
    assert all(text in found[0] for text in warned)


def test_limit_on_open_files_that_no_role_can_live_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(ConfigError, match=says("open files", 200, 288, 768)):
        checks.open_files(start("actor.llm_max_rollouts=64"))


@pytest.mark.parametrize(("length", "excess"), [(57, None), (58, 1), (90, 33)])
def test_temporary_folder_is_as_long_as_the_servers_sockets_allow(
    length: int, excess: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/prl-` and 8 letters, `/` and 36 of a UUID are 50 of 107 bytes. With more the engine dies."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    if excess is None:
        checks.temporary_folder(start())
        return
    with pytest.raises(ConfigError, match=says("TMPDIR", f"paths {excess} bytes longer", "at most 57 bytes")):
        checks.temporary_folder(start())
    elsewhere = start("debug.mode=actor", "debug.existing_llms=[http://127.0.0.1:8080]")
    checks.temporary_folder(elsewhere)  # a run with the servers of others starts none


@pytest.mark.parametrize(
    ("length", "launcher", "vllms_own", "refused"),
    [
        (90, "ray", None, None),
        (90, "local", "/tmp", None),
        (70, "local", "/" + "v" * 69, None),
        (5, "local", "/" + "v" * 70, "VLLM_RPC_BASE_PATH is .*paths 1 bytes longer.*at most 70 bytes"),
    ],
)
def test_folder_of_the_sockets_is_the_one_that_the_servers_will_have(
    length: int, launcher: str, vllms_own: str | None, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own variable goes before TMPDIR. Ray's roles have the TMPDIR of their node."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    if vllms_own:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", vllms_own)
    asked = start(f"launcher.engine={launcher}")
    if refused is None:
        checks.temporary_folder(asked)
        return
    with pytest.raises(ConfigError, match=refused):
        checks.temporary_folder(asked)


@pytest.mark.parametrize(
    "override", ["finetune.router_replay=true", "+vllm_config.vllm_kwargs.enable-expert-parallel=true"]
)
def test_settings_of_experts_are_refused_for_a_model_without_them(override: str) -> None:
    with pytest.raises(ConfigError, match=says("true", "Qwen/Qwen2.5-7B", "no experts", "remove")):
        checks.experts(start(override))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max-modl-len", "max-model-len"),
        ("max_model", "max-model-len"),
        ("gpu-memory-utilisation", "gpu-memory-utilization"),
    ],
)
def test_option_that_vllm_does_not_have_is_refused_with_the_nearest_one(key: str, near: str) -> None:
    """Abbreviations, too: the run looks options up by their names."""
    with pytest.raises(ConfigError, match=says(f"vllm_kwargs.{key.replace('_', '-')}", "no option of vLLM", near)):
        checks.options_of_servers(start(f"+vllm_config.vllm_kwargs.{key}=5"))


@pytest.mark.parametrize(
    "given", ["compilation_config={mode: 3}", "no-enable-chunked-prefill=''", "response-role=x", "reasoning-parser=y"]
)
def test_options_that_vllm_has_are_accepted_in_every_spelling(given: str) -> None:
    checks.options_of_servers(start(f"+vllm_config.vllm_kwargs.{given}"))


def test_sampling_parameter_that_vllm_does_not_have_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=says("`test_llm.parameters.max_tokns`", "did you mean `max_tokens`?")):
        checks.options_of_servers(start("+test_llm.parameters.max_tokns=5"))
    checks.options_of_servers(start("+llm.parameters.min_p=0.1"))


def test_boolean_as_a_number_among_sampling_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("`test_llm.parameters.max_tokens` is True: it must be a number")):
        checks.options_of_servers(start("test_llm.parameters.max_tokens=true"))
    checks.options_of_servers(start("+test_llm.parameters.ignore_eos=true"))


def test_options_are_not_judged_by_a_source_that_is_laid_out_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / vllm_options.ENGINE).write_text("class EngineArgs:\n    max_model_len: int = 0\n")
    monkeypatch.setattr(vllm_options, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    (tmp_path / vllm_options.SAMPLING).write_text("class SamplingParams:\n    top_p: float = 1.0\n")
    assert vllm_options.option_names() == frozenset()
    assert vllm_options.sampling_parameters() == {}


def test_expert_parallel_servers_are_accepted_and_need_several_gpus() -> None:
    mixture = ("model_path=Qwen/Qwen3-30B-A3B", "+vllm_config.vllm_kwargs.enable-expert-parallel=true")
    [warning] = checks.experts(start(*mixture))
    assert "no effect with tensor-parallel-size=1" in warning
    assert checks.experts(start(*mixture, "vllm_config.vllm_kwargs.tensor-parallel-size=4")) == []


def test_servers_of_more_gpus_than_divide_the_heads_are_refused() -> None:
    """Qwen2.5-7B has 28."""
    checks.server_arguments(start("vllm_config.vllm_kwargs.tensor-parallel-size=4"))
    with pytest.raises(ConfigError, match=says("tensor-parallel-size` is 8", "28 attention heads", "divisor")):
        checks.server_arguments(start("vllm_config.vllm_kwargs.tensor-parallel-size=8", gpus=16))


@pytest.mark.parametrize("kernels", ["flashinfer_trtllm", "auto", "null"])
def test_kernels_of_experts_that_would_hold_a_large_version_whole_are_refused(kernels: str) -> None:
    """A version of 30.5 billion parameters in 16 bits has 57 GiB. The adapter of rank 16 has less than 4."""
    mixture = ("model_path=Qwen/Qwen3-30B-A3B", f"+vllm_config.vllm_kwargs.moe-backend={kernels}")
    with pytest.raises(ConfigError, match=says("`vllm_config.vllm_kwargs.moe-backend`", "57 GiB", "32", "remove it")):
        checks.experts(start(*mixture, "finetune.dtype=bfloat16"))
    checks.experts(start(*mixture, "finetune.lora.enabled=true", "finetune.lora.r=16", "finetune.lora.send=adapter"))
    checks.experts(start(mixture[0], "+vllm_config.vllm_kwargs.moe-backend=batched_triton"))


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ((0.7, "false", 1), 2 * 15.2 + 14 * 7.6),
        ((0.9, "false", 1), 2 * 15.2 + 14 * 7.6 + 4 * 15.2),
        ((0.9, "false", 4), 2 * 15.2 + 14 * 7.6),
        ((0.7, "true", 1), 2 * 15.2 + 14 * 7.6 + 16 * 7.6),
    ],
)
def test_plan_that_needs_more_host_memory_than_there_is_is_refused(
    settings: tuple[float, str, int], needed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GB: two versions of 7.6e9 parameters in 16 bits, a checkpoint with the model, what four GPUs stage or offload."""
    utilization, offload, parallel = settings
    planned = start(
        "finetune.dtype=bfloat16",
        "finetune.engine=fsdp2",
        f"finetune.cpu_offload={offload}",
        f"vllm_config.vllm_kwargs.gpu-memory-utilization={utilization}",
        f"vllm_config.vllm_kwargs.tensor-parallel-size={parallel}",
    )
    monkeypatch.setattr(checks, "gpu_memory_bytes", lambda: [80 * GIB] * 8)
    monkeypatch.setattr(checks, "usable_memory", lambda: int(1.01 * needed * 10**9))
    checks.host_memory(planned)
    monkeypatch.setattr(checks, "usable_memory", lambda: int(0.99 * needed * 10**9))
    with pytest.raises(ConfigError, match=says("memory plan", "host memory", "train on more nodes")):
        checks.host_memory(planned)


def test_ranks_that_divide_experts_are_a_divisor_of_both() -> None:
    """128 experts, four trainer ranks."""
    mixture = ("model_path=Qwen/Qwen3-30B-A3B", "finetune.engine=fsdp2")
    assert checks.experts(start(*mixture, "finetune.expert_ranks=4")) == []
    checks.engine(start(*mixture, "finetune.expert_ranks=4"))
    with pytest.raises(ConfigError, match=says("`finetune.expert_ranks`", 3, "128 experts")):
        checks.experts(start(*mixture, "finetune.expert_ranks=3"))
    with pytest.raises(ConfigError, match=says("`finetune.expert_ranks`", 8, "4 ranks that share")):
        checks.engine(start(*mixture, "finetune.expert_ranks=8"))
    with pytest.raises(ConfigError, match=says("`finetune.compile`", "`finetune.expert_ranks`")):
        checks.engine(start(*mixture, "finetune.expert_ranks=4", "finetune.compile=true"))
    with pytest.raises(ConfigError, match=says("`finetune.expert_ranks`", 4, "no experts")):
        checks.experts(start("finetune.expert_ranks=4"))


def test_store_of_weights_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_model_shape", lambda path: None)  # whatever room this machine's disk has
    given = ["weights.backend=store", f"weights.store={tmp_path}/here/weights"]
    checks.store_of_weights(start(*given))
    assert not (tmp_path / "here").exists(), "a check writes nothing"
    (tmp_path / "here").write_text("in the way")
    with pytest.raises(ConfigError, match=r"`weights.store` is '.*/here/weights'.*here"):
        checks.store_of_weights(start(*given))
    with pytest.raises(ConfigError, match=r"`weights.store` is 'nosuch://bucket/run': .*nosuch"):
        checks.store_of_weights(start("weights.backend=store", "weights.store=nosuch://user:word@bucket/run"))


def test_store_of_weights_needs_room_for_the_versions_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SimpleNamespace(parameters=10**9)
    monkeypatch.setattr(checks, "find_model_shape", lambda path: shape)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9 * 10**9))
    given = ["weights.backend=store", f"weights.store={tmp_path}", "finetune.dtype=bfloat16"]
    checks.store_of_weights(start(*given))
    with pytest.raises(ConfigError, match=says("weights.store_keep=3", "9.3 GiB")):
        checks.store_of_weights(start(*given, "weights.store_keep=3"))


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("judges=[{name: good, url: 'https://judge.example/v1', model_path: m, rubric: r}]", "judges.good.url"),
        ("sandbox_endpoint=https://sandbox.example", "sandbox_endpoint"),
    ],
)
def test_foreign_service_behind_a_proxy_of_socks_is_refused(
    own: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "socks5://10.0.0.1:1080")
    checks.proxies(start())
    with pytest.raises(ConfigError, match=says(key, "HTTPS_PROXY", "NO_PROXY")):
        checks.proxies(start(own))


def test_missing_variable_of_a_reference_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    one = start("+vllm_config.env.HF_TOKEN={env: MY_KEY}")
    with pytest.raises(ConfigError, match=says("`vllm_config.env.HF_TOKEN`", "MY_KEY", "set it")):
        checks.variables(one)
    monkeypatch.setenv("MY_KEY", "here")
    checks.variables(one)


def test_reference_to_a_value_of_another_type_is_refused_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_THREADS", "many")
    with pytest.raises(ConfigError, match=says("`vllm_config.env`", "OMP_NUM_THREADS='many'", "whole number")):
        checks.variables(start("+vllm_config.env.OMP_NUM_THREADS={env: MY_THREADS}"))
