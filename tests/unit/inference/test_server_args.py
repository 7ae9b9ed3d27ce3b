"""From configuration to vLLM's command line: defaults, the user's word, and what is refused."""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.load import compose, parse, parse_container
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.inference.args import averaging, profiling, vllm_arguments, vllm_environment
from pipelinerl.world import Job, Span, WorldMap
from tests.says import says


def config(*overrides: str) -> Config:
    required = ["output_dir=/tmp/x", "dataset_loader=a.b", "actor.rollout_policy=a.c", "model_path=/models/m"]
    return parse(compose("base", [*required, *overrides]))


def world(accelerator: str = "cpu", nodes: int = 1, share_devices: bool = False, devices: int = 2) -> WorldMap:
    ports = ("master_port", "weight_port", "weight_ports")
    fields = {
        "accelerator": accelerator,
        "nodes": [
            {"rank": rank, "hostname": f"10.0.0.{rank}" if nodes > 1 else "127.0.0.1", "devices": devices}
            for rank in range(nodes)
        ],
        "jobs": [],
        "share_devices": share_devices,
    }
    return msgspec.convert(fields | dict.fromkeys(ports, 2), WorldMap)


UTILIZATION = "vllm_config.vllm_kwargs.gpu-memory-utilization=0.35"
POLICY = Job(name="actor_llm_1", kind="actor_llm", replica_idx=1, port=8123, cores=(0,))
REFERENCE = Job(name="preprocessor_llm_0", kind="preprocessor_llm", port=8124, cores=(1,))


