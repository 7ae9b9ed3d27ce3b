"""Sizes of models and memory plans, by hand."""

import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from pipelinerl.config import load
from pipelinerl.config.servers import MOST_ROLLOUTS
from pipelinerl.plan.memory import (
    SURE,
    head_chunk,
    memory_plan,
    planned_rollouts,
    server_items,
    server_plan,
    trainer_bytes,
    utilization,
    with_choices,
    with_value,
)
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, find_model_shape, shape_from_config
from pipelinerl.plan.training_memory import (
    GIB,
    EngineMemory,
    engine_memory,
    head_bytes,
    layer_bytes_per_token,
    lora_parameters,
    passing_items,
    products_per_token,
    step_items,
)
from pipelinerl.plan.world_table import compact_numbers, render_world, world_table
from pipelinerl.world import Cluster, Node, map_world

REQUIRED = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]
TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def make_config(*overrides: str):
    return load.parse(load.compose("base", [*REQUIRED, *overrides]))


def engine(name: str, cfg, ranks: int = 8) -> EngineMemory:
    return engine_memory(with_value(cfg, "finetune.engine", name), ranks)


def one_node(gpus: int) -> Cluster:
    return Cluster(accelerator="cuda", nodes=(Node(rank=0, hostname="127.0.0.1", devices=gpus),))


def test_parameters_of_a_tiny_decoder_by_hand():
    # head_dim 2; attention 8·2·(2·4 + 2·2) = 192, feed-forward 3·8·16 = 384, norms 16: 592 per layer
    # 2 layers 1184, embeddings 800 (tied), last norm 8
    shape = shape_from_config(TINY)
    assert shape.parameters == 1992
    assert shape.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 2
    assert shape_from_config({**TINY, "tie_word_embeddings": False}).parameters == 2792


