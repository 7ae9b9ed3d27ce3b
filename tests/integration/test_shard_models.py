"""Shards of real vLLM models at tensor-parallel size 4, learned without an engine: exactly the worker's parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import FAMILIES, make_family

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        make_family(name).save_pretrained(folder / name)
    output, models = folder / "shards.jsonl", [str(folder / name) for name in FAMILIES]
    subprocess.run(
        [sys.executable, "-m", "tests.recorded_loaders", str(output), *models],
        check=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"},
    )
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("name", FAMILIES)
def test_loaders_find_their_parameters_in_a_shard_of_just_their_size(name: str, shards: list[dict[str, Any]]) -> None:
    workers = [shard for shard in shards if shard["model"] == name]
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    for worker in workers:
        assert (worker["whole"], worker["unlearned"], worker["differing"]) == ([], [], [])
        assert worker["shard"] == worker["parameters"] < 0.3 * worker["of"]
