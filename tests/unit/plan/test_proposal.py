"""A refusal's proposal is the cheapest one that the plan itself accepts, and its keys start as they are printed."""

import re
import shlex
from dataclasses import dataclass

import msgspec
import pytest

from pipelinerl.config import load
from pipelinerl.config.sections import Config
from pipelinerl.plan.memory import memory_plan
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape
from pipelinerl.plan.proposal import Changes, Target, advice, proposal, steps
from pipelinerl.plan.speed import planned_gpu
from pipelinerl.plan.training_memory import GIB
from pipelinerl.world import WorldMap, map_world
from pipelinerl.world.cluster import read_cluster

REQUIRED = ("output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b", "dry_run=true")
UTILIZATION = "vllm_config.vllm_kwargs.gpu-memory-utilization"
TENSOR_PARALLEL = "vllm_config.vllm_kwargs.tensor-parallel-size"
OFFLOADED = {"finetune.engine": "fsdp2", "finetune.shard_gradients": "auto", "finetune.cpu_offload": True}


@dataclass(frozen=True)
class Planned:
    """A command's world, model and GPU, as its dry run plans them."""

    name: str
    arguments: tuple[str, ...]
    cfg: Config
    world: WorldMap
    shape: ModelShape

    @classmethod
    def of(cls, name: str, *arguments: str) -> "Planned":
        cfg = load.validate(load.compose(name, [*REQUIRED, *arguments]))
        world = map_world(cfg, read_cluster(cfg.world, {}, dry_run=True), check=False)
        return cls(name, arguments, cfg, world, PUBLISHED_SHAPES[cfg.model_path])

    @property
    def target(self) -> Target:
        return Target(shape=self.shape, nodes=self.world.nodes, gpu_bytes=planned_gpu(self.cfg)[2])

    @property
    def fits(self) -> bool:
        plans = memory_plan(self.cfg, self.world, self.shape, self.target.gpu_bytes)
        return all(plan.fits and not plan.is_tight for plan in plans)

    def followed(self, advice: str) -> "list[Planned]":
        """The same command with the arguments of each proposal behind it."""
        texts = re.findall(r"fits(?: \(\d+ GiB of host memory per node\))? with ([^;]*)", advice)
        return [Planned.of(self.name, *self.arguments, *shlex.split(text)) for text in texts]


def world(name: str, model: str, gpus: int, gpu: str, *more: str) -> Planned:
    return Planned.of(name, f"model_path=Qwen/{model}", f"world.gpus_per_node={gpus}", f"world.gpu={gpu}", *more)


TWO_NODES = "world.hosts=[a,b]"
WORLDS = {
    "32B on 2x8x80": ("base_2node", "Qwen2.5-32B", 8, "H100", TWO_NODES),
    "7B on 1x24": ("base_1gpu", "Qwen2.5-7B", 1, "4090"),
    "7B on 1x80": ("base_1gpu", "Qwen2.5-7B", 1, "H100"),
    "7B on 4x40": ("base_4gpu", "Qwen2.5-7B", 4, "A100-40GB"),
    "7B on 8x80": ("base", "Qwen2.5-7B", 8, "H100"),
    "72B on 2x8x80": ("base_2node", "Qwen2.5-72B", 8, "H100", TWO_NODES),
    "3B on 1x24": ("base_1gpu", "Qwen2.5-3B", 1, "4090"),
    "14B on 2x80": ("base", "Qwen2.5-14B", 2, "H100"),
    "30B-A3B on 8x80": ("base", "Qwen3-30B-A3B", 8, "H100"),
}


@pytest.mark.parametrize("name", WORLDS)
def test_world_fits_or_is_refused_with_a_proposal_that_fits(name: str) -> None:
    asked = world(*WORLDS[name])
    assert asked.fits is (name == "7B on 8x80")
    for one in (followed := asked.followed(advice(asked.cfg, asked.target))):
        assert one.fits, one.arguments  # `load.validate` has checked types and rules
    assert followed or asked.fits


