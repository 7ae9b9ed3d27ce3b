"""A store of weights that is full, hangs, or stays away: servers serve what they have, and the trainer says why."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipelinerl.weights.store import files
from tests.says import says
from tests.sender_kit import wait_for
from tests.store_kit import RANKS, Trainer, following, holds, trainers, weights


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    yield from trainers(monkeypatch)


def test_disk_that_is_full_is_tried_again_until_there_is_room(
    start_model_server: Any, make_trainer: Any, small_disk: Path, caplog: Any
) -> None:
    url = str(small_disk / "store")
    server, trainer = following(start_model_server(), make_trainer, url)
    (small_disk / "others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    trainer.take_snapshot(1, weights(1))
    wait_for(lambda: "event=version_not_published version=1" in caplog.text)
    assert "No space left on device" in caplog.text
    assert server.label == "0"
    assert trainer.sender.is_busy, "the trainer goes on, and offers the newest version when this one has been published"
    (small_disk / "others").unlink()
    assert trainer.sender.wait_live(1, 60)
    assert holds(server, weights(1))


class Hanging:
    """A file system whose calls do not return, like a mount whose server is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str):
        self.answers, self.calls = threading.Event(), 0
        for name in names:
            monkeypatch.setattr(files.FolderFiles, name, self._hang(getattr(files.FolderFiles, name)))

    def _hang(self, method: Any) -> Any:
        def called(*arguments: Any) -> Any:
            self.calls += 1
            self.answers.wait()
            return method(*arguments)

        return called


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hanging]]:
    made: list[Hanging] = []

    def make(*names: str) -> Hanging:
        made.append(Hanging(monkeypatch, *names))
        return made[-1]

    yield make
    for one in made:
        one.answers.set()


def test_store_that_hangs_holds_up_neither_steps_nor_servers(
    start_model_server: Any, make_trainer: Any, hang: Any, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    server, trainer = following(start_model_server(), make_trainer, url)
    store = hang("put", "get", "open", "size")
    trainer.take_snapshot(1, weights(1))
    wait_for(lambda: store.calls >= 1 + RANKS)
    assert trainer.sender.is_busy
    trainer.sender.check()
    info = httpx.get(f"{server.job.url}/weight_info", timeout=60).json()
    assert info["weight_version"] == "0"
    store.answers.set()
    assert trainer.sender.wait_live(1, 60)
    assert holds(server, weights(1))


def test_store_that_goes_on_hanging_ends_the_updates_and_the_trainer_can_close(
    start_model_server: Any, make_trainer: Any, hang: Any, tmp_path: Path
) -> None:
    from pipelinerl.errors import WeightUpdateError

    url = str(tmp_path / "store")
    server, first = following(start_model_server(), make_trainer, url)
    first.close()
    trainer = make_trainer(url, server, timeout_s=1.0)
    hang("put")
    trainer.take_snapshot(1, weights(1))
    with pytest.raises(WeightUpdateError, match=says("weights.timeout_s=1 s", "store")):
        trainer.sender.wait_live(1, 60)
    closing = threading.Thread(target=trainer.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert server.label == "0"


def test_store_that_stays_away_ends_the_updates_with_its_reason(
    start_model_server: Any, make_trainer: Any, tmp_path: Path
) -> None:
    from pipelinerl.errors import WeightUpdateError

    url = str(tmp_path / "store")
    server, first = following(start_model_server(), make_trainer, url)
    first.close()
    trainer = make_trainer(url, server, timeout_s=0.3)
    shutil.rmtree(url)
    Path(url).write_text("in the way")
    trainer.take_snapshot(1, weights(1))
    with pytest.raises(WeightUpdateError, match=says("weights.timeout_s=0.3 s", "store")):
        trainer.sender.wait_live(1, 60)
    assert server.label == "0"
