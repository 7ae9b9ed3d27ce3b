"""Predicted rates by hand, for the shape of Qwen2.5-7B on an H100."""

import io

import pytest
from rich.console import Console

from pipelinerl.config import load
from pipelinerl.errors import ConfigError
from pipelinerl.plan import ceiling
from pipelinerl.plan import speed as speeds
from pipelinerl.plan.memory import snapshot_bytes, staged_bytes, version_bytes
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES
from pipelinerl.plan.speed import (
    GPUS,
    checkpoint_tensors,
    find_gpu,
    gpu_named,
    pause_s,
    planned_gpu,
    predicted_pause_s,
    predicted_speed,
    server_speed,
    trainer_speed,
    training_flops,
)
from pipelinerl.plan.world_table import communicators_line, render_world, update_line
from pipelinerl.world import Cluster, Node, map_world
from tests.says import says

REQUIRED = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]
SHAPE, H100 = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], GPUS["H100"]
PARAMETERS = 7_615_487_488
"""Of a Qwen2.5-7B without the biases of its attention."""


def make_config(*overrides: str):
    return load.parse(load.compose("base", [*REQUIRED, *overrides]))


def make_world(cfg, devices: int):
    return map_world(
        cfg, Cluster(accelerator="cuda", nodes=(Node(rank=0, hostname="a", devices=devices),)), check=False
    )


def test_operations_of_a_token_are_those_of_parameters_and_half_of_the_keys() -> None:
    """Forward: 2 per parameter; per layer and head 2 products × 2 × 128 for each of 8,000 / 2 keys. Backward: twice."""
    forward = 2 * PARAMETERS + 28 * 28 * 2 * 2 * 128 * 4000
    assert training_flops(SHAPE, 8000, recomputed=0) == 3 * forward
    assert training_flops(SHAPE, 8000, recomputed=1) == 4 * forward
    assert training_flops(SHAPE, 8000, recomputed=0.25) == 3.25 * forward
    assert (
        training_flops(SHAPE, 8000, recomputed=1, frozen=True) == 4 * forward - 2 * PARAMETERS
    )  # no weight's gradient


def test_adapter_is_trained_faster_by_the_gradients_that_its_base_has_not() -> None:
    """8,692 tokens: weights are 15.2 and attention 1.7 GFLOP of a forward pass, and one of four is not the weights'."""
    whole, adapter = (
        trainer_speed(
            make_config("finetune.gradient_checkpointing=true", f"finetune.lora.enabled={on}"), SHAPE, H100, 4
        )
        for on in ("false", "true")
    )
    assert whole.note == adapter.note
    assert adapter.tokens_per_s / whole.tokens_per_s == pytest.approx(4 * 17.0 / (4 * 17.0 - 15.2), rel=2e-3)


def test_recomputation_and_attention_lower_the_mfu_of_the_trainer() -> None:
    cfg = make_config("finetune.gradient_checkpointing=false", "llm.parameters={max_tokens: 500, temperature: 1.0}")
    speed = trainer_speed(cfg, SHAPE, H100, 4)
    forward = 2 * PARAMETERS + 28 * 28 * 2 * 2 * 128 * 500
    assert speed.tokens_per_s == pytest.approx(4 * 0.35 * 989e12 / (3 * forward))
    assert speed.mfu == pytest.approx(0.35 * 2 * PARAMETERS / forward)
    recomputed = make_config()
    assert trainer_speed(recomputed, SHAPE, H100, 4).mfu < 0.75 * speed.mfu
    selective = make_config("finetune.gradient_checkpointing=selective")
    assert trainer_speed(selective, SHAPE, H100, 4) == trainer_speed(recomputed, SHAPE, H100, 4)


def test_offloaded_trainer_waits_for_its_weights_where_micro_batches_are_short() -> None:
    """On 2 ranks 4 bytes for each of half of the weights cross PCIe twice, at 50 GB/s."""
    short = ["finetune.seq_length=1000", "vllm_config.vllm_kwargs.max_model_len=1000", "finetune.engine=fsdp2"]
    speed = trainer_speed(make_config(*short, "finetune.cpu_offload=true"), SHAPE, H100, 2)
    assert speed.tokens_per_s == pytest.approx(2 * 1000 / (2 * 4 * PARAMETERS / 2 / 50e9), rel=1e-3)
    assert speed.note.endswith("without the optimizer's step in host memory")
    long = ["finetune.seq_length=100000", "finetune.engine=fsdp2"]
    offloaded, kept = (
        trainer_speed(make_config(*long, f"finetune.cpu_offload={on}"), SHAPE, H100, 2) for on in ("true", "false")
    )
    assert offloaded.tokens_per_s == kept.tokens_per_s


