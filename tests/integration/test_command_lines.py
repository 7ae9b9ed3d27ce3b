"""What roles are started with is accepted by the real parsers: command lines by vLLM's for servers, settings of
DeepSpeed by Accelerate's plugin and DeepSpeed's own."""

import json
import subprocess
import sys

import pytest

from pipelinerl.config import load
from pipelinerl.config.servers import MOST_ROLLOUTS
from pipelinerl.finetune.engines.zero import deepspeed_settings
from pipelinerl.inference.args import vllm_arguments
from pipelinerl.launcher import vllm_options
from pipelinerl.world import Cluster, Job, Node, WorldMap, map_world

PARSE_VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
parsed = []
for line in json.load(sys.stdin):
    arguments = parser.parse_args(line)
    validate_parsed_serve_args(arguments)
    parsed.append({name: getattr(arguments, name) for name in (
        "model", "tensor_parallel_size", "pipeline_parallel_size", "dtype", "port", "host", "max_num_seqs",
        "max_model_len", "served_model_name", "enable_prefix_caching", "logprobs_mode", "hf_overrides",
        "gpu_memory_utilization", "worker_extension_cls", "kv_cache_memory_bytes",
    )} | {"weight_transfer": getattr(arguments.weight_transfer_config, "backend", arguments.weight_transfer_config)})
parsed.append(sorted(
    name[2:] for action in parser._actions for name in action.option_strings if name.startswith("--")
))
print("PARSED " + json.dumps(parsed))
"""
PARSE_DEEPSPEED = """
import json, os, sys
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
from accelerate import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig
parsed = []
for settings in json.load(sys.stdin):
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    config = DeepSpeedConfig(dict(plugin.deepspeed_config))
    parsed.append({
        "stages": [plugin.zero_stage, config.zero_config.stage], "bfloat16": config.bfloat16_config.enabled,
        "clipping": [plugin.gradient_clipping, config.gradient_clipping],
        "unknown": sorted(config.zero_config.model_extra or {}), "gradient_sum": config.grad_accum_dtype,
    })
print("PARSED " + json.dumps(parsed))
"""


def parse(code: str, lines: list) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(lines), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("PARSED ")[1])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory):
    overrides = [
        "output_dir=/nowhere",
        "actor.rollout_policy=a.b",
        "dataset_loader=a.b",
        "vllm_config.vllm_kwargs.tensor-parallel-size=2",
        "vllm_config.vllm_kwargs.pipeline-parallel-size=2",
        "world.actor_fraction=8",
        "world.preprocessor_fraction=4",
        "world.finetune_fraction=4",
    ]
    return load.parse(load.compose("base", overrides))


@pytest.fixture(scope="module")
def shared_gpu_line() -> list[str]:
    overrides = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]
    shared = load.parse(load.compose("base_1gpu", overrides))
    node = Node(rank=0, hostname="127.0.0.1", devices=1)
    world = map_world(shared, Cluster(accelerator="cuda", nodes=(node,)), check=False)
    kwargs = shared.vllm_config.vllm_kwargs | {"hf-overrides.rope_theta": 5.0}
    shared = shared.model_copy(update={"vllm_config": shared.vllm_config.model_copy(update={"vllm_kwargs": kwargs})})
    return list(vllm_arguments(shared, world, world.job("actor_llm_0"), gpu_bytes=24 * 2**30))


@pytest.fixture(scope="module")
def world(config) -> WorldMap:
    nodes = tuple(Node(rank=i, hostname=f"host-{i}", devices=8) for i in range(2))
    return map_world(config, Cluster(accelerator="cuda", nodes=nodes, identity="test"), check=False)


@pytest.fixture(scope="module")
def servers(world) -> list[Job]:
    return [*world.get("actor_llm"), *world.get("preprocessor_llm")]


@pytest.fixture(scope="module")
def parsed(config, world, servers, shared_gpu_line) -> list:
    """Of each server, of the one on a shared GPU, and all names that vLLM's parser knows: one process imports vLLM."""
    return parse(PARSE_VLLM, [*(list(vllm_arguments(config, world, job)) for job in servers), shared_gpu_line])


def test_bf16_servers_of_two_by_two_gpus_are_accepted_by_vllm(config, servers, parsed):
    assert [len(job.gpus) for job in servers] == [4, 4, 4]
    for job, arguments in zip(servers, parsed[:-2], strict=True):
        assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 2)
        assert (arguments["dtype"], arguments["port"], arguments["host"]) == ("bfloat16", job.port, "0.0.0.0")
        assert arguments["model"] == config.model_path
        probes = 1 if job.kind == "actor_llm" else 0
        assert arguments["max_num_seqs"] == MOST_ROLLOUTS + probes
        assert arguments["logprobs_mode"] == "processed_logprobs"
        assert arguments["hf_overrides"] == {"head_dtype": "float32"}
        policy = job.kind == "actor_llm"
        assert arguments["enable_prefix_caching"] is policy
        assert arguments["served_model_name"] == ["policy" if policy else "reference"]
        assert bool(arguments["weight_transfer"]) is policy
        assert arguments["worker_extension_cls"].startswith("pipelinerl.weights.") is policy


def test_kv_cache_of_a_shared_gpu_is_accepted_by_vllm(shared_gpu_line, parsed):
    line = shared_gpu_line
    assert parsed[-2]["kv_cache_memory_bytes"] == int(line[line.index("--kv-cache-memory-bytes") + 1]) > 2**30


def test_part_of_an_option_does_not_lose_the_float32_head_in_vllm(parsed):
    assert parsed[-2]["hf_overrides"] == {"rope_theta": 5.0, "head_dtype": "float32"}


def test_names_of_options_that_are_read_from_vllms_source_are_those_of_its_parser(parsed):
    known = set(parsed[-1]) - {"help"}
    negated = {name for name in known if name.startswith("no-") and name[3:] in known}
    assert vllm_options.option_names() == known - negated


def test_deepspeed_settings_are_accepted_by_accelerate_and_deepspeed(config):
    stages = [1, 2, 3]
    files = [load.CONF_DIR / "deepspeed" / f"deepspeed_stage{stage}_bf16.json" for stage in stages]
    parsed = parse(PARSE_DEEPSPEED, [deepspeed_settings(config, file) for file in files])
    for stage, settings in zip(stages, parsed, strict=True):
        limit = config.finetune.gradient_clipping_threshold
        assert settings.pop("gradient_sum") == ("fp32" if stage > 1 else None)
        assert settings == {"stages": [stage] * 2, "bfloat16": True, "clipping": [limit] * 2, "unknown": []}