SHARED, PLAIN = ("base_1gpu", "Qwen2.5-0.5B", 1, "H100"), ("base", "Qwen2.5-7B", 8, "H100")
SERVED = (
    "base",
    "Qwen2.5-32B",
    8,
    "H200",
    "finetune.engine=fsdp2",
    "finetune.cpu_offload=true",
    "finetune.shard_gradients=true",
)
TEACHER = ("finetune.rl.teacher_coef=1", "teachers=[{model_path: Qwen/Qwen2.5-32B}]", "world.preprocessor_fraction=4")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # 12.0 GiB of trainer beside .85 of 79.6 GiB
        ((*SHARED, f"{UTILIZATION}=0.9"), {UTILIZATION: 0.8}),
        ((*SERVED, f"{UTILIZATION}=0.4"), {UTILIZATION: 0.9}),
        # 87.3 GiB on 8 ranks, and seven servers leave 9
        (WORLDS["32B on 2x8x80"], {"world.actor_fraction": 6, "world.finetune_fraction": 10}),
        # 61 GiB of a teacher's weights are halved, on two of eight GPUs each for teacher and policy
        (
            ("base", "Qwen2.5-0.5B", 8, "L40S", *TEACHER),
            {TENSOR_PARALLEL: 2, "world.actor_fraction": 2, "world.preprocessor_fraction": 2},
        ),
        ((*PLAIN, "finetune.engine=ddp"), {"finetune.engine": "fsdp2"}),
        ((*PLAIN, "finetune.gradient_checkpointing=false"), {"finetune.gradient_checkpointing": "auto"}),
        (WORLDS["14B on 2x80"], OFFLOADED),
        (WORLDS["3B on 1x24"], {UTILIZATION: 0.65, **OFFLOADED}),
        # with all trainer ranks on one node their states and a checkpoint take 2302 GiB of it
        (
            WORLDS["72B on 2x8x80"],
            {UTILIZATION: 0.95, TENSOR_PARALLEL: 2, "world.actor_fraction": 6, "world.finetune_fraction": 10}
            | OFFLOADED,
        ),
        (
            (*PLAIN, "finetune.seq_length=200000"),
            {"world.actor_fraction": 2, "world.finetune_fraction": 6, "finetune.seq_parallel": 2},
        ),
    ],
)
def test_step_is_taken_where_no_cheaper_one_is_enough(asked: tuple, expected: Changes) -> None:
    assert proposal((given := world(*asked)).cfg, given.target) == expected


def test_offloading_is_proposed_where_the_host_has_room_for_it_and_another_experiment_where_it_has_not() -> None:
    """14B of 16 bytes in host memory beside two versions, a checkpoint and a staged update: 495 GiB."""
    asked = world(*WORLDS["14B on 2x80"])
    enough, short = (msgspec.structs.replace(asked.target, host_bytes=gib * GIB) for gib in (496, 494))
    assert advice(asked.cfg, enough).startswith("it fits (495 GiB of host memory per node) with finetune.engine=fsdp2 ")
    refused = advice(asked.cfg, short)
    assert re.match(
        r"as another experiment, LoRA fits with finetune\.lora\.enabled=true.*; on a larger machine", refused
    )
    assert all(one.fits for one in asked.followed(refused))


def test_experts_are_divided_where_that_makes_the_model_fit() -> None:
    split = ("world.hosts=[a,b,c,d,e,f,g,h]", "world.actor_fraction=8", "world.finetune_fraction=56")
    asked = world("base", "Qwen3-235B-A22B", 8, "H100", *split, f"{TENSOR_PARALLEL}=8")
    found = proposal(asked.cfg, msgspec.structs.replace(asked.target, host_bytes=900 * GIB))
    assert found is not None
    assert found["finetune.expert_ranks"] == 8
    assert "finetune.cpu_offload" not in found


def test_model_that_fits_no_machine_is_refused_without_a_proposal() -> None:
    asked = world(*WORLDS["7B on 1x24"], "finetune.seq_length=1000000")
    assert advice(asked.cfg, asked.target).startswith("nothing here makes it fit: shorten finetune.seq_length")


def test_servers_of_no_size_are_proposed_that_does_not_divide_the_heads() -> None:
    """28 heads: vLLM takes 1, 2 and 4 GPUs, not 8."""
    asked = world("base_2node", "Qwen2.5-7B", 8, "H100", TWO_NODES)
    sizes = {changes.get(TENSOR_PARALLEL) for changes in list(steps(asked.cfg, asked.target))[1]}
    assert sizes == {None, 1, 2, 4}


def test_servers_are_made_smaller_where_their_gpus_are_all_that_the_trainer_lacks() -> None:
    """14B of 18 bytes take 62 GiB of each of 4 trainer GPUs beside 16 of a step, and 41 of each of 6."""
    asked = world("base", "Qwen2.5-14B", 8, "H100", f"{TENSOR_PARALLEL}=4")
    found = proposal(asked.cfg, asked.target)
    assert found == {TENSOR_PARALLEL: 2, "world.actor_fraction": 2, "world.finetune_fraction": 6}


def test_odd_number_of_ranks_shares_sequences() -> None:
    """Two GPUs are too few for 350,000 tokens, and the trainer has no fourth."""
    split = ("world.actor_fraction=1", "world.finetune_fraction=3")
    asked = world("base", "Qwen2.5-0.5B", 4, "4090", "finetune.seq_length=350000", *split)
    assert proposal(asked.cfg, asked.target) == {"finetune.seq_parallel": 3}


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(40, 10, [1, 2]), (40, 8, [1, 2, 4, 8]), (28, 2, [1, 2, 4])])
def test_shape_is_split_where_vllm_divides_or_repeats_its_heads(heads: int, kv_heads: int, sizes: list[int]) -> None:
    shape = msgspec.structs.replace(PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], heads=heads, kv_heads=kv_heads)
    assert [ranks for ranks in (1, 2, 4, 8) if shape.splits_over(ranks)] == sizes
