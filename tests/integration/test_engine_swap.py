"""The swap of weights inside vLLM's engine core, on a core that only records: order, waiting, failure, wake-up.

`test_server.py` swaps in a real engine.
"""

import queue
from concurrent.futures import Future
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported


class Core:
    """``is_idle``: no step is under way when the command comes."""

    def __init__(self, is_idle: bool):
        self.calls: list[Any] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.idle: Future[None] | None = None if is_idle else Future()
        self.error: Exception | None = None

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.calls.append(("pause", mode, clear_cache))
        return self.idle

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[None]:
        self.calls.append((method, *args))
        if self.error is not None:
            raise self.error
        return [None]

    def set_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    def resume_scheduler(self) -> None:
        self.calls.append(("resume",))


def swapped(core: Core) -> Future[tuple[float, float, str]]:
    from pipelinerl.inference.scheduler import swap_weights

    return swap_weights(core, 7)


PAUSE, SWAP, LABEL, RESUME = ("pause", "keep", False), ("swap_weights", 7), ("version", "7"), ("resume",)


def test_idle_engine_swaps_labels_and_goes_on_at_once() -> None:
    core = Core(is_idle=True)
    pause_ms, swap_ms, failure = swapped(core).result(timeout=0)
    assert core.calls == [PAUSE, SWAP, LABEL, RESUME]
    assert pause_ms >= swap_ms >= 0
    assert failure == ""


def test_weights_of_a_step_under_way_are_not_touched() -> None:
    from vllm.v1.engine import EngineCoreRequestType

    core = Core(is_idle=False)
    outcome = swapped(core)
    assert core.calls == [PAUSE]
    assert not outcome.done()
    core.idle.set_result(None)
    assert core.calls == [PAUSE, SWAP, LABEL, RESUME]
    assert outcome.result(timeout=0)[2] == ""
    assert core.input_queue.get_nowait()[0] is EngineCoreRequestType.WAKEUP, "an idle loop waits for a message"


@pytest.mark.parametrize("is_idle", [True, False])
def test_engine_stays_paused_with_its_old_label_after_a_failed_swap(is_idle: bool) -> None:
    core = Core(is_idle)
    core.error = ValueError("no such tensor: w")
    outcome = swapped(core)
    if core.idle is not None:
        core.idle.set_result(None)
    assert core.calls == [PAUSE, SWAP]
    assert outcome.result(timeout=0)[2] == "ValueError: no such tensor: w"


def test_a_pause_that_fails_swaps_nothing() -> None:
    core = Core(is_idle=False)
    outcome = swapped(core)
    core.idle.set_exception(RuntimeError("cache"))
    assert core.calls == [PAUSE]
    assert outcome.result(timeout=0)[2] == "RuntimeError: cache"


def test_engine_core_has_what_the_swap_calls() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from pipelinerl.inference.scheduler import swap_weights

    assert EngineCoreProc.swap_weights is swap_weights
    for name in ("pause_scheduler", "collective_rpc", "set_weight_version", "resume_scheduler"):
        assert callable(getattr(EngineCore, name))


def test_version_that_comes_again_has_a_new_salt_and_one_before_the_restart_keeps_its_own() -> None:
    """The trainer restarts at 12, and again at 11. Conversations may name any version that came."""
    from pipelinerl.inference.scheduler import AnswerScheduler, salt_of

    scheduler = AnswerScheduler.__new__(AnswerScheduler)
    scheduler._version, scheduler._lives, scheduler.running = "default", [], []
    live = []
    for version in ("0", "10", "13", "12", "14", "11", "12"):
        scheduler.set_weight_version(version)
        live.append(salt_of(version, scheduler._lives))
    assert live == ["0", "10", "13", "12, 1", "14, 1", "11, 2", "12, 2"]
    assert [salt_of(version, scheduler._lives) for version in ("10", "13", "14")] == ["10", "13, 1", "14, 1"]
    assert salt_of("default", scheduler._lives) == "default"
    assert len(scheduler._lives) == 3
