"""The public surface of `pipelinerl.world`: names, fields, and the import rule."""

import subprocess
import sys

import msgspec

import pipelinerl.world as world
from pipelinerl.world import Job, WorldMap

FORBIDDEN = ("torch", "vllm", "deepspeed", "transformers", "accelerate")


def test_public_names_stay():
    assert set(world.__all__) == {
        "Cluster",
        "Job",
        "Node",
        "Span",
        "WorldMap",
        "build_world",
        "check_local_devices",
        "interface_of",
        "map_world",
        "read_cluster",
        "visible_devices",
    }


def test_fields_of_a_job_stay():
    assert [field.name for field in msgspec.structs.fields(Job)] == [
        "name",
        "kind",
        "replica_idx",
        "node_rank",
        "hostname",
        "port",
        "gpus",
        "cores",
        "url",
        "num_ranks",
        "first_rank",
        "serves",
        "span",
        "environment_key",
        "environment_index",
    ]


def test_lookups_of_the_map_stay():
    for name in ("job", "get", "on_node", "servers_of", "load", "save", "digest", "job_dicts"):
        assert callable(getattr(WorldMap, name))
    for name in ("get_actor_urls", "get_preprocessor_urls", "get_all_jobs"):
        assert callable(getattr(WorldMap, name))
    for name in ("master_addr", "trainer_world_size", "bind_host", "weight_backend", "total_finetune_gpus"):
        assert isinstance(getattr(WorldMap, name), property)


def test_a_job_is_built_from_the_dictionary_a_domain_sees():
    job = Job(**{"name": "verifier_0", "kind": "environment", "hostname": "127.0.0.1", "port": 8123})
    assert (job.kind, job.hostname, job.port, job.gpus) == ("environment", "127.0.0.1", 8123, ())


def test_world_and_planner_import_nothing_heavy():
    code = (
        "import sys; import pipelinerl.world, pipelinerl.plan.world_table, pipelinerl.plan; "
        f"print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
