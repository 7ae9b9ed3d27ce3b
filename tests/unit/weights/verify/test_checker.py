"""The weight checker against servers of a few lines: calibration, faults, what is pushed again and what is given up."""

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from pipelinerl.errors import WeightUpdateError
from pipelinerl.records import ProbeMissed
from pipelinerl.weights.verify.checker import Expected, WeightChecker
from pipelinerl.weights.verify.probe import ProbeText, first_tokens
from pipelinerl.world import Job
from tests.waiting import wait_until as wait_for

TEXT = ProbeText(token_ids=np.arange(200, dtype=np.int32).reshape(4, 50))
TRAINER = -np.linspace(0.1, 4.0, 4 * 49).astype(np.float32)
NOISE = 0.02


class Server:
    """Answers scores as the trainer's plus noise, and checks as told."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.label, self.moved, self.checksum, self.differing = "default", 0.0, "right", []
        self.unlearned: list[str] = []
        self.base = ""
        self.is_checked, self.scored, self.answers, self.garbage = True, 0, True, b""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                is_check = self.path == "/check_weights"
                answer = json.dumps(server.check(body["version"]) if is_check else server.score(body)).encode()
                answer = server.garbage or answer
                self.send_response(200 if server.answers else 503)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def check(self, version: int) -> dict[str, Any]:
        keys = ("is_checked", "checksum", "differing", "unlearned", "base")
        return {key: getattr(self, key) for key in keys}

    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        self.scored += 1
        tokens = body["token_ids"]
        label = [{"version": self.label, "start": 0, "end": 1}]
        if len(tokens) == 1:
            count = body["sampling_params"]["max_tokens"]
            return {"choices": [{"token_ids": list(range(count)), "weight_versions": label}]}
        row = tokens[0] // 50
        values = TRAINER[49 * row : 49 * row + 49] + self.moved + NOISE * self.rng.standard_normal(49)
        rows = [None, *({str(token): {"logprob": v}} for token, v in zip(tokens[1:], values.tolist(), strict=True))]
        return {"choices": [{"token_ids": [0], "weight_versions": label}], "prompt_logprobs": rows}


class Harness:
    def __init__(self, tolerance: float = 0.2, timeout_s: float = 20.0, base: str | None = None) -> None:
        self.server = Server()
        self.misses: list[ProbeMissed] = []
        self.exceeded: list[Any] = []
        self.gate: list[int] = []
        """What the server was verified with, whenever that changed."""
        job = Job(name="s0", kind="actor_llm", url=f"http://127.0.0.1:{self.server.http.server_port}")
        self.checker = WeightChecker(
            secret="x",
            tolerance=tolerance,
            timeout_s=timeout_s,
            report=self.misses.append,
            passed=self._pass,
            base=base,
            exceeded=self.exceeded.append,
        )
        self.checker.add_server(job)

    def _pass(self) -> None:
        self.gate.append(self.checker.verified["s0"])

    def calibrate(self) -> None:
        self.checker.begin(TEXT.with_scores(TRAINER))
        wait_for(lambda: self.checker.admits("s0", "default"))

    def push(self, version: int, *, scored: bool = True) -> None:
        """The server took the version, and its probe has ended."""
        self.server.label = str(version)
        checksum: Future[str] = Future()
        checksum.set_result("right")
        scores: Future[np.ndarray] = Future()
        scores.set_result(TRAINER)
        self.checker.expect(version, Expected(checksum, scores if scored else None))
        self.checker.start_check("s0", version)
        wait_for(lambda: not self.state.is_busy)

    @property
    def state(self) -> Any:
        return self.checker._states["s0"]

    def close(self) -> None:
        self.checker.close()
        self.server.http.shutdown()
        self.server.http.server_close()


def test_noise_is_the_mean_difference_of_the_newest_version_that_passed(harness: Harness) -> None:
    """Normal noise of deviation σ has the mean size √(2/π) σ; 196 tokens know it within 5.4 %, so 4 deviations."""
    assert harness.checker.noise is None
    harness.calibrate()
    assert harness.checker.noise == pytest.approx((2 / np.pi) ** 0.5 * NOISE, rel=0.22)
    before = harness.checker.noise
    harness.push(0)
    assert harness.checker.noise != before, "drawn anew"
    known = harness.checker.noise
    harness.server.moved = 1.0
    harness.push(1)
    assert (len(harness.misses), harness.checker.noise) == (1, known), "a missed version is no measure"


@pytest.fixture
def harness() -> Iterator[Harness]:
    with contextlib.closing(Harness()) as harness:
        yield harness


def test_server_of_another_base_is_never_verified_where_an_adapter_alone_is_sent() -> None:
    with contextlib.closing(Harness(base="1234")) as harness:
        harness.calibrate()
        harness.server.base = "1234"
        harness.push(0)
        assert (harness.misses, harness.gate) == ([], [0])
        harness.server.base = "5678"
        harness.push(1)
        harness.push(1)
        assert harness.gate == [0]
    assert [(miss.version, miss.is_final) for miss in harness.misses] == [(1, False), (1, True)]
    assert "its base is another one: digest '5678' of its files instead of '1234'" in harness.misses[0].reason


def test_server_whose_base_computes_otherwise_is_not_verified_by_the_adapters_bytes() -> None:
    with contextlib.closing(Harness(base="", tolerance=1e-3)) as harness:
        harness.server.moved = 0.5
        harness.calibrate()
        harness.push(0)
        harness.push(0)
        assert harness.gate == []
    assert [miss.is_final for miss in harness.misses] == [False, True]


def test_text_is_sampled_by_the_first_server_that_answers(harness: Harness) -> None:
    assert harness.checker.sample((4, 50), 1000, 0, timeout_s=20) is None
    assert not harness.checker.admits("s0", "default")
    text = harness.checker.sample((4, 50), 1000, 0, timeout_s=20)
    assert text is not None
    assert text.token_ids.shape == (4, 50)
    assert text.token_ids[0, 1:].tolist() == list(range(49))


def test_server_that_is_slow_goes_on_with_its_first_text_and_is_asked_once() -> None:
    """It takes longer than a server in service may take for its probe, and longer than each call waits."""
    with contextlib.closing(Harness(timeout_s=0.05)) as harness:
        harness.checker.admits("s0", "default")
        is_computed, answer = threading.Event(), harness.server.score

        def slowly(body: dict[str, Any]) -> dict[str, Any]:
            assert is_computed.wait(20)
            return answer(body)

        harness.server.score = slowly  # type: ignore[method-assign]
        for _ in range(3):
            assert harness.checker.sample((4, 50), 1000, 0, timeout_s=0.1) is None
        is_computed.set()
        text = harness.checker.sample((4, 50), 1000, 0, timeout_s=20)
        assert text is not None
        assert harness.server.scored == 4, "each of its sequences"


def test_sequences_of_the_text_are_sampled_at_once(harness: Harness) -> None:
    harness.checker.admits("s0", "default")
    all_here, answer = threading.Barrier(4, timeout=20), harness.server.score

    def together(body: dict[str, Any]) -> dict[str, Any]:
        all_here.wait()
        return answer(body)

    harness.server.score = together  # type: ignore[method-assign]
    text = harness.checker.sample((4, 50), 1000, 0, timeout_s=20)
    assert text is not None
    assert text.token_ids[:, 0].tolist() == first_tokens(1000, 4, 0)


def test_server_is_admitted_when_it_is_calibrated_and_keeps_its_place_when_it_is_right(harness: Harness) -> None:
    harness.calibrate()
    assert harness.state.baseline.noise == pytest.approx(NOISE, rel=0.3)
    for version in range(20):
        harness.push(version)
    assert harness.misses == []
    assert harness.state.passed == 19
    assert harness.state.is_scored


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"differing": ["qkv_proj", "o_proj"]}, "qkv_proj and 1 more are not the bytes that it received"),
        ({"checksum": "wrong"}, "received other bytes: checksum wrong instead of right"),
        ({"moved": 0.5}, r"are not those of the weights it was sent: 0\.\d+ nats, 0\.0\d+ are allowed"),
    ],
)
def test_first_miss_is_pushed_again_and_the_second_is_final(harness: Harness, fault: Any, reason: str) -> None:
    harness.calibrate()
    harness.push(0)
    harness.push(1)
    vars(harness.server).update(fault)
    harness.push(2)
    harness.push(2)
    assert [(m.version, m.since, m.is_final) for m in harness.misses] == [(2, 2, False), (2, 2, True)]
    assert all(re.search(reason, miss.reason) for miss in harness.misses)
    harness.push(3)  # it was on its way
    assert len(harness.misses) == 2
    assert not harness.checker.admits("s0", "2")
    assert not harness.checker.admits("s0", "default")


def test_server_that_is_right_after_the_second_push_stays(harness: Harness) -> None:
    harness.calibrate()
    harness.push(0)
    for version in (1, 3):
        harness.server.differing = ["embed"]
        harness.push(version)
        harness.server.differing = []
        assert harness.checker.admits("s0", str(version))
        harness.push(version)
    assert [miss.is_final for miss in harness.misses] == [False, False]


def test_digest_alone_decides_where_the_trainer_has_no_scores(harness: Harness) -> None:
    harness.calibrate()
    scored = harness.server.scored
    harness.push(0, scored=False)
    assert harness.server.scored == scored
    assert harness.state.passed == 0
    wait_for(lambda: harness.checker.wants_scores(is_idle=False))  # it has not passed its log-probabilities yet
    harness.server.unlearned = ["experts"]
    harness.push(1, scored=False)
    assert harness.state.passed == 0


def test_version_is_verified_by_its_bytes_before_its_log_probabilities_are_asked_for(harness: Harness) -> None:
    harness.calibrate()
    answer, seen = harness.server.score, []

    def score(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(harness.checker.verified["s0"])
        return answer(body)

    harness.server.score = score  # type: ignore[method-assign]
    harness.push(5)
    assert seen == [5] * 4
    harness.server.unlearned = ["experts"]
    harness.push(6)
    assert seen[4:] == [5] * 4  # here they decide
    harness.push(7, scored=False)  # nothing more can be decided
    assert harness.gate == [5, 6, 7]


def test_version_whose_bytes_are_gone_is_verified_by_the_next_one(harness: Harness) -> None:
    harness.calibrate()
    harness.push(0)
    harness.server.is_checked = False
    harness.push(1, scored=False)
    assert harness.checker.verified == {"s0": 0}
    harness.server.is_checked = True
    harness.push(2, scored=False)
    assert harness.checker.verified == {"s0": 2}


def test_server_that_missed_or_left_is_unverified_until_its_next_probe(harness: Harness) -> None:
    harness.calibrate()
    harness.push(0)
    harness.server.differing = ["embed"]
    harness.push(1)
    assert harness.checker.verified == {"s0": -1}
    harness.server.differing = []
    harness.push(1)
    assert harness.checker.verified == {"s0": 1}
    harness.checker.stop_check("s0")
    assert harness.checker.verified == {"s0": -1}


def test_answer_about_a_server_that_left_meanwhile_verifies_nothing_of_its_next_life(harness: Harness) -> None:
    """It died after its bytes were compared, and is sent the same version again, which the new process swallows."""
    harness.calibrate()
    harness.push(0)
    scores: Future[np.ndarray] = Future()
    expected = harness.checker._expected[0]
    harness.checker.expect(1, Expected(expected.checksum, scores))
    harness.server.label = "1"
    harness.checker.start_check("s0", 1)
    wait_for(lambda: harness.checker.verified == {"s0": 1})
    harness.checker.stop_check("s0")
    harness.server.label = "default"
    assert not harness.checker.admits("s0", "default")
    scores.set_result(TRAINER)
    wait_for(lambda: harness.checker.admits("s0", "default"))
    assert harness.checker.verified == {"s0": -1}
    harness.server.differing = ["embed"]
    harness.push(1)
    assert [(miss.version, miss.since) for miss in harness.misses] == [(1, 0)]


def test_swallowed_update_is_found_although_later_ones_came_before_the_question(harness: Harness) -> None:
    harness.calibrate()
    harness.push(0)
    check, may_answer = harness.server.check, threading.Event()

    def check_late(version: int) -> dict[str, Any]:
        assert may_answer.wait(20)
        return check(version) | ({"differing": ["embed"]} if version == 2 else {})

    harness.server.check = check_late  # type: ignore[method-assign]
    expected = harness.checker._expected[0]
    for version in (1, 2, 3):
        harness.checker.expect(version, Expected(expected.checksum, None))
        harness.checker.start_check("s0", version)
    may_answer.set()
    wait_for(lambda: not harness.state.is_busy)
    assert [(miss.version, miss.since) for miss in harness.misses] == [(2, 2)]
    assert harness.gate[-1] == 1
    assert harness.checker.verified == {"s0": -1}


def test_version_that_nobody_can_compare_is_verified_at_once(harness: Harness) -> None:
    harness.calibrate()
    harness.checker.start_check("s0", 9)  # the trainer has no bytes of it any more
    wait_for(lambda: harness.checker.verified == {"s0": 9})


def test_version_can_be_checked_until_32_newer_ones_are_known(harness: Harness) -> None:
    harness.calibrate()
    checksum: Future[str] = Future()
    checksum.set_result("another")
    for version in range(33):
        harness.checker.expect(version, Expected(checksum, None))
    for version in (0, 1):
        harness.server.label = str(version)
        harness.checker.start_check("s0", version)
        wait_for(lambda: not harness.state.is_busy)
    assert [miss.version for miss in harness.misses] == [1]


def test_updates_that_are_faster_than_the_text_are_compared_sequence_by_sequence(harness: Harness) -> None:
    """The server takes its next version after three answers, and after none. The rest of the text comes later."""
    harness.calibrate()
    answer, rows = harness.server.score, []

    def score(body: dict[str, Any]) -> dict[str, Any]:
        rows.append(body["token_ids"][0] // 50)
        if len(rows) in (4, 5):
            harness.server.label = "77"
        return answer(body)

    harness.server.score = score  # type: ignore[method-assign]
    harness.push(0)
    assert harness.state.is_scored
    assert rows == [0, 1, 2, 3]
    harness.push(1)
    assert rows == [0, 1, 2, 3, 1]
    harness.server.moved = 0.5
    harness.push(2)
    assert rows[5:] == [2, 3, 0, 1] * 2
    assert [miss.version for miss in harness.misses] == [2]


def test_server_whose_versions_are_too_fast_is_not_asked_all_the_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.calibrate()
    harness.server.score = lambda body: Server.score(harness.server, body) | {  # type: ignore[method-assign]
        "choices": [{"token_ids": [0], "weight_versions": [{"version": "other"}]}]
    }
    harness.push(0)
    checker = harness.checker
    assert not harness.state.is_scored
    monkeypatch.setattr(time, "monotonic", lambda: checker._scoring.ended + 3.9 * checker._scoring.seconds)
    assert not checker.wants_scores(is_idle=True)
    monkeypatch.setattr(time, "monotonic", lambda: checker._scoring.ended + 4.1 * checker._scoring.seconds)
    assert checker.wants_scores(is_idle=False)


def test_due_comparison_waits_for_an_idle_trainer_and_an_overdue_one_does_not(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.calibrate()
    harness.push(0)
    assert harness.state.is_scored
    last = harness.checker._scoring
    wanted = []
    for duty in (19, 21, 39, 41):
        monkeypatch.setattr(time, "monotonic", lambda duty=duty: last.ended + duty * last.seconds)
        wanted.append([harness.checker.wants_scores(is_idle=idle) for idle in (True, False)])
    assert wanted == [[False, False], [True, False], [True, False], [True, True]]
    harness.checker.stop_check("s0")  # it is dead, and stays in the pool while nobody restarts it
    monkeypatch.setattr(time, "monotonic", lambda: last.ended + 10 * last.seconds)
    assert not harness.checker.wants_scores(is_idle=True)


def test_trainer_rank_that_cannot_say_its_checksum_is_no_fault_of_the_server(harness: Harness) -> None:
    harness.calibrate()
    unknown: Future[str] = Future()
    unknown.set_exception(WeightUpdateError("the trainer rank at host:1: it has not taken version 0"))
    harness.checker.expect(0, Expected(unknown, None))
    harness.checker.start_check("s0", 0)
    wait_for(lambda: not harness.state.is_busy)
    assert harness.checker.verified == {"s0": -1}
    harness.push(1)
    assert (harness.misses, harness.checker.verified) == ([], {"s0": 1})


def test_a_version_that_the_server_left_meanwhile_decides_nothing(harness: Harness) -> None:
    harness.calibrate()
    harness.push(0)
    harness.server.is_checked, harness.server.moved = False, 3.0
    harness.push(1, scored=False)
    assert harness.misses == []
    assert harness.state.passed == 0


def test_restarted_server_is_calibrated_again_before_it_is_admitted(harness: Harness) -> None:
    harness.calibrate()
    harness.push(5)
    harness.checker.stop_check("s0")
    before = harness.state.baseline
    assert not harness.checker.admits("s0", "default")
    harness.server.label = "default"
    wait_for(lambda: harness.checker.admits("s0", "default"))
    assert harness.state.baseline is not before


def test_server_with_another_file_is_judged_by_what_it_is_sent(harness: Harness) -> None:
    harness.server.moved = 1.0
    harness.calibrate()
    assert harness.state.baseline is None
    harness.server.moved = 0.0
    harness.push(0)
    assert harness.misses == []
    assert harness.state.baseline is not None


def test_late_server_of_a_run_without_scores_of_version_0_is_calibrated_by_its_first_update(harness: Harness) -> None:
    harness.checker.begin(TEXT)
    assert harness.checker.admits("s0", "default")
    harness.push(7)
    assert harness.state.baseline.noise == pytest.approx(NOISE, rel=0.3)


def test_silent_probe_is_a_miss_after_the_time_out() -> None:
    harness = Harness(timeout_s=0.3)
    harness.calibrate()
    harness.server.answers = False
    harness.push(0)
    assert "did not answer its probe within weights.timeout_s=0.3" in harness.misses[0].reason
    harness.checker.close()
    harness.server.http.shutdown()
    harness.server.http.server_close()


@pytest.mark.parametrize(
    "garbage", [b'{"is_checked":true,"differing":["\xff"]}', b"[" * 100_000, b'{"is_checked":1}', b""], ids=range(4)
)
def test_probe_whose_answer_cannot_be_read_is_a_miss_and_the_server_is_checked_again(garbage: bytes) -> None:
    """Text that is not UTF-8 and deep nesting are no errors of msgspec's own."""
    with contextlib.closing(Harness(timeout_s=0.3)) as harness:
        harness.calibrate()
        harness.server.garbage = garbage
        harness.server.answers = bool(garbage)
        harness.push(0)
        harness.server.garbage, harness.server.answers = b"", True
        harness.push(1)
        assert [(miss.version, miss.is_final) for miss in harness.misses] == [(0, False)]
        assert harness.checker.verified == {"s0": 1}


