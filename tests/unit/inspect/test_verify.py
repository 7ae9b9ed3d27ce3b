"""`python -m pipelinerl.streams verify`: every damage is found, and told whom it matters to."""

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from pipelinerl.inspect import streams as command
from pipelinerl.streams.files import cursor
from pipelinerl.streams.frames import framed
from tests.run_folder import Story, make_run
from tests.says import says


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    run = make_run(tmp_path / "run", Story(steps=4))
    (run / "streams/actor/0/0/readers").mkdir()
    for name, position in (("actor_0", 8), ("preprocessor_0", 6)):
        (run / "streams/actor/0/0/readers" / name).write_text(f"{position}\n")
    return run


def verify(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = command.main(["verify", str(run)])
    return code, capsys.readouterr().out


def flip(run: Path, topic: str, byte: int) -> None:
    path = run / "streams" / topic / "0" / "0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_sound_streams(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = verify(run, capsys)
    assert code == 0
    assert re.search(says("no damage", run), output)


def test_flipped_bits_and_whom_they_matter_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run, "actor", 40)
    flip(run, "trainer", 40)
    code, output = verify(run, capsys)
    assert code == 1
    place = f"{run}/streams/actor/0/0/{0:020d}.log"
    assert re.search(rf"actor/0/0: record 0: .*{place}.*byte 8.*checksum", output)
    assert "preprocessor_0: does not matter" in output
    assert re.search(says("newest records"), output)
    assert re.search(says("can be resumed"), output)
    flip(run, "actor", -3)
    code, output = verify(run, capsys)
    assert "preprocessor_0: MATTERS" in output
    assert "can be resumed" not in output
    assert "actor_0: does not matter" in output
    assert "resume=checkpoint" in output
    assert "delete" not in output


def test_lost_ends_and_what_points_behind_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "streams" / "preprocessor")
    path = run / "streams/actor/0/0" / f"{0:020d}.log"
    path.write_bytes(path.read_bytes()[:-10])
    (run / "actor_0").mkdir(exist_ok=True)
    payload = msgspec.msgpack.encode({"offset": 9})
    (run / "actor_0" / "progress.msgpack").write_bytes(framed(0, payload))
    manifest = run / "checkpoints" / "step_4" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"counters": {"positions": {"0/0": 12}}}))
    code, output = verify(run, capsys)
    assert code == 1
    assert "records 7 to 7" not in output
    assert re.search("actor/0/0: record 7: .*reader.* record 8.* ends before record 7", output)
    assert re.search("actor/0/0: record 8: .*actor_0.* snapshot .*record 9.* ends before record 8", output)
    assert re.search("training_data/0/0: records 0 to 11: .*checkpoint step_4.* record 12", output)


def test_missing_segment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "streams/actor/0/0"
    (folder / f"{0:020d}.log").rename(folder / f"{3:020d}.log")
    code, output = verify(run, capsys)
    assert code == 1
    assert "byte 8" in output
