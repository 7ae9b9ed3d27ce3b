"""The launcher through its real command line, with light roles: order, ends, exit codes, and nothing left behind."""

import base64
import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pipelinerl.inspect.status import screen
from pipelinerl.observability.status import read_statuses
from tests.escapes import ESCAPES, escape, is_alive

FAKES = Path(__file__).with_name("launcher_fakes.py")
DEADLINE_S = 120.0
STOP_S = 90.0
"""The promise is 10 s and 15 s for the report; the rest is the noise of a loaded machine."""


class Launch:
    """A launcher under test, its run folder and its output."""

    def __init__(self, run_dir: Path, model: Path, arguments: list[str], behaviours: dict[str, str], output: str = ""):
        self.run_dir = run_dir
        self.output_path = run_dir.with_name(output or f"{run_dir.name}.out")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_")}
        environment |= {f"FAKE_{kind.upper()}": value for kind, value in behaviours.items()}
        command = [sys.executable, str(FAKES), "launch", "--config-name=quickstart", f"output_dir={run_dir}"]
        settings = [
            f"model_path={model}",
            "tiny_model=null",
            "finetune.max_train_steps=3",
            "launcher.restart_backoff_s=0.1",
        ]
        with open(self.output_path, "w") as output:
            self.process = subprocess.Popen(
                [*command, *settings, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout=timeout_s)

    def wait_for(self, text: str) -> None:
        self.until(lambda: text in self.output, text)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.output}"
            time.sleep(0.05)

    def starts(self) -> list[dict]:
        """What each role wrote when it started. A line that is still being written is left out."""
        path = self.run_dir / "environment.jsonl"
        written = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in written.splitlines()]

    def leftovers(self) -> list[int]:
        """Processes of this run that still live."""
        tokens = {entry["env"]["PIPELINERL_RUN"] for entry in self.starts()}
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PIPELINERL_RUN") in tokens and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found


