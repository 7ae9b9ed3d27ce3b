"""The table of the start-up benchmark, from samples and metrics written by hand."""

from benchmarks.startup import Sample, by_package, cpu_of_phases, part_of_role, step_ms


def test_cpu_of_phases_is_the_growth_between_their_ends() -> None:
    samples: list[Sample] = [
        (0.0, {}),
        (0.9, {"launcher": 0.5}),
        (2.9, {"launcher": 0.6, "server": 2.0}),
        (4.0, {"server": 3.5}),
    ]
    table = cpu_of_phases({"checks": 1.0, "start": 2.0, "training": 1.0, "ready": {"server": 2.5}}, samples)
    assert table == {"checks": {"launcher": 0.5}, "start": {"server": 2.0}, "training": {"server": 1.5}}


def test_step_ms_leaves_to_other_what_no_cause_explains() -> None:
    point = {"wait_s": 0.01, "step_s": 0.05, "push_wait_s": 0.02}
    found = step_ms([{"time": 10.0, **point}, {"time": 10.1, **point}, {"time": 10.3, **point}])
    assert found["whole"] == {"mean": 150.0, "median": 150.0}
    assert found["other"] == {"mean": 70.0, "median": 70.0}
    assert found["step"]["mean"] == 50.0


def test_part_of_role_tells_processes_of_one_role_apart() -> None:
    assert part_of_role(["VLLM::EngineCore"]) == ".engine"
    assert part_of_role(["python", "-c", "from multiprocessing.spawn import spawn_main"]) == ".worker"
    assert part_of_role(["python", "-m", "pipelinerl.actor"]) == ""


def test_by_package_adds_own_seconds_and_knows_the_standard_library() -> None:
    printed = """import time: self [us] | cumulative | imported package
import time:       250 |        250 |   json.decoder
import time:     30000 |      30250 |     torch._C
import time:   1000000 |    1030250 | torch
a warning
"""
    assert by_package(printed) == {"python": 0.00025, "torch": 1.03}
