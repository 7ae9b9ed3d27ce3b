"""A teacher's average of versions against a float64 oracle: skipped versions, narrow types, restarts, files."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.average import Average
from pipelinerl.weights.protocol import Averaging
from tests.says import says
from tests.waiting import wait_until

SHAPES = {"a": (3, 5), "b": (7,)}


def version(number: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}


def staged(weights: Mapping[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    layout = Layout(tuple(spec_of(*item) for item in weights.items()))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, buffer).fill(weights.items())
    return layout, buffer


def take(average: Average, number: int, weights: Mapping[str, torch.Tensor], sender: str = "s") -> dict[str, Any]:
    """The average after a version, in the version's type."""
    layout, buffer = staged(weights)
    before = buffer.clone()
    found = average.take(f"{sender}/{number}", layout, None, buffer)
    assert torch.equal(buffer, before), "other servers pull these bytes"
    return {name: tensor.clone() for name, tensor in layout.views(found)}


def make(
    folder: Path, decay: float = 0.9, every: int = 1000, kept: int = 2, worker: int = 0, workers: int = 1
) -> Average:
    return Average(
        Averaging(decay, str(folder), every, kept),
        worker=worker,
        workers=workers,
        allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
    )


def oracle(decay: float, numbers: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """float64 average over the versions that were taken."""
    values = {name: tensor.double().numpy() for name, tensor in version(numbers[0], dtype).items()}
    for before, number in pairwise(numbers):
        share = decay ** (number - before)
        for name, tensor in version(number, dtype).items():
            values[name] = share * values[name] + (1 - share) * tensor.double().numpy()
    return values


def assert_is(found: Mapping[str, torch.Tensor], expected: Mapping[str, np.ndarray], atol: float = 1e-6) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].double().numpy(), values, atol=atol)


def files(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in folder.glob("*.float32"))


TAKEN = (0, 1, 2, 5, 6, 13, 14)


def test_average_of_versions_of_which_some_were_skipped_equals_the_oracle(tmp_path: Path) -> None:
    average = make(tmp_path)
    for last, number in enumerate(TAKEN):
        found = take(average, number, version(number))
        assert_is(found, oracle(0.9, TAKEN[: last + 1]))
    assert_is(take(average, TAKEN[-1], version(99)), oracle(0.9, TAKEN))  # taken again, it changes nothing


def test_average_of_narrow_versions_is_kept_in_float32(tmp_path: Path) -> None:
    """Increments of 1 − β are far below bfloat16's steps, 2⁻⁸ of a value: rounded each time, nothing would move."""
    average, decay, steps = make(tmp_path, decay=0.999), 0.999, 400
    first, later = ({"w": torch.full((8,), value, dtype=torch.bfloat16)} for value in (1.0, 1.125))
    found = take(average, 0, first)
    for number in range(1, steps + 1):
        found = take(average, number, later)
    expected = decay**steps * 1.0 + (1 - decay**steps) * 1.125
    assert found["w"].dtype == torch.bfloat16
    assert found["w"].tolist() == torch.full((8,), expected).bfloat16().tolist()
    assert found["w"][0] > 1.0
    wide = make(tmp_path / "wide")
    for last, number in enumerate(TAKEN):
        rounded = take(wide, number, version(number, torch.bfloat16))
        expected_b = oracle(0.9, TAKEN[: last + 1], torch.bfloat16)
        assert_is(rounded, expected_b, atol=2**-8 * max(np.abs(values).max() for values in expected_b.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_that_keeps_nothing_is_the_version(tmp_path: Path, dtype: torch.dtype) -> None:
    average = make(tmp_path, decay=0.0)
    for number in (0, 1, 4):
        found = take(average, number, version(number, dtype))
        assert all(torch.equal(found[name], tensor) for name, tensor in version(number, dtype).items())


def test_restarted_server_goes_on_from_its_newest_file(tmp_path: Path) -> None:
    average = make(tmp_path, every=4, kept=2)
    for number in (0, 1, 2, 3, 5, 6, 8, 9):  # files at 0, 5 and 8
        take(average, number, version(number))
    assert files(tmp_path) == [5, 8]
    assert_is(take(make(tmp_path, every=4), 11, version(11)), oracle(0.9, (0, 1, 2, 3, 5, 6, 8, 11)))


def test_trainer_that_went_back_is_followed_from_the_file_before(tmp_path: Path) -> None:
    average = make(tmp_path, every=4, kept=3)
    for number in (0, 3, 4, 7, 8, 9):
        take(average, number, version(number))
    assert files(tmp_path) == [0, 4, 8]
    back = take(average, 6, version(6), sender="again")
    assert_is(back, oracle(0.9, (0, 3, 4, 6)))
    assert files(tmp_path) == [0, 4], "what lay ahead is of steps that are made again"
    assert_is(take(average, 7, version(7), sender="again"), oracle(0.9, (0, 3, 4, 6, 7)))


def test_steps_that_were_undone_do_not_count_though_the_trainer_is_past_them_again(tmp_path: Path) -> None:
    average = make(tmp_path, every=4)
    for number in (0, 4, 6):
        take(average, number, version(number))
    assert_is(take(average, 7, version(7), sender="again"), oracle(0.9, (0, 4, 7)))


def test_trainer_that_started_again_where_the_average_is_goes_on_with_it(tmp_path: Path) -> None:
    average = make(tmp_path)
    for number in (0, 1, 2):
        take(average, number, version(number))
    for number in (2, 3):
        found = take(average, number, version(number), sender="again")
    assert_is(found, oracle(0.9, (0, 1, 2, 3)))


def test_average_without_a_file_begins_again_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    take(make(tmp_path), 0, version(0))
    wait_until(lambda: files(tmp_path) == [0])
    (file,) = tmp_path.glob("*.float32")
    file.write_bytes(file.read_bytes()[:-4])  # of another size than its name says
    found = take(make(tmp_path), 3, version(3))
    assert_is(found, oracle(0.9, (3,)))
    assert "event=average_begins version=3" in caplog.text


def test_file_that_another_worker_has_not_written_does_not_count(tmp_path: Path) -> None:
    """A server that was killed between two workers' files goes on from the version that both have."""
    for worker, numbers in ((0, (0, 3, 4)), (1, (0, 3))):
        average = make(tmp_path, every=2, kept=3, worker=worker, workers=2)
        for number in numbers:
            take(average, number, version(number))
        wait_until(lambda worker=worker, last=numbers[-1]: bool([*tmp_path.glob(f"{last}-{worker}-*")]))
    for worker in (0, 1):
        found = take(make(tmp_path, every=2, kept=3, worker=worker, workers=2), 5, version(5))
        assert_is(found, oracle(0.9, (0, 3, 5)))


def test_blend_that_fails_leaves_no_average_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a blend is no average: the next version goes on from the file."""
    average = make(tmp_path)
    take(average, 0, version(0))
    take(average, 1, version(1))
    with monkeypatch.context() as broken:
        broken.setattr(average, "_served", torch.zeros(1))
        with pytest.raises(RuntimeError):
            take(average, 2, version(2))
    assert_is(take(average, 3, version(3)), oracle(0.9, (0, 3)))


def test_versions_of_several_types_are_refused(tmp_path: Path) -> None:
    mixed = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(WeightUpdateError, match=says("bfloat16", "float32", "teachers", "ema")):
        take(make(tmp_path), 0, mixed)