def write_config(folder: Path) -> Path:
    """As much of a model as a launcher of light roles reads."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    model = write_config(tmp_path / "model")
    launches: list[Launch] = []

    def start(*arguments: str, name: str = "run", **behaviours: str) -> Launch:
        launches.append(Launch(tmp_path / name, model, list(arguments), behaviours))
        return launches[-1]

    yield start
    for launched in launches:
        if launched.process.poll() is None:
            launched.process.send_signal(signal.SIGTERM)
            launched.wait(STOP_S)


class Pair(NamedTuple):
    """Two runs side by side that have ended. Tests read them."""

    undisturbed: Launch
    """Its launcher was told to write no bytecode. Its actor started the daemons."""
    stumbled: Launch
    """Its actor ended once with an error."""
    daemons: list[Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("finished")
    model, daemons = write_config(folder / "model"), [folder / f"daemon-{index}" for index, _ in enumerate(ESCAPES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        behaviours = {"launcher": "whole", "actor": "leave_daemons", "daemons": daemon_lines(daemons)}
        undisturbed = Launch(folder / "run", model, [], behaviours)
    stumbled = Launch(folder / "stumbled", model, [], {"actor": "crash_once"})
    codes = [run.wait() for run in (undisturbed, stumbled)]
    assert codes == [0, 0], undisturbed.output + stumbled.output
    return Pair(undisturbed, stumbled, daemons)


@pytest.fixture(scope="module")
def finished(pair: Pair) -> Launch:
    return pair.undisturbed


def daemon_lines(files: list[Path]) -> str:
    """Shell lines for daemons that write their process ids to the files."""
    return "\n".join(escape(how, file) for how, file in zip(ESCAPES, files, strict=True))


def test_launcher_clean_run_ends_with_summary_and_nothing_left(finished: Launch) -> None:
    run = finished
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["success_before"], summary["success_after"]) == (0.25, 0.75)
    assert (summary["optimizer_steps"], summary["weight_updates"], summary["seed"]) == (3, 3, 0)
    assert summary["pause_ms"] == {"median": 20.0, "mean": 20.0, "max": 30.0}
    assert summary["lag_steps"] == {"mean": 1.0, "max": 2.0}
    assert (run.run_dir / "learning_curve.png").stat().st_size > 1000
    for line in ("step 1/3  reward 0.10", "step 3/3", "evaluation of version 3: success 0.750", "0.250 → 0.750"):
        assert line in run.output
    assert run.leftovers() == []


def test_launcher_clean_run_leaves_no_daemon_of_a_role(pair: Pair) -> None:
    """What a domain's code started in sessions of its own, and without the run's marks in its environment."""
    assert all(map(Path.exists, pair.daemons))
    assert not any(map(is_alive, pair.daemons))


@pytest.mark.parametrize("end", ["stopped", "role killed", "launcher killed", "launcher and reaper killed"])
def test_launcher_any_end_leaves_nothing_of_a_role(launch: Callable[..., Launch], end: str, tmp_path: Path) -> None:
    """Nor shared memory, nor a role that ignores SIGTERM and its child."""
    files = [tmp_path / f"daemon-{index}" for index, _ in enumerate(ESCAPES)]
    server = "ignore_sigterm,leave_child,leave_memory" if end == "launcher killed" else ""
    run = launch(actor="leave_daemons", finetune="held", actor_llm=server, daemons=daemon_lines(files))
    segment = run.run_dir / "segment"
    run.until(lambda: not server or segment.exists(), "the shared memory")
    run.until(lambda: all(map(Path.exists, files)) and "version 0" in run.output, "the daemons of the actor")
    assert all(map(is_alive, files))
    match end:
        case "stopped":
            run.process.terminate()
        case "role killed":
            os.kill(read_statuses(run.run_dir)["actor_0"].pid, signal.SIGKILL)
            run.until(lambda: not any(map(is_alive, files)), "the end of the daemons")
            assert run.process.poll() is None
        case "launcher killed" | "launcher and reaper killed":
            reapers = [p for p in psutil.Process(run.process.pid).children() if "reaper.py" in " ".join(p.cmdline())]
            for killed in reapers * ("reaper" in end):
                killed.suspend()
            run.process.kill()
            for killed in reapers * ("reaper" in end):
                killed.kill()
    (run.run_dir / "may_end").touch()
    run.wait(STOP_S)
    run.until(lambda: not any(map(is_alive, files)) and run.leftovers() == [], "the end of the daemons")
    if server:
        run.until(lambda: not Path("/dev/shm", segment.read_text()).exists(), "the end of the shared memory")


def test_launcher_run_folder_is_private_and_without_secrets(finished: Launch) -> None:
    run = finished
    environments = {entry["job"]: entry["env"] for entry in run.starts()}
    assert set(environments) == {"actor_llm_0", "finetune_0", "actor_0", "preprocessor_0"}
    secrets = {
        env[name] for env in environments.values() for name in ("PIPELINERL_SECRET", "PIPELINERL_REDIS_PASSWORD")
    }
    assert len(secrets) == 2
    assert all(len(secret) >= 32 for secret in secrets)
    for path in {run.run_dir, *run.run_dir.rglob("*")} - {run.run_dir / "environment.jsonl"}:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        if path.is_file():
            assert not any(secret.encode() in path.read_bytes() for secret in secrets), path
    assert not any(secret in run.output for secret in secrets)


def test_launcher_roles_share_a_temporary_folder_that_goes_with_the_run(finished: Launch) -> None:
    (folder,) = {entry["env"]["TMPDIR"] for entry in finished.starts()}
    assert Path(folder).name.startswith("prl-")
    assert not Path(folder).exists()


def test_launcher_children_warm_their_bytecode_cache(finished: Launch) -> None:
    assert all("PYTHONDONTWRITEBYTECODE" not in entry["env"] for entry in finished.starts())


def test_launcher_finished_run_is_told_and_not_repeated(finished: Launch) -> None:
    again = Launch(finished.run_dir, finished.run_dir.with_name("model"), [], {}, output="again.out")
    assert again.wait() == 0
    assert "is finished" in again.output
    assert "raise finetune.max_train_steps" in again.output


def test_launcher_role_that_stumbles_is_restarted_once(pair: Pair) -> None:
    run = pair.stumbled
    assert "actor_0: exit code 1; RuntimeError: this role stumbled; restart 1/3" in run.output
    assert "restarts: actor_0 1" in run.output
    assert [entry["job"] for entry in run.starts()].count("actor_0") == 2


def test_launcher_budget_spent_stops_with_the_first_cause(launch) -> None:
    run = launch("launcher.max_restarts=1", launcher="whole", finetune="endless", actor="crash")
    assert run.wait() == 1
    last = run.output.strip().splitlines()[-3:]
    assert last[0].startswith("actor_0 failed: exit code 1")
    assert last[1].endswith("run/actor_0/log.txt")
    assert last[2] == "  last error: RuntimeError: this role is broken"
    assert run.leftovers() == []
    page = page_data(run)
    assert page["state"] == "failed at step 0 of 3"
    assert page["alarms"][0]["title"] == "run failed"
    said = "actor_0 failed: exit code 1; its last error: RuntimeError: this role is broken"
    assert page["alarms"][0]["evidence"] == said
    assert "actor_0/log.txt" in page["alarms"][0]["fix"]


def page_data(run: Launch) -> dict:
    """The only run in the data of the page in the run's folder."""
    path = run.run_dir / "report.html"
    if not path.exists():  # on a busy machine, where the launcher says what makes it
        assert "no report.html: it took more than" in run.output, run.output
        subprocess.run([sys.executable, "-m", "pipelinerl", "report", str(run.run_dir)], check=True, timeout=120)
    page = path.read_text()
    packed = page.partition('<script id="data" type="application/octet-stream">')[2].partition("</script>")[0]
    (found,) = json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]
    return found


