"""Recorded streams are copied whole, once, and refused where they do not fit."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.synthetic_groups import make_groups
from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.streams_at_start import check_recording, copy_streams
from pipelinerl.records import ActorRecord
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from tests.says import says

REQUIRED = ["dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
GROUPS = 5


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    run = tmp_path / "recorded"
    (run / "conf").mkdir(parents=True)
    OmegaConf.save(compose("base", [*REQUIRED, f"output_dir={run}"]), run / "conf" / "config.yaml", resolve=True)
    set_streams_backend("files")
    with open_writer(SingleStreamSpec(run, "actor"), ActorRecord) as writer:
        for group in make_groups(3, GROUPS, attempts=8, vocab_size=100, versions=1):
            writer.write(group)
    return run


def config(tmp_path: Path, *overrides: str) -> Config:
    given = [f"output_dir={tmp_path / 'new'}", "debug.mode=preprocessor", *overrides]
    return parse(compose("base", [*REQUIRED, f"debug.streams_from={tmp_path / 'recorded'}", *given]))


def read(run: Path) -> list[tuple[int, ActorRecord]]:
    with open_reader(SingleStreamSpec(run, "actor"), ActorRecord, name=None) as reader:
        return reader.read_all()


def test_every_record_keeps_its_offset_and_the_source_its_readers(recorded: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path)
    check_recording(cfg, 4)
    said: list[str] = []
    copy_streams(cfg, tmp_path / "new", said.append)
    assert said == [f"copied {GROUPS} records of topic actor from {recorded}"]
    set_streams_backend("files")
    old, new = read(recorded), read(tmp_path / "new")
    assert [(offset, record.group_id) for offset, record in new] == [(o, r.group_id) for o, r in old]
    assert not (recorded / "streams" / "actor" / "0" / "0" / "readers").exists()
    copy_streams(cfg, tmp_path / "new", said.append)
    assert len(said) == 1, "a resumed run has its copy"


def test_interrupted_copy_begins_again(recorded: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path)
    copy_streams(cfg, tmp_path / "new", print)
    (tmp_path / "new" / "streams" / "actor" / "copied").unlink()
    copy_streams(cfg, tmp_path / "new", print)
    set_streams_backend("files")
    assert len(read(tmp_path / "new")) == GROUPS


def test_run_without_the_topic_or_with_other_settings_is_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says("`attempts`", 8, 4)):
        check_recording(config(tmp_path, "attempts=4"), 4)
    with pytest.raises(ConfigError, match=says("`training_data`", "no records")):
        check_recording(config(tmp_path, "debug.mode=finetune"), 4)
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_recording(config(tmp_path, "debug.streams_from=nowhere"), 4)


def test_stream_that_lost_its_beginning_is_refused(recorded: Path, tmp_path: Path) -> None:
    folder = recorded / "streams" / "actor" / "0" / "0"
    (segment,) = folder.glob("*.log")
    segment.rename(folder / f"{7:020d}.log")
    with pytest.raises(ConfigError, match=says("record 7", "`streams.segment_mb`")):
        check_recording(config(tmp_path), 4)


def test_micro_batches_for_another_number_of_ranks_are_refused(recorded: Path, tmp_path: Path) -> None:
    set_streams_backend("files")
    for rank in range(2):
        with open_writer(SingleStreamSpec(recorded, "training_data", 0, rank), str) as writer:
            writer.write("a micro-batch")
    check_recording(config(tmp_path, "debug.mode=finetune"), 2)
    with pytest.raises(ConfigError, match=says(2, "rank(s)", 4)):
        check_recording(config(tmp_path, "debug.mode=finetune"), 4)
