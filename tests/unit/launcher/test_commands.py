"""Command lines and environments of roles, with worlds made by hand."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipelinerl.launcher.commands import inherited_environment, printable, role_command, start_script
from pipelinerl.world import Job, Node, WorldMap

RUN = Path("/runs/a b")


def world(*jobs: Job, accelerator: str = "cpu", nodes: int = 1) -> WorldMap:
    return WorldMap(
        accelerator=accelerator,  # type: ignore[arg-type]
        nodes=tuple(Node(rank=i, hostname=f"host{i}", devices=2) for i in range(nodes)),
        jobs=jobs,
        master_port=29600,
        weight_port=29700,
        weight_ports=2,
    )


def test_role_command_single_trainer_gets_its_rank_by_environment() -> None:
    job = Job(name="finetune_0", kind="finetune", cores=(2, 3))
    command = role_command(job, world(job), RUN, {})
    assert command.argv == (
        sys.executable,
        "-m",
        "pipelinerl.finetune",
        "--run-dir",
        "/runs/a b",
        "--job",
        "finetune_0",
    )
    assert command.cores == (2, 3)
    expected = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29600",
        "OMP_NUM_THREADS": "2",
    }
    assert expected.items() <= dict(command.env).items()


def test_role_command_several_trainer_ranks_have_one_parent() -> None:
    first = Job(name="finetune_0", kind="finetune", hostname="host0", num_ranks=2)
    second = Job(
        name="finetune_1", kind="finetune", replica_idx=1, node_rank=1, hostname="host1", num_ranks=4, first_rank=2
    )
    command = role_command(second, world(first, second, nodes=2), RUN, {})
    assert command.argv[:9] == (
        sys.executable,
        "-m",
        "pipelinerl.finetune.ranks",
        "--ranks=4",
        "--first-rank=2",
        "--world-size=6",
        "--master-addr=host0",
        "--master-port=29600",
        "--",
    )
    assert command.argv[9:] == ("-m", "pipelinerl.finetune", "--run-dir", "/runs/a b", "--job", "finetune_1")
    assert "RANK" not in command.env


@pytest.mark.parametrize(("gpus", "visible"), [((0, 1), "4,5"), ((3,), "7"), ((), "")])
def test_role_command_gpus_count_within_the_launchers_own(gpus: tuple[int, ...], visible: str) -> None:
    job = Job(name="actor_llm_0", kind="actor_llm", gpus=gpus)
    trainer = Job(name="finetune_0", kind="finetune")
    command = role_command(job, world(job, trainer, accelerator="cuda"), RUN, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert command.env["CUDA_VISIBLE_DEVICES"] == visible


def test_trainer_on_its_own_gpus_takes_segments_that_grow_unless_the_user_says_otherwise() -> None:
    job = Job(name="finetune_0", kind="finetune", gpus=(0,))
    alone = world(job, accelerator="cuda")
    assert role_command(job, alone, RUN, {}).env["PYTORCH_ALLOC_CONF"].endswith(",expandable_segments:True")
    assert "PYTORCH_ALLOC_CONF" not in role_command(job, alone, RUN, {"PYTORCH_ALLOC_CONF": "x"}).env
    shared = msgspec.structs.replace(alone, share_devices=True)
    assert "expandable_segments" not in role_command(job, shared, RUN, {}).env["PYTORCH_ALLOC_CONF"]


def test_host_memory_is_page_locked_by_several_threads_where_there_are_gpus() -> None:
    server = Job(name="actor_llm_0", kind="actor_llm", gpus=(0,))
    on_gpu = role_command(server, world(server, accelerator="cuda"), RUN, {})
    assert "pinned_num_register_threads" in on_gpu.env["PYTORCH_ALLOC_CONF"]
    assert "PYTORCH_ALLOC_CONF" not in role_command(server, world(server, accelerator="cpu"), RUN, {}).env


def test_both_ends_of_a_weight_transfer_between_nodes_use_the_nodes_interface() -> None:
    server = Job(name="actor_llm_0", kind="actor_llm", hostname="127.0.0.1", gpus=(0,))
    trainer = Job(name="finetune_0", kind="finetune", hostname="127.0.0.1", node_rank=1, gpus=(0,))
    spread = world(server, trainer, accelerator="cuda", nodes=2)
    for job in (server, trainer):
        assert role_command(job, spread, RUN, {}).env["NCCL_SOCKET_IFNAME"] == "lo"
        assert "NCCL_SOCKET_IFNAME" not in role_command(job, spread, RUN, {"NCCL_SOCKET_IFNAME": "ib0"}).env


def test_inherited_environment_leaves_out_what_is_the_launchers_own() -> None:
    env = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "RANK": "1", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}
    assert inherited_environment(env) == {"PATH": "/bin"}


def test_start_script_is_shell_and_has_no_secret() -> None:
    job = Job(name="actor_0", kind="actor", cores=(1,))
    trainer = Job(name="finetune_0", kind="finetune")
    env = {
        "PIPELINERL_SECRET": "very-secret",
        "PIPELINERL_REDIS_PASSWORD": "also-secret",
        "WANDB_API_KEY": "key-secret",
    }
    command = role_command(job, world(job, trainer), RUN, env)
    script = start_script(command, Path("/work dir"))
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert "secret" not in script.replace("per-run secret", "").replace("Secrets", "")
    assert "cd '/work dir'" in script
    assert "taskset -c 1 " in script
    assert script.rstrip().endswith("-m pipelinerl.actor --run-dir '/runs/a b' --job actor_0")
    assert "'/runs/a b'" in printable(command)
