"""Scripts for one card, without it: the world that is planned, and what they make of logs and kernels."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.one_card import step, world
from pipelinerl.config.load import compose
from pipelinerl.launcher.checks import OF_THE_PLAN
from pipelinerl.launcher.commands import role_command
from pipelinerl.launcher.run_plan import plan_run, resolve

SECRET = "0123456789abcdef"


@pytest.mark.parametrize("experts", [False, True])
def test_four_launchers_plan_one_world_of_a_server_and_two_ranks(
    experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = world.with_experts(tmp_path, make=False) if experts else []
    found = world.launchers(tmp_path, [*options, "dry_run=true"], SECRET, {"CUDA_VISIBLE_DEVICES": "3,5"})
    placed, masters, hosts = [], set(), set()
    for command, env in found:
        assert env["CUDA_VISIBLE_DEVICES"] == "3"
        hosts.add(env["NCCL_HOSTID"])
        for name in ("WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES", "PIPELINERL_SECRET"):
            monkeypatch.setenv(name, env[name])
        overrides = command[4:]
        plan = plan_run(resolve(compose("quickstart", overrides), overrides, role_command))
        for check in OF_THE_PLAN:
            check(plan)
        placed.append([job.name for job in plan.jobs if job.kind.startswith(("actor_llm", "finetune"))])
        masters.add((plan.world.master_addr, plan.world.master_port))
    assert placed == [["actor_llm_0"], ["actor_llm_part_0"], ["finetune_0"], ["finetune_1"]]
    assert len(hosts) == 4
    assert len(masters) == 1
    assert plan.world.trainer_world_size == 2
    assert plan.world.weight_backend == "nccl"


def facts(**changed: Any) -> dict[str, Any]:
    counts = {"nccl_group_formed": 2, "nccl_group_failed": 0, "nccl_group_left": 0, "shard_learned": 2}
    return {"codes": [0, 0, 0, 0], "faults": [], "swaps": 60, "struck": False, **counts} | changed


@pytest.mark.parametrize(
    ("changed", "strike", "told"),
    [
        ({}, "", []),
        ({"codes": [0, 1, 0, 0]}, "", ["node 1 ended with 1"]),
        ({"nccl_group_formed": 0}, "", ["no nccl_group_formed"]),
        ({"nccl_group_failed": 3}, "", ["3 nccl_group_failed"]),
        ({"nccl_group_failed": 3, "struck": True}, "finetune_1", []),
        ({}, "finetune_1", ["finetune_1 was not struck: the run ended before"]),
        ({"swaps": 0, "faults": ["event=swap_failed"]}, "", ["event=swap_failed", "no update went live"]),
    ],
)
def test_what_a_world_on_one_card_did_not_show_is_told(changed: dict[str, Any], strike: str, told: list[str]) -> None:
    assert world.problems(facts(**changed), strike) == told


def test_events_of_all_roles_are_counted(tmp_path: Path) -> None:
    for job in ("actor_llm_0", "actor_llm_part_0"):
        (tmp_path / job).mkdir()
        (tmp_path / job / "log.txt").write_text("I event=shard_learned a=1\n")
    found = world.facts(tmp_path)
    assert (found["shard_learned"], found["nccl_group_formed"]) == (2, 0)


@pytest.mark.parametrize(("steps", "killed"), [(world.STRIKE_STEP - 1, []), (world.STRIKE_STEP, [71])])
def test_rank_of_a_job_is_killed_after_its_steps(
    steps: int, killed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "finetune.jsonl").write_text('{"step": 0}\n' * steps)
    found = {"finetune_0": SimpleNamespace(pid=70), "finetune_1.rank1": SimpleNamespace(pid=71)}
    monkeypatch.setattr(world, "read_statuses", lambda run_dir: found)
    monkeypatch.setattr(world, "LOOK_S", 0.0)
    struck: list[int] = []
    monkeypatch.setattr(world.os, "kill", lambda pid, _: struck.append(pid))
    looks = iter([False, True])
    assert world.kill(tmp_path, "finetune_1", lambda: next(looks)) is bool(killed)
    assert struck == killed


def test_kernels_are_summed_by_kind_and_the_longest_comes_first() -> None:
    times = [
        ("void cutlass::Kernel2<gemm>", 2.0),
        ("nvjet_sm90_tst", 3.0),
        ("FlashAttnFwdSm90", 1.0),
        ("Memcpy HtoD (Pinned -> Device)", 0.5),
        ("void at::native::vectorized_elementwise_kernel", 4.0),
    ]
    expected = {"matrix products": 5.0, step.OTHERS: 4.0, "attention": 1.0, "copies": 0.5}
    assert list(step.by_kind(times).items()) == list(expected.items())