def test_experts_are_counted_all_for_memory_and_few_for_work():
    shape = shape_from_config({**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
    # per layer: 192 + 3·8·4·experts + router 32 + 16
    assert shape.parameters == 2 * (192 + 384 + 32 + 16) + 808
    assert shape.active_parameters == 2 * (192 + 192 + 32 + 16) + 808


PUBLISHED_MIXTURES = {
    # 46.7B and 12.9B: https://mistral.ai/news/mixtral-of-experts
    "mixtral": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        (46.7e9, 12.9e9),
    ),
    # 671B and 37B, without the layer that predicts several tokens: arXiv:2412.19437
    "deepseek_v3": (
        {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256}
        | {"n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        (671e9, 37.5e9),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_MIXTURES)
def test_sizes_of_mixtures_are_the_published_ones(name):
    config, expected = PUBLISHED_MIXTURES[name]
    shape = shape_from_config(config)
    assert (shape.parameters, shape.active_parameters) == pytest.approx(expected, rel=5e-3)


def test_latent_attention_caches_one_narrow_vector_per_layer():
    shape = shape_from_config(PUBLISHED_MIXTURES["deepseek_v3"][0])
    assert shape.kv_bytes_per_token() == 61 * (512 + 64) * 2


def test_expert_parallel_devices_hold_whole_experts():
    """128 experts on 3 devices: one device holds 43."""
    shape = PUBLISHED_SHAPES["Qwen/Qwen3-30B-A3B"]
    experts = 48 * 3 * 2048 * 768 * 128
    assert shape.expert_parameters == experts
    sizes = [
        server_items(make_config("vllm_config.vllm_kwargs.tensor-parallel-size=3", *more), shape, "actor_llm", 3)
        for more in ((), ("+vllm_config.vllm_kwargs.enable-expert-parallel=true",))
    ]
    assert sizes[0][0].num_bytes == 2 * (shape.parameters // 3)
    assert sizes[1][0].num_bytes == 2 * ((shape.parameters - experts) // 3 + experts // 128 * 43)


def test_shape_of_a_vision_language_model_is_its_text_part():
    assert shape_from_config({"model_type": "vlm", "text_config": TINY}) == shape_from_config(TINY)


def test_unusual_configuration_has_no_shape():
    assert shape_from_config({"model_type": "mamba", "d_model": 8}) is None


def test_published_size_is_the_published_number():
    # the model card of Qwen2.5-7B says 7.61B parameters, of Qwen2.5-0.5B 0.49B
    assert PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"].parameters == pytest.approx(7.61e9, rel=2e-3)
    assert PUBLISHED_SHAPES["Qwen/Qwen2.5-0.5B"].parameters == pytest.approx(0.49e9, rel=1e-2)


def test_local_configuration_counts_before_the_published_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-7B").mkdir(parents=True)
    (tmp_path / "Qwen" / "Qwen2.5-7B" / "config.json").write_text(json.dumps(TINY))
    assert find_model_shape("Qwen/Qwen2.5-7B").parameters == 1992


def test_unknown_model_has_no_shape(tmp_path):
    assert find_model_shape(str(tmp_path / "nothing")) is None
    assert find_model_shape("no-such-organisation/no-such-model") is None


@pytest.mark.parametrize(
    ("name", "stage", "half", "expected"),
    [
        ("ddp", 0, True, (400, 400, 800)),
        ("fsdp2", 0, True, (100, 400, 200)),
        ("deepspeed", 1, True, (200, 200, 300)),
        ("deepspeed", 2, True, (200, 100, 300)),
        ("deepspeed", 3, True, (50, 100, 300)),
        ("deepspeed", 1, False, (400, 400, 300)),
        ("deepspeed", 2, False, (400, 100, 300)),
        ("deepspeed", 3, False, (100, 100, 300)),
    ],
)
def test_states_of_a_hundred_parameters_on_four_ranks(name, stage, half, expected):
    cfg = make_config(
        f"deepspeed_config=deepspeed_stage{stage or 3}_bf16", f"finetune.dtype={'bfloat16' if half else 'float32'}"
    )
    assert engine(name, cfg, 4).state_bytes(100) == expected


def test_gradient_in_shards_is_a_share_of_it():
    cfg = make_config("finetune.shard_gradients=true")
    assert engine("fsdp2", cfg, 4).state_bytes(100) == (100, 100, 200)


def test_activations_of_a_7b_layer_by_hand():
    """H 3584, heads 28, keys 512, feed-forward 18944, two bytes per element: it was measured as 226 kB per token."""
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    attention, feed_forward = 2 * (3 * 3584 + 2 * 512) + 4 * 28, 2 * 4 * 18944
    plain = engine("fsdp2", make_config()).precision
    assert layer_bytes_per_token(shape, plain) == 2 * 8 * 3584 + attention + feed_forward
    # autocast: input and normalised input in float32, and one bfloat16 copy for each of q, k, v, gate and up
    narrowed = engine("ddp", make_config()).precision
    assert layer_bytes_per_token(shape, narrowed) == (2 * 8 + 5 * 2) * 3584 + attention + feed_forward
    whole = engine("ddp", make_config("finetune.dtype=float32")).precision
    assert layer_bytes_per_token(shape, whole) == 2 * 12 * 3584 + 2 * attention - 4 * 28 + 2 * feed_forward


@pytest.mark.parametrize(("stage", "expected"), [(1, 2 * 2 * 500_000_000), (2, 2 * 2 * 500_000_000), (3, 100_000_000)])
def test_buckets_are_those_of_the_deepspeed_file(stage, expected):
    """Stages 1 and 2 have DeepSpeed's default of 5e8 elements, twice; stage 3 names 5e7."""
    cfg = make_config(f"deepspeed_config=deepspeed_stage{stage}_bf16")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    items = {item.label: item.num_bytes for item in step_items(shape, engine("deepspeed", cfg))}
    assert items["reduction buckets"] == expected


@pytest.mark.parametrize(
    ("stage", "parameters", "expected"),
    [(1, 800, 6 * 100), (2, 800, 0), (3, 800, 4 * 100), (3, 80 * 10**9, 4 * 10**9)],
)
def test_deepspeed_copies_a_ranks_gradient_in_its_step(stage, parameters, expected):
    """Stage 1 flattens the bfloat16 gradient and widens it, stage 3 flattens a sub-group of at most 1e9 elements."""
    cfg = make_config(f"deepspeed_config=deepspeed_stage{stage}_bf16")
    assert engine("deepspeed", cfg).stepping_bytes(parameters) == expected


@pytest.mark.parametrize(("stage", "expected"), [(1, 4 * 100), (2, 4 * 100), (3, 4 * 100)])
def test_deepspeed_flattens_a_float32_gradient_once(stage, expected):
    cfg = make_config(f"deepspeed_config=deepspeed_stage{stage}_bf16", "finetune.dtype=float32")
    assert engine("deepspeed", cfg).stepping_bytes(800) == expected


def test_stage_2_in_float32_has_a_gradient_of_the_micro_batch_beside_their_sum():
    """From its first full bucket on: one of 5e8 elements. In bfloat16 it adds to the sum in place."""
    half = make_config("deepspeed_config=deepspeed_stage2_bf16")
    whole = with_value(half, "finetune.dtype", "float32")
    assert engine("deepspeed", whole).second_gradient_bytes(8 * 10**9) == 4 * 10**9
    assert engine("deepspeed", whole).second_gradient_bytes(5 * 10**8) == 0
    assert engine("deepspeed", half).second_gradient_bytes(8 * 10**9) == 0
    assert engine("ddp", whole).second_gradient_bytes(8 * 10**9) == 0
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-72B"]
    first = with_value(whole, "deepspeed_config", "deepspeed_stage1_bf16")
    sizes = [
        passing_items(shape, engine("deepspeed", cfg), learning=8 * 10**9, cuda=True)[1].num_bytes
        for cfg in (first, whole)
    ]
    assert sizes[1] - sizes[0] == 4 * 10**9


def test_gradient_that_stage_1_copies_in_its_step_is_the_peak_of_short_micro_batches():
    cfg = make_config("deepspeed_config=deepspeed_stage1_bf16", "finetune.seq_length=256")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-72B"]
    items = {item.label: item.num_bytes for item in step_items(shape, engine("deepspeed", cfg))}
    assert items.keys() == {"optimizer's copies of the gradient", "reduction buckets"}
    assert items["optimizer's copies of the gradient"] == 6 * shape.parameters // 8


def test_reduction_of_a_large_layer_is_fsdp2s_peak():
    """Its gradient in bfloat16, that in float32, and the one before, when one layer's activations are gone."""
    cfg = make_config("finetune.seq_length=512", "finetune.gradient_checkpointing=true")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-72B"]
    items = {item.label: item.num_bytes for item in step_items(shape, engine("fsdp2", cfg))}
    layer = (shape.parameters - 2 * 152064 * 8192) // 80
    assert items["reduction of a layer's gradient"] == 10 * layer - 512 * 2 * 8192


def test_copies_of_weights_are_what_the_engine_makes_whole():
    shape = shape_from_config({**TINY, "tie_word_embeddings": False})
    embeddings, layer = 2 * 100 * 8, 592 + 4  # the last norm is shared out over both layers
    assert engine("ddp", make_config(), 8).whole_weights(shape) == 2 * 2 * layer
    assert engine("fsdp2", make_config(), 8).whole_weights(shape) == 2 * (embeddings + 2 * layer)
    assert engine("ddp", make_config("finetune.dtype=float32"), 8).whole_weights(shape) == 0
    assert engine("deepspeed", make_config(), 8).whole_weights(shape) == 2 * shape.parameters  # stage 3, fewer than 1e9
    assert engine("deepspeed", make_config(), 1).whole_weights(shape) == 0


def test_ranks_that_divide_experts_gather_and_reduce_their_own():
    """Per layer 384 numbers of four experts, of which a rank owns two, and 628 − 384 of the rest."""
    shape = shape_from_config({**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
    layer, divided = 628, 628 - 192
    whole, shared = make_config(), make_config("finetune.expert_ranks=2")
    assert engine("fsdp2", whole).whole_weights(shape) == 2 * (800 + 2 * layer)
    assert engine("fsdp2", shared).whole_weights(shape) == 2 * (800 + 2 * divided)
    assert engine("fsdp2", shared).reduction_bytes(shape, 1.0) == 10 * divided
    assert engine("fsdp2", whole).gradient_bytes(shape) == 4 * 2056
    assert engine("fsdp2", shared).gradient_bytes(shape) == 4 * (2056 - 384)
    sharded = make_config("finetune.expert_ranks=2", "finetune.shard_gradients=true")
    assert engine("fsdp2", sharded).gradient_bytes(shape) == 4 * 2056 // 8
    # bfloat16 states of eight numbers, of two experts for each of ten tokens, sent and received
    assert engine("fsdp2", shared).exchanged_bytes(shape, 10) == 2 * 2 * 10 * 2 * 8
    assert engine("fsdp2", whole).exchanged_bytes(shape, 10) == 0
    assert "2 ranks that are assumed to get equally many tokens" in str(engine("fsdp2", shared))


LARGE = "finetune.gradient_checkpointing=true finetune.engine=fsdp2 finetune.shard_gradients=true"


@pytest.mark.parametrize(("name", "ranks"), [("Qwen/Qwen3-30B-A3B", 8), ("Qwen/Qwen3-235B-A22B", 64)])
def test_large_mixtures_fit_where_their_experts_are_divided(name, ranks):
    """In micro-batches of 12,000 tokens on GPUs of 80 GiB, and on no half of them."""
    cfg, shape = make_config("finetune.expert_ranks=8", *LARGE.split()), PUBLISHED_SHAPES[name]
    assert trainer_bytes(cfg, shape, ranks) <= 80 * GIB < trainer_bytes(cfg, shape, ranks // 2)


def test_size_of_the_largest_mixture_is_the_published_one():
    # the model card of Qwen3-235B-A22B says 235B parameters, 22B of them active
    shape = PUBLISHED_SHAPES["Qwen/Qwen3-235B-A22B"]
    assert (shape.parameters, shape.active_parameters) == pytest.approx((235e9, 22e9), rel=1e-2)


def test_adapters_alone_have_gradients_and_states():
    shape = shape_from_config(TINY)
    # rank 2, per layer: q, o 2·(8 + 8), k, v 2·(8 + 4), feed-forward 3·(8 + 16)
    adapters = lora_parameters(shape, 2)
    assert adapters == 2 * 2 * (32 + 24 + 72)
    sizes = engine("ddp", make_config(), 1).state_bytes(shape.parameters, adapters)
    assert sizes == (4 * 1992, 4 * adapters, 8 * adapters)


def test_what_is_frozen_keeps_nothing_for_its_gradient():
    """The norms' normalised input, and the head's gradient."""
    shape = shape_from_config({**TINY, "tie_word_embeddings": False})
    lora, full = make_config("finetune.lora.enabled=true"), make_config()
    for name, width in (("fsdp2", 2), ("ddp", 4)):
        precision = engine(name, full).precision
        saved = layer_bytes_per_token(shape, precision) - layer_bytes_per_token(shape, precision, frozen=True)
        assert saved == 2 * width * 8
    heads = [head_bytes(cfg, shape, engine("fsdp2", cfg).precision, 512, cuda=True) for cfg in (full, lora)]
    assert heads[0] - heads[1] == 4 * 100 * 8
    # ZeRO-3 releases the embedding, which the backward pass does not use, but not one that is the head as well
    assert engine("deepspeed", lora, 8).whole_weights(shape) == 2 * (shape.parameters - 100 * 8)
    tied = shape_from_config({**TINY, "tie_word_embeddings": True})
    assert engine("deepspeed", lora, 8).whole_weights(tied) == 2 * tied.parameters
    assert engine("ddp", lora, 8).whole_weights(shape) == 0, "the layers are held as they are multiplied"


def test_frozen_layers_take_two_bytes_of_a_parameter_in_bfloat16():
    """Two layers of 592 and a last norm of 8, and embedding and head of 800 each, on 1 rank and on 4."""
    shape = shape_from_config({**TINY, "tie_word_embeddings": False})
    lora, layers, rest = make_config("finetune.lora.enabled=true"), 2 * 592 + 8, 2 * 800
    assert engine("ddp", lora, 1).weight_bytes(shape, 10) == 2 * layers + 4 * rest
    assert engine("fsdp2", lora, 4).weight_bytes(shape, 10) == (2 * layers + 4 * rest) // 4
    assert engine("deepspeed", lora, 4).weight_bytes(shape, 10) == 2 * (layers + rest) // 4
    whole = make_config("finetune.lora.enabled=true", "finetune.dtype=float32")
    for cfg in (whole, make_config()):
        assert engine("ddp", cfg, 1).weight_bytes(shape, 10) == 4 * (layers + rest)
    away = make_config("finetune.lora.enabled=true", "finetune.cpu_offload=true")
    assert engine("fsdp2", away, 4).weight_bytes(shape, 10) == 0


def test_head_rounds_the_logits_gradient_for_cuda_and_its_own_for_bfloat16_weights():
    """Of 7B: V 152064, H 3584. A chunk has 256 tokens with two float32 buffers, and a rounded one only on CUDA."""
    cfg, shape = make_config(), PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    matrix, states = 152064 * 3584, 512 * 3584
    assert head_bytes(cfg, shape, engine("ddp", cfg).precision, 512, cuda=True) == (
        4 + 2
    ) * matrix + 10 * 256 * 152064 + states * (4 + 4 + 8)
    assert head_bytes(cfg, shape, engine("fsdp2", cfg).precision, 512, cuda=True) == (4 + 2) * matrix + states * (
        4 + 4 + 4
    )
    lora = make_config("finetune.lora.enabled=true")
    assert head_bytes(lora, shape, engine("fsdp2", lora).precision, 512, cuda=True) == 10 * 256 * 152064 + states * (
        4 + 4 + 4
    )
    widened = 4 * (matrix + states)
    assert head_bytes(
        lora, shape, engine("fsdp2", lora).precision, 512, cuda=False
    ) == widened + 8 * 256 * 152064 + states * (4 + 4 + 4)


def test_server_keeps_for_the_cache_what_weights_and_runtime_leave():
    cfg = make_config("vllm_config.vllm_kwargs.tensor-parallel-size=2")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    plan = memory_plan(cfg, map_world(cfg, one_node(8), check=False), shape, 80 * GIB)[1]
    cache = plan.items[-1].num_bytes
    assert (plan.kind, plan.num_devices) == ("actor_llm", 4)
    # 8,192 tokens × 2 bytes × (2 · 3584 + 3 · 18944 / 2), and float32 logits of 1,024 sequences three times
    activations = 8192 * 2 * 35584 + 3 * 4 * 1024 * 152064
    assert cache == int(0.9 * 80 * GIB) - shape.parameters - activations - 2 * GIB
    # 28 layers × 2 × 4 heads × 128 × 2 bytes = 57,344 bytes per token over both devices
    assert f"{2 * cache // 57344:,} tokens" in plan.note
    assert plan.fits


@pytest.mark.parametrize(
    "override",
    ["~vllm_config.vllm_kwargs.gpu-memory-utilization", "vllm_config.vllm_kwargs.gpu-memory-utilization=null"],
)
def test_server_whose_share_is_not_given_has_vllms_default(override: str):
    package = Path(importlib.util.find_spec("vllm").origin).parent
    source = (package / "config" / "cache.py").read_text()
    default = re.search(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", source)[1]
    assert utilization(make_config(override)) == float(default)


def test_staged_updates_are_summed_per_node():
    cfg = make_config("vllm_config.vllm_kwargs.tensor-parallel-size=2")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    trainer, server = memory_plan(cfg, map_world(cfg, one_node(8), check=False), shape, 110 * GIB)
    version = 2 * shape.parameters / GIB
    assert f"{2 * version:.1f} GiB of it for updates on their way to servers" in trainer.note
    # two servers of two GPUs, each of which stages its half of the bfloat16 weights beside vLLM's nine tenths
    expected = f"an update is staged beside vLLM's share: {version / 2:.1f} GiB per GPU, {2 * version:.0f} GiB per node"
    assert expected in server.note
    # a tenth of the GPU has to hold its half, 1 GiB, and three communicators of four channels of 16 MB
    assert "1.2 GiB of the GPU are left to communicators" in server.note
    largest = 10 * (version / 2 + 1 + 3 * 4 * 16e6 / GIB)
    for gib, place in ((largest + 0.1, "beside vLLM's share"), (largest - 0.1, "in pinned host memory")):
        plan = memory_plan(cfg, map_world(cfg, one_node(8), check=False), shape, int(gib * GIB))[1]
        assert f"an update is staged {place}" in plan.note
    small = memory_plan(cfg, map_world(cfg, one_node(8), check=False), shape, 80 * GIB)[1]
    assert "staged in pinned host memory" in small.note


def test_plan_says_for_how_many_sequences_graphs_are_captured():
    for limit, said in (("auto", "CUDA graphs for decoding up to 1024 sequences"), (7, "up to 7 sequences")):
        cfg = make_config(f"actor.llm_max_rollouts={limit}")
        plans = memory_plan(
            cfg, map_world(cfg, one_node(8), check=False), PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], 80 * GIB
        )
        assert said in plans[1].note.split("; ")[1]


def test_model_larger_than_its_share_does_not_fit():
    cfg = make_config()
    plans = memory_plan(cfg, map_world(cfg, one_node(8), check=False), PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], 16 * GIB)
    assert [plan.fits for plan in plans] == [False, False]


def test_selective_checkpointing_keeps_products_by_hand():
    """Hidden 8, 4 heads of 2, 2 key heads, feed-forward 16, in bfloat16: q 8, k and v 4 each, o 8, gate and up 16 each,
    down 8, attention's own result 8, and its 4 float32 sums."""
    cfg, shape = make_config("finetune.gradient_checkpointing=selective"), shape_from_config(TINY)
    precision = engine("fsdp2", cfg).precision
    assert products_per_token(shape, precision) == 2 * (8 + 4 + 4 + 8 + 16 + 16 + 8 + 8) + 4 * 4
    assert products_per_token(shape, precision, adapted=True) == 2 * (2 * 64 + 8) + 4 * 4
    mixture = shape_from_config({**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
    assert products_per_token(mixture, precision) == 2 * (24 + 2 * (2 * 4 + 8) + 8) + 4 * 4
    kept, *_ = passing_items(shape, engine("fsdp2", cfg), learning=1992, cuda=True)
    assert kept.num_bytes == 2 * cfg.finetune.seq_length * (2 * 8 + 160)


def test_shared_prefixes_repeat_their_keys_in_every_layer():
    """2 layers whose 2 key heads of 2 have keys and values in bfloat16: 16 bytes for each of 7 × seq_length tokens."""
    shape = shape_from_config(TINY)
    kept = {}
    for share in ("auto", "off"):
        cfg = make_config("finetune.gradient_checkpointing=false", f"finetune.share_prefixes={share}")
        kept[share] = passing_items(shape, engine("fsdp2", cfg), learning=1992, cuda=True)[0].num_bytes
    assert kept["auto"] - kept["off"] == 2 * 16 * 7 * cfg.finetune.seq_length


def test_offloaded_states_are_the_host_s():
    """7B in float32 on 8 ranks: on the GPU only the gradient until it is whole, and shards on their way."""
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    here, away = make_config(), make_config("finetune.cpu_offload=true")
    assert engine("fsdp2", away).state_bytes(shape.parameters) == (0, 4 * shape.parameters, 0)
    sharded = make_config("finetune.cpu_offload=true", "finetune.shard_gradients=true")
    assert engine("fsdp2", sharded).state_bytes(shape.parameters) == (0, 0, 0)
    assert engine("fsdp2", sharded).host_bytes(shape.parameters) == 16 * shape.parameters // 8
    assert engine("fsdp2", here).host_bytes(shape.parameters) == 0
    embedding = 2 * 152064 * 3584
    arriving = engine("fsdp2", away).whole_weights(shape) - engine("fsdp2", here).whole_weights(shape)
    assert arriving == 4 * embedding // 8, "more than two layers of 0.23B"
    world = map_world(sharded, one_node(8), check=False)
    cfg = with_value(sharded, "finetune.engine", "fsdp2")
    note = memory_plan(cfg, world, shape, 80 * GIB)[0].note
    assert f"and {16 * shape.parameters / GIB:.0f} GiB of weights, gradients and optimizer states there" in note


def test_auto_takes_the_fastest_that_surely_fits_and_offloads_last():
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    auto = [f"finetune.{key}=auto" for key in ("gradient_checkpointing", "shard_gradients", "cpu_offload")]
    cfg = make_config("finetune.engine=fsdp2", *auto)
    layers = shape.layers
    order = [
        (how, shards, away)
        for shards, away in ((False, False), (True, False), (False, True), (True, True))
        for how in (False, *range(1, layers), True)
    ]

    def needed(how: object, shards: bool, away: bool) -> int:
        """With the smallest chunk of the head where all is recomputed, else with the largest."""
        keys = {"gradient_checkpointing": how, "shard_gradients": shards, "cpu_offload": away}
        keys["head_chunk_tokens"] = 256 if how is True else 1024
        return trainer_bytes(cfg.model_copy(update={"finetune": cfg.finetune.model_copy(update=keys)}), shape, 8)

    def chosen(gpu_bytes: int | None) -> tuple[object, object, object]:
        finetune = with_choices(cfg, shape, 8, gpu_bytes).finetune
        return finetune.gradient_checkpointing, finetune.shard_gradients, finetune.cpu_offload

    sizes = [needed(*one) for one in order]
    assert sizes[:layers] == sorted(sizes[:layers], reverse=True)
    assert sizes[0] > sizes[1] > sizes[layers] > sizes[2 * layers + 1] > sizes[-1]
    for number in (0, 1, layers - 1, layers, 2 * layers + 1):
        enough = int(sizes[number] / SURE) + 1
        assert chosen(enough) == order[number]
        assert chosen(enough - 2) != order[number]
    assert chosen(int(sizes[-1] / SURE) + 1) == (True, True, True)
    assert chosen(GIB) == (True, True, True), "nothing fits: the smallest"
    assert chosen(None) == (True, False, False)
    assert with_choices(cfg, None, 8, 80 * GIB).finetune.cpu_offload is False
    elsewhere = with_choices(with_value(cfg, "finetune.engine", "ddp"), shape, 8, GIB).finetune
    assert (elsewhere.gradient_checkpointing, elsewhere.shard_gradients, elsewhere.cpu_offload) == (True, False, False)
    plan = memory_plan(cfg, map_world(cfg, one_node(16), check=False), shape, int(sizes[1] / SURE) + 1)[0]
    assert (
        f"chosen: gradient_checkpointing=1 (of {layers} layers), shard_gradients=false, cpu_offload=false" in plan.note
    )


@pytest.mark.parametrize(("share", "tight"), [(0.951, True), (0.949, False)])
def test_trainer_that_nearly_fills_its_gpu_is_tight(share: float, tight: bool):
    cfg = make_config("finetune.gradient_checkpointing=true", "finetune.head_chunk_tokens=256")
    shape, world = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], map_world(cfg, one_node(8), check=False)
    trainer = memory_plan(cfg, world, shape, int(trainer_bytes(cfg, shape, 4) / share))[0]
    assert (trainer.fits, trainer.is_tight) == (True, tight)


def test_server_whose_cache_holds_no_whole_sequence_is_tight():
    """7B: 14.2 GiB of weights, 2 of runtime, activations; 10,000 tokens of 2 × 512 × 28 × 2 bytes."""
    cfg, shape = make_config(), PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    held = sum(item.num_bytes for item in server_items(cfg, shape, "actor_llm", 1))
    enough = int((held + 573_440_000) / 0.9) + 2
    assert not server_plan(cfg, shape, "actor_llm", 1, 1, enough).is_tight
    assert server_plan(cfg, shape, "actor_llm", 1, 1, enough - 4).is_tight


def test_some_layers_recomputed_by_hand():
    """Two layers, hidden 8: the first keeps its input, the second all, whose room then serves the first."""
    cfg, shape = (
        make_config("finetune.gradient_checkpointing=1", "finetune.share_prefixes=off"),
        shape_from_config(TINY),
    )
    whole = layer_bytes_per_token(shape, engine("fsdp2", cfg).precision)

    def kept_and_largest(how: object) -> tuple[int, int]:
        fixed = with_value(cfg, "finetune.gradient_checkpointing", how)
        fixed = with_value(fixed, "finetune.head_chunk_tokens", 1)
        kept, largest, _ = passing_items(shape, engine("fsdp2", fixed), learning=1992, cuda=True)
        return kept.num_bytes // cfg.finetune.seq_length, largest.num_bytes

    assert kept_and_largest(1)[0] == 2 * 8 + whole
    assert kept_and_largest(False)[0] == 2 * whole
    assert kept_and_largest(2) == kept_and_largest(5) == kept_and_largest(True)
    assert kept_and_largest(True)[0] == 2 * 2 * 8
    assert kept_and_largest(1)[1] == kept_and_largest(False)[1] < kept_and_largest(True)[1]


def test_shared_gpu_leaves_the_trainer_what_the_server_does_not_take():
    cfg = make_config("world.share_devices=true", "vllm_config.vllm_kwargs.gpu-memory-utilization=0.4")
    plans = memory_plan(cfg, map_world(cfg, one_node(1), check=False), PUBLISHED_SHAPES["Qwen/Qwen2.5-0.5B"], 80 * GIB)
    assert plans[0].capacity == int(80 * GIB * 0.6)
    assert "gpu-memory-utilization ≤" in plans[0].note


def rendered(renderable) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_shows_every_job_with_its_devices():
    cfg = make_config("world.verifier_replicas=1")
    text = rendered(render_world(cfg, map_world(cfg, one_node(8), check=False)))
    for expected in ("actor_llm_3", "finetune_0", "4–7", "ranks 0–3 of 4", "verifier_0", "KV cache"):
        assert expected in text


def test_table_shows_names_with_brackets_as_they_are():
    cfg = make_config("weights.backend=store", 'weights.store="/data/[a] b/[bold]"', 'model_path="/m/[x]"')
    node = Cluster(accelerator="cuda", nodes=(Node(rank=0, hostname="fd00::1", devices=8),))
    text = rendered(render_world(cfg, map_world(cfg, node, check=False)))
    for expected in ("/data/[a] b/[bold]", "config.json of /m/[x] is", "http://[fd00::1]:"):
        assert expected in text


def test_table_names_idle_devices_and_cores():
    cpu = Cluster(accelerator="cpu", nodes=(Node(rank=0, hostname="127.0.0.1", devices=2, cores=(0, 1)),))
    text = rendered(world_table(map_world(make_config(), cpu, check=False)))
    assert "CPU slots" in text
    assert "weights by tcp" in text
    # 3 of 8 GPUs serve, pairs of the other 5 train: one is left over
    odd = ["finetune.seq_parallel=2", "world.actor_fraction=3", "world.finetune_fraction=5"]
    assert "1 idle" in rendered(world_table(map_world(make_config(*odd), one_node(8), check=False)))


def test_numbers_are_shown_as_ranges():
    assert compact_numbers((0, 1, 2, 5, 7, 8)) == "0–2,5,7–8"
    assert compact_numbers(()) == ""


def test_head_takes_the_largest_chunk_that_the_plan_allows():
    # ddp, bfloat16: a chunk's logits and what is made from them take 10 bytes × 151,936 words per token, and with few
    # tokens the head is the peak
    cfg = make_config("finetune.engine=ddp", "finetune.seq_length=1024", "vllm_config.vllm_kwargs.max_model_len=1024")
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-1.5B"]
    least = trainer_bytes(with_value(cfg, "finetune.head_chunk_tokens", 256), shape, 1)
    per_token = 10 * 151_936
    assert least == trainer_bytes(cfg, shape, 1)
    assert head_chunk(cfg, shape, 1, least + 768 * per_token) == 1024
    assert head_chunk(cfg, shape, 1, least + 768 * per_token - 1) == 512
    assert head_chunk(cfg, shape, 1, least) == 256
    assert head_chunk(cfg, shape, 1, None) == 256
    assert head_chunk(with_value(cfg, "finetune.head_chunk_tokens", 64), shape, 1, least) == 64


def test_first_rollouts_are_the_longest_that_the_planned_cache_holds() -> None:
    """Qwen2.5-7B on 80 GiB: 0.9 of it, less weights, activations and runtime, over 2·4·128·2·28 bytes per token."""
    cfg = make_config()
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    held = 2 * shape.parameters + 2 * 8192 * (2 * 3584 + 3 * 18944) + 12 * MOST_ROLLOUTS * 152064 + 2 * GIB
    tokens = (int(0.9 * 80 * GIB) - held) // 57344
    assert planned_rollouts(cfg, shape, 1, 80 * GIB) == tokens // 10_000 == 99
    assert planned_rollouts(cfg, shape, 1, 20 * GIB) == 1, "a server takes at least one"
    short = make_config("vllm_config.vllm_kwargs.max_model_len=256")
    assert planned_rollouts(short, shape, 1, 80 * GIB) == MOST_ROLLOUTS
