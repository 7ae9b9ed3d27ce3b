"""The digest of a base: equal for copies, another one for any other tensor, empty where there is nothing to read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipelinerl.weights.base_files import base_digest

SAMPLE = 4096
WEIGHTS = {"a.weight": torch.arange(3 * SAMPLE, dtype=torch.float32), "b.weight": torch.ones(2, 3)}


def folder_of(path: Path, weights: dict[str, torch.Tensor]) -> str:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    return str(path)


def test_digest_is_that_of_the_tensors_however_they_are_divided_into_files(tmp_path: Path) -> None:
    whole = base_digest(folder_of(tmp_path / "whole", WEIGHTS))
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, tensor in WEIGHTS.items():
        save_file({name: tensor}, parts / f"{name}.safetensors")
    names = ", ".join(f'"{name}": "{name}.safetensors"' for name in WEIGHTS)
    (parts / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    assert len(whole) == 64
    assert base_digest(str(parts)) == whole
    (parts / "b.weight.safetensors").unlink()
    assert base_digest(str(parts)) == ""


@pytest.mark.parametrize("change", ["first", "last", "name", "dtype", "shape"])
def test_digest_differs_with_either_end_of_a_tensor_its_name_dtype_and_shape(tmp_path: Path, change: str) -> None:
    changed = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    match change:
        case "first" | "last":
            changed["a.weight"][0 if change == "first" else -1] += 1
        case "name":
            changed["c.weight"] = changed.pop("b.weight")
        case "dtype":
            changed["b.weight"] = changed["b.weight"].view(torch.int32)
        case "shape":
            changed["b.weight"] = changed["b.weight"].view(3, 2)
    assert base_digest(folder_of(tmp_path / "new", changed)) != base_digest(folder_of(tmp_path / "old", WEIGHTS))


def test_model_without_files_here_has_no_digest(tmp_path: Path) -> None:
    assert base_digest(str(tmp_path)) == base_digest("nobody/nothing") == ""
