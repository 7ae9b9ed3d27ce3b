"""Metrics as JSON lines, wandb at the edge, and log lines without secrets."""

import itertools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl.config.sections import WandbSection
from pipelinerl.config.variables import references
from pipelinerl.observability import trackers, wandb
from pipelinerl.observability.logging import EventFormatter, logging_restored, redacted, setup_launcher_logging
from pipelinerl.observability.metrics import MetricsLogger, drop_points_after, read_metrics
from pipelinerl.observability.wandb import effective_mode, run_identity


def config(mode: str = "disabled") -> SimpleNamespace:
    section = WandbSection(
        mode=mode,  # type: ignore[arg-type]
        wandb_project_name="p",
        wandb_entity_name=None,
        wandb_group=None,
        wandb_name=None,
        tags=[],
        sample_steps=20,
    )
    trackers = () if mode == "disabled" else ("wandb",)
    return SimpleNamespace(wandb=section, trackers=trackers, launcher=SimpleNamespace(max_log_mb=1))


def test_damaged_byte_costs_the_line_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    lines = [b'{"step": 1}', b'{"step": 2, "rew\xffrd": 1}', b'{"step"\x00: 3}', b"4", b'{"step": 5}']
    (tmp_path / "metrics" / "actor.jsonl").write_bytes(b"\n".join(lines))
    assert read_metrics(tmp_path, "actor") == [{"step": 1}, {"step": 5}]


def test_metrics_are_lines_of_json_and_survive_a_torn_one(tmp_path: Path) -> None:
    logger = MetricsLogger(config(), tmp_path, "actor")  # type: ignore[arg-type]
    logger.log({"reward": 0.5, "bad": float("nan"), "count": 3}, step=1)
    logger.log({"reward": 1.0}, step=2)
    logger.close()
    with open(tmp_path / "metrics" / "actor.jsonl", "a") as stream:
        stream.write('{"step": 3, "rew')
    first, second = read_metrics(tmp_path, "actor")
    assert {key: first[key] for key in ("step", "reward", "bad", "count")} == {
        "step": 1,
        "reward": 0.5,
        "bad": None,
        "count": 3,
    }
    assert (second["step"], second["reward"]) == (2, 1.0)
    assert abs(first["time"] - time.time()) < 60


def test_sync_puts_every_point_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MetricsLogger(config(), tmp_path, "finetune")  # type: ignore[arg-type]
    synced: list[list[int]] = []

    def fsync(descriptor: int) -> None:
        text = Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_text()
        synced.append([json.loads(line)["step"] for line in text.splitlines()])

    monkeypatch.setattr(os, "fsync", fsync)
    logger.log({}, step=1)
    logger.log({}, step=2)
    assert synced == [], "a step does not wait for the disk"
    logger.sync()
    assert synced == [[1, 2]]
    monkeypatch.undo()
    logger.close()


def test_metrics_continue_the_file_after_a_restart(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = MetricsLogger(config(), tmp_path, "actor")  # type: ignore[arg-type]
        logger.log({}, step=step)
        logger.close()
    assert [point["step"] for point in read_metrics(tmp_path, "actor")] == [1, 2]
    assert read_metrics(tmp_path, "nobody") == []


def test_metrics_of_a_long_run_stay_bounded_and_cover_all_of_it(tmp_path: Path) -> None:
    logger = MetricsLogger(config(), tmp_path, "actor")  # type: ignore[arg-type]
    for step in range(20_000):
        logger.log({"reward": 0.5, "sampled_tokens": 123456.0, "prefix_hit_rate": 0.123456789}, step=step)
    logger.close()
    assert 0.5 < (tmp_path / "metrics" / "actor.jsonl").stat().st_size / 2**20 <= 1.0
    steps = [point["step"] for point in read_metrics(tmp_path, "actor")]
    assert steps == sorted(steps)
    assert (steps[0], steps[-2:]) == (0, [19_998, 19_999])
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 64


def test_metrics_a_failing_wandb_costs_nothing_but_a_log_line(tmp_path: Path, monkeypatch, caplog) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("wandb is down")

    monkeypatch.setattr(wandb, "start_run", explode)
    logger = MetricsLogger(config("online"), tmp_path, "actor")  # type: ignore[arg-type]
    logger.log({"reward": 1.0}, step=1)
    logger.close()
    assert read_metrics(tmp_path, "actor")[0]["reward"] == 1.0
    assert "event=tracker_failed tracker=wandb" in caplog.text


def test_metrics_steps_that_a_resumed_trainer_repeats_reach_wandb_once(tmp_path: Path, monkeypatch) -> None:
    sent: list[tuple[int, float]] = []
    run = SimpleNamespace(
        log=lambda point: sent.append((point["finetune/step"], point["finetune/loss"])), finish=lambda: None
    )
    monkeypatch.setattr(wandb, "start_run", lambda *_: run)
    for first, last, loss in ((1, 5, 0.1), (3, 4, 0.2), (3, 7, 0.3)):  # the second process dies while it repeats
        drop_points_after(tmp_path, "finetune", first - 1)
        logger = MetricsLogger(config("offline"), tmp_path, "finetune", once_per_step=True)  # type: ignore[arg-type]
        for step in range(first, last + 1):
            logger.log({"loss": loss}, step=step)
        logger.close()
    assert sent == [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1), (5, 0.1), (6, 0.3), (7, 0.3)]
    in_file = [(point["step"], point["loss"]) for point in read_metrics(tmp_path, "finetune")]
    assert in_file == [(1, 0.1), (2, 0.1), (3, 0.3), (4, 0.3), (5, 0.3), (6, 0.3), (7, 0.3)]