def test_text_whose_tokens_are_no_tokens_is_sampled_again(harness: Harness) -> None:
    harness.checker.admits("s0", "default")
    good = harness.server.score
    for tokens in ([2**40] * 49, None, 5):
        choice = {"token_ids": tokens, "weight_versions": []}
        harness.server.score = lambda body, choice=choice: {"choices": [choice]}  # type: ignore[method-assign]
        assert harness.checker.sample((4, 50), 1000, 0, timeout_s=20) is None
    harness.server.score = good  # type: ignore[method-assign]
    assert harness.checker.sample((4, 50), 1000, 0, timeout_s=20) is not None


@pytest.mark.parametrize("error", [ZeroDivisionError("rank 1"), CancelledError(), None], ids=repr)
@pytest.mark.parametrize("what", ["checksum", "scores"])
def test_what_the_trainer_cannot_say_or_says_too_late_is_no_fault_of_the_server(what: str, error: Any) -> None:
    with contextlib.closing(Harness(timeout_s=0.3)) as harness:
        harness.calibrate()
        harness.push(0)
        right, missing = harness.checker._expected[0], Future()  # type: ignore[var-annotated]
        if error is not None:
            missing.set_exception(error)
        harness.checker.expect(1, replace(right, **{what: missing}))
        harness.server.label = "1"
        for _ in range(2):
            harness.checker.start_check("s0", 1)
            wait_for(lambda: not harness.state.is_busy)
        assert harness.misses == []
        harness.push(2)
        assert (harness.misses, harness.checker.verified) == ([], {"s0": 2})


def test_noise_beyond_the_tolerance_at_version_0_is_said_and_is_a_miss_after_the_first_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """0.02 nats, which is healthy in bfloat16, with the tolerance of float32."""
    harness = Harness(tolerance=1e-3)
    try:
        with caplog.at_level(logging.WARNING):
            harness.calibrate()
        (message,) = harness.exceeded
        assert (message.server, message.limit) == ("s0", 1e-3)
        assert message.difference == pytest.approx(NOISE, rel=0.3)
        assert "event=calibration_exceeded server=s0" in caplog.text
        assert harness.misses == []
        harness.push(0)
        assert [(miss.server, miss.version) for miss in harness.misses] == [("s0", 0)]
    finally:
        harness.checker.close()
        harness.server.http.shutdown()
        harness.server.http.server_close()


def test_noise_within_the_tolerance_is_not_said(harness: Harness) -> None:
    harness.calibrate()
    assert harness.exceeded == []
