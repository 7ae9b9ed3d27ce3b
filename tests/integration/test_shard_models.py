"""Shards of real vLLM models, learned without an engine: just the worker's parameters, which a swap puts in place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import FAMILIES, PUBLISHED, make_family, save_published

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 480
BUCKET_BYTES = 8 << 20


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        make_family(name).save_pretrained(folder / name)
    for name in PUBLISHED:
        save_published(folder / name, name, layers=2)
    output, models = folder / "shards.jsonl", [str(folder / name) for name in (*FAMILIES, *PUBLISHED)]
    subprocess.run(
        [sys.executable, "-m", "tests.recorded_loaders", str(output), *models],
        check=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"},
    )
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", FAMILIES)
def test_swap_puts_a_shard_of_just_their_size_where_vllm_loads_it(name: str, shards: list[dict[str, Any]]) -> None:
    workers = [shard for shard in shards if shard["model"] == name]
    kinds = ["tp", "ep"] if "num_experts" in FAMILIES[name] else ["tp"]
    assert [(worker["kind"], worker["rank"]) for worker in workers] == [(kind, n) for kind in kinds for n in range(4)]
    for worker in workers:
        assert (worker["whole"], worker["unlearned"]) == ([], [])
        assert (worker["differing"], worker["compared"], worker["moved"], worker["packed"]) == ([], [], [], [])
        assert worker["shard"] == worker["parameters"] < 0.3 * worker["of"]


@pytest.mark.parametrize("name", FAMILIES)
def test_cpu_worker_multiplies_with_the_sent_weights_as_if_vllm_had_loaded_them(
    name: str, shards: list[dict[str, Any]]
) -> None:
    """Its large layers and experts are packed. The second of two versions, too."""
    workers = [shard for shard in shards if shard["model"] == name and "unlike" in shard]
    assert len(workers) == (2 if "num_experts" in FAMILIES[name] else 1)
    for worker in workers:
        assert worker["unlike"] == []
        assert worker["checks"] == [[worker["shard"], True, [], []]] * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_worker_stages_its_shard_of_an_adapter_and_has_it_where_vllm_loads_it(
    name: str, shards: list[dict[str, Any]]
) -> None:
    """Per layer q, k, v, o and, without experts, gate, up, down: A and B each. The second of two adapters, too."""
    found = [shard["adapter"] for shard in shards if shard["model"] == name and "adapter" in shard]
    assert len(found) == (2 if "num_experts" in FAMILIES[name] else 1)
    for adapter in found:
        filled = 2 * 2 * (4 if "num_experts" in FAMILIES[name] else 7)
        assert (adapter["filled"], adapter["differing"]) == (filled, [])
        assert [check[1:] for check in adapter["checks"]] == [[True, [], []]] * 2
        assert {check[0] for check in adapter["checks"]} == {adapter["checks"][0][0]}
        assert adapter["checks"][0][0] < 0.75 * adapter["of"]
        assert "qkv_proj.lora_a_stacked" in adapter["moved"][0], "a place that the model no longer reads is found"
        assert "z_proj" in adapter["refused"]
        assert "finetune.lora.send=merged" in adapter["refused"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shard_of_a_published_model_is_what_its_worker_holds(name: str, shards: list[dict[str, Any]]) -> None:
    workers = [shard for shard in shards if shard["model"] == name]
    kinds = ["tp", "ep"] if "experts" in str(PUBLISHED[name]) else ["tp"]
    assert [(worker["kind"], worker["rank"]) for worker in workers] == [(kind, n) for kind in kinds for n in range(2)]
    for worker in workers:
        assert (worker["whole"], worker["unlearned"]) == ([], [])
        assert abs(worker["shard"] - worker["parameters"]) <= BUCKET_BYTES
        assert worker["shard"] < 0.6 * worker["of"]