def test_metrics_a_slow_wandb_never_blocks_the_role(tmp_path: Path, monkeypatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(wandb, "start_run", lambda *_: release.wait(300) or None)
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(trackers, "QUEUE_POINTS", 10)
    logger = MetricsLogger(config("online"), tmp_path, "actor")  # type: ignore[arg-type]
    started = time.monotonic()
    for step in range(1000):
        logger.log({"reward": 1.0}, step=step)
    logger.close()
    assert time.monotonic() - started < 60
    assert len(read_metrics(tmp_path, "actor")) == 1000
    release.set()


@pytest.mark.parametrize(
    ("mode", "env", "netrc", "effective"),
    [
        ("online", {"WANDB_API_KEY": "k"}, "", "online"),
        ("online", {}, "", "offline"),
        ("online", {}, "machine api.wandb.ai login user password key", "online"),
        ("online", {"WANDB_BASE_URL": "https://my.host"}, "machine api.wandb.ai login user password key", "offline"),
        ("offline", {"WANDB_API_KEY": "k"}, "", "offline"),
        ("disabled", {"WANDB_API_KEY": "k"}, "", "disabled"),
        ("online", {"WANDB_API_KEY": "k", "WANDB_MODE": "Offline"}, "", "offline"),
        ("online", {"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, "", "offline"),
        ("offline", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, "", "offline"),
    ],
)
def test_effective_mode_needs_a_key_to_be_online(
    tmp_path: Path, mode: str, env: dict, netrc: str, effective: str
) -> None:
    (tmp_path / ".netrc").write_text(netrc)
    (tmp_path / ".netrc").chmod(0o600)
    assert effective_mode(mode, env, tmp_path) == effective


def test_run_identity_is_one_group_and_stable_over_restarts(tmp_path: Path) -> None:
    section = config().wandb
    actor, again, trainer = (run_identity(section, tmp_path / "run", kind) for kind in ("actor", "actor", "finetune"))
    assert actor == again
    assert actor["group"].startswith(f"{tmp_path.name}-run-")
    assert actor["name"] == f"{actor['group']}_actor"
    assert actor["group"] == trainer["group"]
    assert actor["id"] != trainer["id"]


def test_run_identity_tells_runs_of_one_name_apart_unless_a_group_is_given(tmp_path: Path) -> None:
    one, two = (run_identity(config().wandb, tmp_path / name / "run1", "actor") for name in ("exp1", "exp2"))
    assert {one["group"], one["name"], one["id"]}.isdisjoint({two["group"], two["name"], two["id"]})
    given = config().wandb.model_copy(update={"wandb_group": "mine"})
    assert run_identity(given, tmp_path / "run1", "actor")["name"] == "mine_actor"


def record(message: str, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("pipelinerl.actor.loop", logging.INFO, "f", 1, message, (), exc_info)  # type: ignore[arg-type]


def test_event_formatter_is_one_line_per_event() -> None:
    line = EventFormatter("actor_0").format(record("first\nsecond"))
    assert line.endswith(" INFO actor_0 actor.loop: first\\nsecond")


def test_event_formatter_indents_tracebacks_and_removes_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "verysecretvalue")
    monkeypatch.setenv("HF_TOKEN", "short")
    try:
        raise ValueError("token=verysecretvalue")
    except ValueError:
        text = EventFormatter("actor_0").format(record("bad verysecretvalue short", sys.exc_info()))
    assert "verysecretvalue" not in text
    assert "bad *** short" in text
    assert all(line.startswith("    ") for line in text.splitlines()[1:])


@pytest.mark.parametrize(
    ("value", "told", "shown"),
    [
        ("Bearer sk-123456", "sent Bearer sk-123456", "sent ***"),
        ("Bearer sk-123456", "the key sk-123456 is wrong", "the key *** is wrong"),
        ('quo"ted\\key', "{'k': 'quo\"ted\\\\key'}", "{'k': '***'}"),
        ('quo"ted\\key', json.dumps({"k": 'quo"ted\\key'}), '{"k": "***"}'),
        ("-----BEGIN-----\nabcdefgh\n", "line abcdefgh", "line ***"),
        ("", "nothing is hidden", "nothing is hidden"),
        ("secret", "a word of six letters: secret", "a word of six letters: ***"),
        ("words", "a word of five letters: words", "a word of five letters: words"),
    ],
)
def test_redacted_text_holds_the_secret_in_no_form(
    value: str, told: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", value)
    assert redacted(told) == shown


def test_reference_in_a_configuration_is_never_logged_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOOL_KEY", "planted-4711")
    assert redacted("planted-4711") == "planted-4711"
    assert references({"dataset_loader_params": {"key": {"env": "MY_TOOL_KEY"}}})
    assert EventFormatter("actor_0").format(record("got planted-4711")).endswith("got ***")


def test_what_a_role_prints_is_shown_without_effects() -> None:
    code = (
        "import sys\n"
        "from pipelinerl.observability.logging import setup_role_logging\n"
        "setup_role_logging('actor_0'); setup_role_logging('actor_0')\n"
        "print('\\x1b]0;owned\\x07 key secretsecret')\n"
        "print('10%\\r20%', file=sys.stderr)\n"
        "raise ValueError('\\x1b[2J secretsecret')\n"
    )
    environment = {**os.environ, "PIPELINERL_SECRET": "secretsecret"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "␛]0;owned␇ key ***\n"
    assert done.stderr.startswith("10%\n20%\n")
    assert "ValueError: ␛[2J ***" in done.stderr


def test_setup_role_logging_writes_events_and_warnings_to_stderr() -> None:
    code = (
        "import logging, warnings\n"
        "from pipelinerl.observability.logging import setup_role_logging\n"
        "setup_role_logging('actor_0')\n"
        "logging.getLogger('pipelinerl.x').info('hello secretsecret')\n"
        "warnings.warn('careful')\n"
        "logging.getLogger('httpx').info('chatter')\n"
    )
    environment = {**os.environ, "PIPELINERL_SECRET": "secretsecret"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "INFO actor_0 x: hello ***" in done.stderr
    assert "WARNING actor_0 py.warnings: " in done.stderr
    assert "careful" in done.stderr
    assert "chatter" not in done.stderr
    assert done.stdout == ""
    json.dumps(done.stderr)


def test_logging_is_restored_and_its_file_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, chatty = logging.getLogger(), logging.getLogger("httpx")
    before = root.handlers[:], root.level, chatty.level, warnings.showwarning
    with logging_restored():
        setup_launcher_logging(tmp_path / "launcher.log", max_mb=1)
        [installed] = root.handlers
        root.info("written")
    assert (root.handlers, root.level, chatty.level, warnings.showwarning) == before
    assert isinstance(installed, logging.FileHandler)
    assert installed.stream is None
    root.error("not written")
    assert (tmp_path / "launcher.log").read_text().endswith("INFO launcher root: written\n")
    assert caplog.messages == ["not written"]


def test_launcher_s_log_stays_within_its_bound_beside_the_part_before(tmp_path: Path) -> None:
    """Those of a follower in a shared folder and of a launcher on Ray had none. Node 1's log is `launcher.1.log`."""
    (tmp_path / "launcher.log.1").write_text("of the launch before\n")
    (tmp_path / "launcher.log").write_text("x" * (2**20 - 10) + "\n")
    with logging_restored():
        setup_launcher_logging(tmp_path / "launcher.log", max_mb=1)
        logging.getLogger().info("written")
    assert (tmp_path / "launcher.log").read_text().endswith("INFO launcher root: written\n")
    assert (tmp_path / "launcher.log.1").read_text() == "x" * (2**20 - 10) + "\n"
    assert {path.name for path in tmp_path.iterdir()} == {"launcher.log", "launcher.log.1"}