def test_launcher_error_that_no_restart_mends_ends_the_run_at_once(launch) -> None:
    run = launch(finetune="endless", actor="refuse")
    assert run.wait() == 1
    assert "restart 1/" not in run.output
    assert run.output.strip().endswith("last error: DomainError: the domain raised on every rollout")


@pytest.mark.slow
def test_launcher_server_that_ends_by_itself_is_restarted(launch) -> None:
    run = launch("launcher.max_restarts=1", finetune="endless", actor_llm="exit_early")
    assert run.wait() == 1
    assert "actor_llm_0 failed: it ended before the run did" in run.output


@pytest.mark.parametrize(
    ("behaviour", "hang_timeout_s"), [pytest.param("freeze_once", 60, marks=pytest.mark.slow), ("hang_once", 8)]
)
def test_launcher_role_that_stands_still_is_reported_killed_and_restarted(
    launch, behaviour: str, hang_timeout_s: int
) -> None:
    run = launch(
        "launcher.heartbeat_timeout_s=10",
        f"launcher.hang_timeout_s={hang_timeout_s}",
        preprocessor=behaviour,
        finetune="endless",
    )
    run.wait_for("preprocessor_0: ")
    run.until(lambda: [entry["job"] for entry in run.starts()].count("preprocessor_0") >= 2, "the restart")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(STOP_S) == 130
    reports = {json.loads(path.read_text())["job"]: path.parent for path in run.run_dir.glob("hangs/*/status.json")}
    report = reports["preprocessor_0"]
    document = json.loads((report / "status.json").read_text())
    assert document["reason"].startswith("frozen" if behaviour == "freeze_once" else "no progress for")
    assert "launcher_fakes.py" in (report / "actor_0.stacks.txt").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_launcher_signal_stops_everything_in_time_and_resumes(launch, number: signal.Signals) -> None:
    run = launch(launcher="whole", finetune="endless")
    run.wait_for("evaluation of version 0")
    run.process.send_signal(number)
    assert run.wait(STOP_S) == 128 + number
    assert f"stopped by {number.name}; the same command resumes" in run.output
    assert run.leftovers() == []
    assert ": stopped at step " in screen(run.run_dir)[0]
    page = page_data(run)
    assert page["state"] == f"stopped by {number.name} at step 0 of 3"
    assert not page["alarms"]
    again = launch(launcher="whole")
    assert again.wait() == 0, again.output
    assert "resuming" in again.output
    assert page_data(again)["state"].startswith("finished, ")