def test_a_server_decodes_what_its_cache_holds_and_the_configuration_allows() -> None:
    few = server_speed(make_config("actor.llm_max_rollouts=8"), SHAPE, H100, 2, 80 * 2**30)
    many = server_speed(make_config(), SHAPE, H100, 2, 80 * 2**30)
    assert few is not None
    assert many is not None
    assert few.note.startswith("8 sequences")
    read = 2 * PARAMETERS + 8 * 57344 * float(few.note.split(", ")[1].split()[0])  # tokens, rounded in the note
    assert few.tokens_per_s == pytest.approx(2 * 8 * 0.6 * 3.35e12 / read, rel=1e-3)
    assert many.tokens_per_s > 10 * few.tokens_per_s
    assert server_speed(make_config(), SHAPE, H100, 2, 16 * 2**30) is None, "the weights alone have 15 GB"


def test_a_server_decodes_no_more_sequences_than_vllm_may_run() -> None:
    speed = server_speed(make_config("vllm_config.vllm_kwargs.max-num-seqs=5"), SHAPE, H100, 1, 80 * 2**30)
    assert speed is not None
    assert speed.note.startswith("5 sequences")


def test_jobs_on_one_gpu_share_its_time() -> None:
    fixed = ["finetune.gradient_checkpointing=true", "actor.llm_max_rollouts=8"]
    shared, apart = (make_config(*keys, *fixed) for keys in (["world.share_devices=true"], []))
    [alone] = predicted_speed(apart, make_world(apart, 8), SHAPE, H100, 80 * 2**30)[:1]
    [half] = predicted_speed(shared, make_world(shared, 4), SHAPE, H100, 80 * 2**30)[:1]
    assert (alone.devices, half.devices) == (4, 4)
    assert half.tokens_per_s == alone.tokens_per_s / 2


def test_a_gpu_is_known_by_its_name() -> None:
    assert gpu_named("NVIDIA H200")[0] == "H200"
    assert gpu_named("NVIDIA A100-SXM4-80GB") == ("A100", GPUS["A100"])
    assert gpu_named(None) == ("H100 assumed", H100)
    unknown = "H100 in the place of NVIDIA GH200 480GB, whose data sheet is not known"
    assert gpu_named("NVIDIA GH200 480GB") == (unknown, H100)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_gpu_is_found_by_whole_words_and_the_most_of_them(name: str, key: str | None) -> None:
    assert find_gpu(name) == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100-80GB", "H100"),
        ("h100", "H100"),
        ("A100-40GB", "A100-40GB"),
        ("L4-24GB", "L4"),
        ("B300-288GB", "B300"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        (None, "H100"),
    ],
)
def test_gpu_that_is_meant_has_its_data_sheet(name: str | None, key: str) -> None:
    asked = make_config("dry_run=true", f"world.gpu={'null' if name is None else repr(name)}")
    assert planned_gpu(asked)[1:] == (GPUS[key], GPUS[key].memory)


@pytest.mark.parametrize("name", ["H100-40GB", "A100-94GB", "GH200", "H200 NVL", "TPU"])
def test_gpu_of_no_data_sheet_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=says("world.gpu", name, "A100, A100-40GB", "L40S")):
        planned_gpu(make_config(f"world.gpu={name!r}"))


def test_a_start_plans_for_its_own_gpus_and_a_dry_run_for_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speeds, "gpu_memory_bytes", lambda: (40 * 2**30, 39 * 2**30))
    monkeypatch.setattr(speeds, "gpu_names", lambda: ("NVIDIA A100-PCIE-40GB",) * 2)
    assert planned_gpu(make_config("world.gpu=H200")) == ("A100-40GB", GPUS["A100-40GB"], 39 * 2**30)
    assert planned_gpu(make_config("dry_run=true"))[2] == 39 * 2**30
    assert planned_gpu(make_config("dry_run=true", "world.gpu=H200"))[0] == "H200"