def settings(arguments: tuple[str, ...]) -> dict[str, Any]:
    """`--key value` and flags as a dictionary; a key twice is an error."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            assert argument not in found, argument
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            found[argument] = True if following.startswith("--") else following
    return found


def test_nodes_of_one_server_have_the_same_arguments_but_their_number() -> None:
    wide = config("++vllm_config.vllm_kwargs.tensor-parallel-size=4")
    found = [
        settings(vllm_arguments(wide, world(), msgspec.structs.replace(POLICY, replica_idx=node, span=span(node))))
        for node in (0, 1)
    ]
    assert [each.pop("--node-rank") for each in found] == ["0", "1"]
    assert "--headless" not in found[0]
    found[1].pop("--headless")
    assert found[0] == found[1]
    wanted = {"--nnodes": "2", "--master-addr": "10.0.0.9", "--master-port": "500"}
    assert wanted.items() <= found[0].items()
    assert found[0]["--distributed-executor-backend"] == "mp"
    with pytest.raises(ConfigError, match=r"`vllm_config.vllm_kwargs.nnodes` is 2.*--nodes"):
        vllm_arguments(config("+vllm_config.vllm_kwargs.nnodes=2"), world(), POLICY)


def test_worker_of_each_node_has_the_node_s_cores() -> None:
    wide = config("++vllm_config.vllm_kwargs.tensor-parallel-size=2")
    env = vllm_environment(wide, world(), msgspec.structs.replace(POLICY, cores=(2, 3), span=span(1)))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"


def span(node: int) -> Span:
    return Span(nodes=2, node=node, host="10.0.0.9", port=500)


def test_server_that_adapts_its_rollouts_has_room_for_the_most() -> None:
    found = settings(vllm_arguments(config("actor.llm_max_rollouts=auto"), world(), POLICY))
    assert found["--max-num-seqs"] == "1025"  # one for the weight probe
    assert "--max-cudagraph-capture-size" not in found


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ((), "1024"),
        (("actor.llm_max_rollouts=513",), "513"),
        (("actor.llm_max_rollouts=512",), None),  # vLLM's own size has it
        (("+vllm_config.vllm_kwargs.max_cudagraph_capture_size=256",), "256"),
        (("+vllm_config.vllm_kwargs.compilation-config={mode: 3}",), None),
        (("+vllm_config.vllm_kwargs.enforce-eager=true",), None),
    ],
)
def test_graphs_are_captured_for_all_rollouts_of_a_gpu(overrides: tuple[str, ...], size: str | None) -> None:
    found = settings(vllm_arguments(config(*overrides), world("cuda"), POLICY))
    assert found.get("--max-cudagraph-capture-size") == size
    assert "--max-cudagraph-capture-size" not in settings(vllm_arguments(config(), world("cuda"), REFERENCE))


def test_experts_of_a_gpu_are_multiplied_by_kernels_that_keep_them_as_they_are_sent() -> None:
    """vLLM takes FlashInfer's by itself on Blackwell, and Triton's on Hopper and Ampere."""
    mixture = "model_path=Qwen/Qwen3-30B-A3B"
    kernels = "--moe-backend"
    assert settings(vllm_arguments(config(mixture), world("cuda"), POLICY))[kernels] == "triton"
    chosen = config(mixture, "+vllm_config.vllm_kwargs.moe-backend=batched_triton")
    assert settings(vllm_arguments(chosen, world("cuda"), POLICY))[kernels] == "batched_triton"
    for cfg, place, job in (
        (config(mixture), "cuda", REFERENCE),  # it takes no versions
        (config(mixture), "cpu", POLICY),
        (config("model_path=Qwen/Qwen2.5-7B"), "cuda", POLICY),
    ):
        assert kernels not in settings(vllm_arguments(cfg, world(place), job))


def test_policy_on_cpu_has_exact_tokens_updates_and_one_process() -> None:
    found = settings(vllm_arguments(config("vllm_config.vllm_kwargs.dtype=float32"), world(), POLICY))
    expected = {
        "--model": "/models/m",
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--seed": "42001",
        "--enable-scale-out": True,
        "--logprobs-mode": "processed_logprobs",
        "--return-tokens-as-token-ids": True,
        "--enable-prefix-caching": True,
        "--scheduler-cls": "pipelinerl.inference.scheduler.AnswerScheduler",
        "--enforce-eager": True,
        "--block-size": "32",
        "--distributed-executor-backend": "uni",
        "--dtype": "float32",
        "--middleware": "pipelinerl.inference.access.RouteAccess",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "staged"}
    assert "--hf-overrides" not in found


def test_prefix_caching_off_is_said_to_vllm() -> None:
    off = settings(vllm_arguments(config("vllm_config.prefix_caching=off"), world(), POLICY))
    assert off["--no-enable-prefix-caching"] is True


def test_environment_on_cpu_pins_threads_and_the_users_word_wins() -> None:
    env = vllm_environment(config("+vllm_config.env.VLLM_CPU_KVCACHE_SPACE='4'"), world(), POLICY)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.mark.parametrize(
    ("given", "own", "found"),
    [
        ({}, {}, None),
        ({"VLLM_PLUGINS": "a,b"}, {}, "a,b,pipelinerl_weights"),
        ({"VLLM_PLUGINS": "a"}, {"VLLM_PLUGINS": "pipelinerl_weights,b"}, "pipelinerl_weights,b"),
        ({}, {"VLLM_PLUGINS": "c"}, "c,pipelinerl_weights"),
        ({"VLLM_PLUGINS": ""}, {}, ",pipelinerl_weights"),
    ],
)
def test_choice_of_plugins_has_ours(given: dict[str, str], own: dict[str, str], found: str | None) -> None:
    cfg = config(*(f"+vllm_config.env.{name}='{value}'" for name, value in own.items()))
    assert vllm_environment(cfg, world(), POLICY, given).get("VLLM_PLUGINS") == found
    assert "pipelinerl_weights" in entry_points(group="vllm.general_plugins").names


def test_eager_servers_on_cpu_compile_nothing() -> None:
    assert vllm_environment(config(), world(), POLICY)["TORCH_COMPILE_DISABLE"] == "1"
    compiled = config("+vllm_config.vllm_kwargs.enforce_eager=false")
    assert "TORCH_COMPILE_DISABLE" not in vllm_environment(compiled, world(), REFERENCE)
    assert "TORCH_COMPILE_DISABLE" not in vllm_environment(config(), world("cuda"), POLICY)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_policy_whose_routing_is_replayed_reports_it(accelerator: str) -> None:
    cfg = config("finetune.router_replay=true")
    env = vllm_environment(cfg, world(accelerator), POLICY)
    assert "--enable-return-routed-experts" in vllm_arguments(cfg, world(accelerator), POLICY)
    recorders = {"cpu": "PIPELINERL_RECORD_EXPERTS", "cuda": "VLLM_USE_V2_MODEL_RUNNER"}
    assert [where for where, name in recorders.items() if name in env] == [accelerator]


def test_tensor_parallel_on_cpu_splits_cores_and_keeps_vllms_executor() -> None:
    cfg = config("vllm_config.vllm_kwargs.tensor-parallel-size=2")
    job = Job(name="actor_llm_0", kind="actor_llm", port=1, cores=(2, 3, 4, 5))
    env = vllm_environment(cfg, world(), job)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|4,5"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env
    assert "--distributed-executor-backend" not in vllm_arguments(cfg, world(), job)


def test_policy_on_gpu_stages_its_weights_and_has_a_float32_head() -> None:
    found = settings(vllm_arguments(config(), world("cuda"), POLICY))
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "staged"}
    assert json.loads(found["--hf-overrides"]) == {"head_dtype": "float32"}
    assert found["--dtype"] == "bfloat16"
    assert "--enforce-eager" not in found
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(config(), world("cuda"), POLICY)


def test_kv_cache_beside_a_trainer_is_what_the_plan_leaves() -> None:
    """Qwen2.5-0.5B has 494,005,120 parameters without biases: 0.35 of 24 GiB less them, a staged copy, activations of
    8,192 tokens (2 bytes × (2 · 896 + 3 · 4864)), float32 logits of 1,024 sequences three times, and 2 GiB."""
    cfg = config("world.share_devices=true", "model_path=Qwen/Qwen2.5-0.5B", UTILIZATION)
    shared = world("cuda", share_devices=True, devices=1)
    found = settings(vllm_arguments(cfg, shared, POLICY, gpu_bytes=24 * 2**30))
    held = 2 * 2 * 494_005_120 + 8192 * 2 * 16384 + 3 * 4 * 1024 * 151936 + 2 * 2**30
    assert int(found["--kv-cache-memory-bytes"]) == int(0.35 * 24 * 2**30) - held
    chosen = config("world.share_devices=true", "+vllm_config.vllm_kwargs.kv_cache_memory_bytes=5", UTILIZATION)
    assert settings(vllm_arguments(chosen, shared, POLICY, gpu_bytes=24 * 2**30))["--kv-cache-memory-bytes"] == "5"
    for alone in (world("cuda"), world()):
        assert "--kv-cache-memory-bytes" not in settings(vllm_arguments(config(), alone, POLICY, gpu_bytes=2**40))


def test_reference_takes_no_weights_and_scores_the_longest_sequence() -> None:
    found = settings(vllm_arguments(config(), world(), REFERENCE))
    assert found["--served-model-name"] == "reference"
    assert "--weight-transfer-config" not in found
    assert found["--max-model-len"] == "10001"
    assert found["--worker-extension-cls"] == "pipelinerl.inference.scoring.ScoreExtension"


def test_several_nodes_listen_on_the_nodes_address_and_give_strangers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = world("cuda", nodes=2)
    away, here = (msgspec.structs.replace(POLICY, hostname=name) for name in ("192.0.2.1", "127.0.0.1"))
    assert settings(vllm_arguments(config(), spread, away))["--host"] == "0.0.0.0"  # no address of this machine
    assert settings(vllm_arguments(config(), spread, here))["--host"] == "127.0.0.1"
    assert vllm_environment(config(), spread, here)["PIPELINERL_STRANGERS"] == "1"
    assert "PIPELINERL_STRANGERS" not in vllm_environment(config(), world(), POLICY)


def test_users_kwargs_win_in_any_spelling() -> None:
    cfg = config(
        "+vllm_config.vllm_kwargs.enforce_eager=false",
        "+vllm_config.vllm_kwargs.no-enable-chunked-prefill=''",
        "+vllm_config.vllm_kwargs.seed=7",
        "+vllm_config.vllm_kwargs.hf_overrides={rope_theta: 5.0}",
        "+vllm_config.vllm_kwargs.swap_space=null",
    )
    found = settings(vllm_arguments(cfg, world("cuda"), POLICY))
    assert found["--no-enforce-eager"] is True
    assert found["--no-enable-chunked-prefill"] is True
    assert found["--seed"] == "7"
    assert json.loads(found["--hf-overrides"]) == {"head_dtype": "float32", "rope_theta": 5.0}
    assert "--swap-space" not in found


def with_options(**options: object) -> Config:
    container = config().model_dump()
    container["vllm_config"]["vllm_kwargs"] |= options
    return parse_container(container)


def test_overrides_of_parts_of_the_model_keep_the_float32_head() -> None:
    """vLLM joins the parts, and takes them in the place of a whole option."""
    parts = {"hf_overrides.rope_theta": 5.0, "compilation_config.max_cudagraph_capture_size": 8}
    found = settings(vllm_arguments(with_options(**parts), world("cuda"), POLICY))
    wanted = {"--hf-overrides.rope_theta": "5.0", "--hf-overrides.head_dtype": "float32"}
    assert {key: value for key, value in found.items() if "hf-overrides" in key} == wanted
    assert found["--compilation-config.max_cudagraph_capture_size"] == "8"
    users = settings(vllm_arguments(with_options(**{"hf_overrides.head_dtype": "bfloat16"}), world("cuda"), POLICY))
    assert {key: value for key, value in users.items() if "hf-overrides" in key} == {
        "--hf-overrides.head_dtype": "bfloat16"
    }


def test_part_of_an_option_that_the_run_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("weight-transfer-config.backend", "set weights.backend")):
        vllm_arguments(with_options(**{"weight_transfer_config.backend": "nccl"}), world(), POLICY)


def test_vllms_own_metrics_are_off_until_they_are_wanted() -> None:
    assert settings(vllm_arguments(config(), world(), POLICY))["--disable-log-stats"] is True
    wanted = config("+vllm_config.vllm_kwargs.disable_log_stats=false")
    assert not [flag for flag in settings(vllm_arguments(wanted, world(), POLICY)) if "log-stats" in flag]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+vllm_config.vllm_kwargs.port=80", says("port", "world.port_base")),
        ("+vllm_config.vllm_kwargs.served_model_name=x", says("served-model-name", "`policy`", "`reference`")),
        ("+vllm_config.vllm_kwargs.logprobs-mode=raw_logprobs", says("logprobs-mode", "processed log-probabilities")),
        (
            "+vllm_config.vllm_kwargs.enable_prefix_caching=false",
            says("enable-prefix-caching", "vllm_config.prefix_caching"),
        ),
        ("+vllm_config.vllm_kwargs.scheduler-cls=x.Y", says("scheduler-cls", "exact")),
        ("+vllm_config.vllm_kwargs.data-parallel-size=2", says("data-parallel-size", "more servers")),
        ("+vllm_config.vllm_kwargs.data-parallel-rank=0", says("data-parallel-rank", "more servers")),
        ("+vllm_config.vllm_kwargs.data_parallel_backend=ray", says("data-parallel-backend", "more servers")),
        ("+vllm_config.vllm_kwargs.quantization=fp8", says("quantization", "fp8", "whole", "not compared")),
        ("+vllm_config.vllm_kwargs.hf_overrides={quantization_config: {quant_method: fp8}}", says("fp8", "whole")),
        ("+vllm_config.vllm_kwargs.enable_eplb=true", says("enable-eplb", "experts that move")),
        ("+vllm_config.vllm_kwargs.spec_model=m", says("spec-model", "never updated")),
        ("+vllm_config.vllm_kwargs.speculative-config={method: ngram}", says("ngram", "wrong log-probability")),
        ("+vllm_config.vllm_kwargs.enable-sleep-mode=true", says("enable-sleep-mode", "takes no weights")),
        (
            "+vllm_config.vllm_kwargs.max-model-len=5",
            says("max_model_len=10000", "max-model-len=5", "set max_model_len"),
        ),
        ("+vllm_config.vllm_kwargs.enforce-eager=false", says("enforce-eager", "packed weights")),
    ],
)
def test_conflicts_are_refused_with_the_key_and_the_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_arguments(config(override), world(), POLICY)


def test_what_the_run_sets_anyway_may_be_repeated() -> None:
    repeated = config("+vllm_config.vllm_kwargs.logprobs-mode=processed_logprobs")
    assert vllm_arguments(repeated, world(), POLICY) == vllm_arguments(config(), world(), POLICY)
    nothing = config("+vllm_config.vllm_kwargs.quantization=null")
    assert vllm_arguments(nothing, world(), POLICY) == vllm_arguments(config(), world(), POLICY)


def test_servers_of_the_reference_and_of_teachers_take_turns() -> None:
    teachers = "teachers=[{model_path: /models/a}, {model_path: /models/b}]"
    cfg = config(teachers, "finetune.rl.kl_coef=0.1", "reference_model_path=/models/r")
    jobs = [msgspec.structs.replace(REFERENCE, name=f"preprocessor_llm_{i}", replica_idx=i) for i in range(4)]
    served = [settings(vllm_arguments(cfg, world(), job))["--model"] for job in jobs]
    assert served == ["/models/r", "/models/a", "/models/b", "/models/r"]
    assert settings(vllm_arguments(cfg, world(), POLICY))["--model"] == "/models/m"
    part = Job(name="preprocessor_llm_part_3", kind="preprocessor_llm", replica_idx=3, span=span(1), port=1)
    assert span(1).nodes == 2, "a server has one part beside its first node"
    assert settings(vllm_arguments(config(teachers), world(nodes=2), part))["--model"] == "/models/b"


def test_server_of_a_teacher_that_averages_the_policy_takes_weights_and_scores() -> None:
    cfg = config("teachers=[{ema: 0.9}]", "finetune.rl.kl_coef=0.1", "finetune.save_checkpoint_steps=7")
    other = msgspec.structs.replace(REFERENCE, name="preprocessor_llm_1", replica_idx=1)
    frozen, found = (settings(vllm_arguments(cfg, world(), job)) for job in (REFERENCE, other))
    assert "--weight-transfer-config" not in frozen
    assert (
        found["--weight-transfer-config"] == settings(vllm_arguments(cfg, world(), POLICY))["--weight-transfer-config"]
    )
    assert found["--worker-extension-cls"] == "pipelinerl.inference.scoring.FollowingScoreExtension"
    assert (found["--model"], found["--served-model-name"]) == ("/models/m", "reference")
    assert averaging(cfg, REFERENCE, Path("/run")) is averaging(cfg, POLICY, Path("/run")) is None
    kept = cfg.finetune.keep_checkpoints + 1
    assert averaging(cfg, other, Path("/run")) == (0.9, "/run/preprocessor_llm_1/average", 7, kept)


def test_policy_of_a_lora_run_has_room_for_the_adapter_alone() -> None:
    lora = ("finetune.lora.enabled=true", "finetune.lora.r=20")
    found = settings(vllm_arguments(config(*lora), world(), POLICY))
    assert {key: found[key] for key in ("--enable-lora", "--max-loras", "--max-lora-rank")} == {
        "--enable-lora": True,
        "--max-loras": "1",
        "--max-lora-rank": "32",
    }
    for other in (config(), config(*lora, "finetune.lora.send=merged")):
        assert "--enable-lora" not in settings(vllm_arguments(other, world(), POLICY))
    assert "--enable-lora" not in settings(vllm_arguments(config(*lora), world(), REFERENCE))
    with pytest.raises(ConfigError, match=says("finetune.lora.r", 600, 512, "finetune.lora.send=merged")):
        vllm_arguments(config(*lora, "finetune.lora.r=600"), world(), POLICY)
    with pytest.raises(ConfigError, match=says("enable-lora", "finetune.lora")):
        vllm_arguments(config("+vllm_config.vllm_kwargs.enable-lora=true"), world(), POLICY)


def test_policy_server_gets_vllms_profiler_where_steps_are_profiled(tmp_path: Path) -> None:
    cfg = config("finetune.profile_steps=[2,3]")
    option, value = profiling(cfg, POLICY, tmp_path)
    assert option == "--profiler-config"
    assert json.loads(value)["torch_profiler_dir"] == str(tmp_path / "profiles" / "actor_llm_1")
    assert profiling(config(), POLICY, tmp_path) == ()
    assert profiling(cfg, REFERENCE, tmp_path) == ()
    container = cfg.model_dump()
    container["vllm_config"]["vllm_kwargs"]["profiler-config.profiler"] = "cuda"
    assert profiling(parse_container(container), POLICY, tmp_path) == ()