def test_launcher_signal_before_the_start_ends_at_once(launch) -> None:
    run = launch(finetune="endless")
    run.wait_for("the interpreter is up")
    run.process.send_signal(signal.SIGTERM)  # not SIGINT, which a shell's background jobs inherit as ignored
    assert run.wait(STOP_S) in (143, -signal.SIGTERM)
    assert run.leftovers() == []


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function after which no Python process with a word in its command line goes on."""

    def write(word: str) -> None:
        path = tmp_path / "hold"
        path.mkdir()
        (path / "sitecustomize.py").write_text(
            f"import sys, time\nif {word!r} in sys.orig_argv:\n    time.sleep(3600)\n"
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))

    return write


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_launcher_signal_during_the_checks_is_answered(launch, hold, number: signal.Signals) -> None:
    hold("pipelinerl.launcher.domain_check")
    run = launch(launcher="whole")
    run.until(lambda: psutil.Process(run.process.pid).children(), "a check in a process of its own")
    run.process.send_signal(number)
    assert run.wait(STOP_S) == 128 + number
    assert run.output.splitlines()[-1] == "interrupted before anything was started"
    assert run.leftovers() == []


SLOW_RECIPE = "import time, pathlib\n\ndef slow():\n    time.sleep(3600)\n"


def test_launcher_signal_while_the_model_is_built_is_answered(launch, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "recipes_of_a_test.py").write_text(SLOW_RECIPE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    recipe = "tiny_model={recipe: recipes_of_a_test.slow, seed: 0, params: {}}"
    run = launch(recipe, f"model_path={tmp_path / 'built'}", finetune="endless")
    run.wait_for("building the tiny model")
    run.until(lambda: len(run.starts()) == 4, "every role starts while the model is built")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(STOP_S) == 130
    assert "SIGINT: stopping" in run.output
    assert run.leftovers() == []
    assert not (tmp_path / "built").exists()


def test_launcher_model_that_cannot_be_built_ends_the_run(launch, tmp_path: Path) -> None:
    recipe = "tiny_model={recipe: nowhere.recipe, seed: 0, params: {}}"
    run = launch(recipe, f"model_path={tmp_path / 'built'}", finetune="endless")
    assert run.wait() == 1, run.output
    assert "the run failed: `tiny_model` could not build" in run.output
    assert "nowhere" in run.output.split("could not build")[1]
    assert run.leftovers() == []


def test_launcher_stubborn_roles_are_killed_in_time(launch) -> None:
    run = launch("launcher.stop_timeout_s=2", finetune="endless", actor_llm="ignore_sigterm,leave_child,leave_memory")
    run.wait_for("evaluation of version 0")
    run.until(lambda: (run.run_dir / "segment").exists(), "the shared memory")
    segment = Path("/dev/shm") / (run.run_dir / "segment").read_text()
    assert segment.exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(STOP_S) == 143
    assert run.leftovers() == []
    assert not segment.exists()


def has_unsaved_step(run: Launch) -> bool:
    status = read_statuses(run.run_dir).get("finetune_0")
    return status is not None and status.fields.get("saved") is False


def stop_while_saving(launch, *settings: str):
    """A stopped run whose trainer is saving while everybody else has ended or been given up."""
    run = launch("launcher.stop_timeout_s=0.5", *settings, finetune="slow_save")
    run.until(lambda: has_unsaved_step(run), "a step")
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: (run.run_dir / "saving").exists(), "the saving")
    return run


def test_launcher_waits_for_a_trainer_that_saves(launch) -> None:
    run = stop_while_saving(launch)
    time.sleep(1.0)  # twice what others get
    assert run.process.poll() is None
    (run.run_dir / "may_save").touch()
    assert run.wait(STOP_S) == 143
    assert (run.run_dir / "saved").exists()
    assert "finetune_0: saves its last step, for at most launcher.save_timeout_s=60 s" in run.output
    assert run.leftovers() == []


def test_launcher_second_signal_ends_a_trainer_that_saves(launch) -> None:
    run = stop_while_saving(launch)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(STOP_S) == 143
    assert not (run.run_dir / "saved").exists()
    assert run.leftovers() == []
    assert not (run.run_dir / "report.html").exists()


@pytest.mark.parametrize("kind", ["stopped", pytest.param("failed", marks=pytest.mark.slow)])
def test_launcher_signal_during_the_report_of_an_unfinished_run_is_answered(launch, hold, kind: str) -> None:
    hold("report")
    failed = kind == "failed"
    run = launch(launcher="whole", finetune="endless", **({"actor": "refuse"} if failed else {}))
    if not failed:
        run.wait_for("evaluation of version 0")
        run.process.send_signal(signal.SIGTERM)
    run.wait_for("writing report.html")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(STOP_S) == (1 if failed else 143)
    assert "no report.html: not awaited" in run.output
    assert run.leftovers() == []
    assert json.loads((run.run_dir / "ending.json").read_text())["kind"] == kind
    assert not (run.run_dir / "report.html").exists()


def test_launcher_gives_saving_no_more_than_its_time(launch) -> None:
    run = stop_while_saving(launch, "launcher.save_timeout_s=1")
    assert run.wait(STOP_S) == 143
    assert run.leftovers() == []


def test_launcher_two_runs_side_by_side_do_not_meet(pair: Pair) -> None:
    runs = (pair.undisturbed, pair.stumbled)
    ports = [json.loads((run.run_dir / "conf" / "world.json").read_text())["jobs"][0]["port"] for run in runs]
    assert ports[0] != ports[1]


@pytest.mark.slow
def test_launcher_second_launcher_in_the_same_folder_is_refused(launch) -> None:
    run = launch(finetune="endless")
    run.wait_for("evaluation of version 0")
    second = launch("seed=0", name="run")
    assert second.wait() == 2
    assert "another launcher is running in it" in second.output
    assert run.process.poll() is None