def test_a_dry_run_prints_rates_and_mfu_of_every_role() -> None:
    cfg = make_config()
    written = io.StringIO()
    console = Console(file=written, width=200)
    console.print(render_world(cfg, make_world(cfg, 8)))
    printed = written.getvalue()
    assert "Predicted speed (H100 assumed" in printed
    for speed in predicted_speed(cfg, make_world(cfg, 8), SHAPE, H100, H100.memory):
        assert f"{speed.tokens_per_s:,.0f}" in printed
        assert f"{speed.mfu:.1%}" in printed
    assert "at most 3 communicator(s) in a server's GPU" in printed
    slower = min(speed.tokens_per_s for speed in predicted_speed(cfg, make_world(cfg, 8), SHAPE, H100, H100.memory))
    for line in ceiling.lines(cfg, slower, 8, 0.3 * cfg.llm.parameters["max_tokens"], 500):
        assert line in " ".join(printed.split())


def test_the_pause_is_the_copy_of_what_a_server_stages() -> None:
    """15.2 GB beside 8 GiB of free memory come from the host at 50 GB/s; half of the card's memory free: 1.3 TB/s."""
    near = make_config("vllm_config.vllm_kwargs.gpu-memory-utilization=0.5")
    assert predicted_pause_s(make_config(), SHAPE, H100, 1, 80 * 2**30) == pytest.approx(2 * PARAMETERS / 50e9)
    assert predicted_pause_s(near, SHAPE, H100, 1, 80 * 2**30) == pytest.approx(2 * PARAMETERS / (0.39 * 3.35e12))
    assert checkpoint_tensors(SHAPE) == 339


def test_float32_trainer_sends_and_servers_stage_four_bytes_of_a_parameter() -> None:
    cfg = make_config("finetune.dtype=float32", "vllm_config.vllm_kwargs.dtype=bfloat16")
    assert version_bytes(cfg, SHAPE) == staged_bytes(cfg, SHAPE, 1) == 4 * PARAMETERS
    assert snapshot_bytes(cfg, SHAPE, 2) == 2 * 4 * PARAMETERS // 2  # two versions on two nodes


def test_an_adapter_is_a_fiftieth_of_an_update_at_most_and_pauses_for_its_tensors() -> None:
    """Rank 16 on 7 matrices of 28 layers: 3584 + 3584 twice, 3584 + 512 twice, 3584 + 18944 three times."""
    parameters = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    adapter, merged = (
        make_config("finetune.lora.enabled=true"),
        make_config("finetune.lora={enabled: true, send: merged}"),
    )
    assert version_bytes(adapter, SHAPE) == staged_bytes(adapter, SHAPE, 1) == 2 * parameters
    assert version_bytes(merged, SHAPE) == version_bytes(make_config(), SHAPE) == 2 * PARAMETERS
    assert version_bytes(merged, SHAPE) / version_bytes(adapter, SHAPE) > 188
    assert predicted_pause_s(adapter, SHAPE, H100, 1, 80 * 2**30) == 28 * 14 * 8e-6
    assert update_line(adapter, SHAPE) == (
        "A weight update has 0.081 GB, the adapter alone: 189 times fewer than all weights."
    )
    assert update_line(merged, SHAPE) == "A weight update has 15.23 GB."


def test_communicators_are_those_of_the_transport_and_the_number_of_servers() -> None:
    one, shared = make_config("world.actor_fraction=1"), make_config("world.share_devices=true")
    assert "at most 1 communicator(s)" in communicators_line(make_world(one, 8))
    assert "no NCCL communicators" in communicators_line(make_world(shared, 4))


def test_pause_is_that_of_the_bytes_or_of_starting_the_copies() -> None:
    """7.6 GB at 50 GB/s are 152 ms; 36,945 copies of 8 µs are 296 ms, however few bytes they have."""
    assert pause_s(7.6e9, 339, 50e9) == pytest.approx(0.152)
    assert pause_s(7.6e9, 36_945, 50e9) == pytest.approx(0.29556)
