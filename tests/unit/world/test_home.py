import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.world.home import CACHES, can_write, own_temporary_folder, temporary_folder, writable_folders

UNKNOWN = 12345
"""A user id without an entry, as OpenShift and `docker --user` give."""


def test_usual_user_keeps_home_and_caches(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "USER": "me"}
    inductor = f"{tmp_path}/.cache/pipelinerl/inductor"
    assert writable_folders(env) == {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": inductor}
    own = {"XDG_CACHE_HOME": f"{tmp_path}/c", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/mine"}
    assert writable_folders(env | own)["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mine"
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is used"


def test_only_unwritable_caches_move_and_downloaded_models_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = tmp_path / "home"
    (home / ".triton").mkdir(parents=True)
    (home / ".triton/cache").touch()  # nobody can make a folder there, root neither
    found = writable_folders({"HOME": str(home), "USER": "me"})
    assert found["TRITON_CACHE_DIR"] == f"{tmp_path}/pipelinerl-{os.getuid()}/TRITON_CACHE_DIR"
    assert (found["HOME"], found["HF_HOME"]) == (str(home), f"{home}/.cache/huggingface")
    assert found["VLLM_CACHE_ROOT"] == f"{home}/.cache/vllm"


def test_folder_given_with_a_tilde_is_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir("/proc")  # where nobody can make a folder `~`
    home = tmp_path / "home"
    home.mkdir()
    found = writable_folders({"HOME": str(home), "USER": "me", "HF_HOME": "~/models", "TORCH_HOME": "/dev/null/x"})
    assert found["HF_HOME"] == f"{home}/models"
    assert found["HF_DATASETS_CACHE"] == f"{home}/models/datasets"
    assert found["TORCH_HOME"] == f"{tmp_path}/pipelinerl-{os.getuid()}/TORCH_HOME"


@pytest.mark.parametrize("home", ["/", "/nonexistent/home", ""])
def test_folder_that_is_no_home_is_replaced(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    found = writable_folders({"HOME": home})
    assert found["HOME"] == f"{tmp_path}/pipelinerl-{os.getuid()}"
    assert found["USER"] == f"user{os.getuid()}"
    assert found.keys() == {"HOME", "USER", *(variable for variable, *_ in CACHES)}
    assert all(can_write(Path(found[variable])) for variable, *_ in CACHES)


def test_temporary_folder_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = own_temporary_folder()
    assert own_temporary_folder() == first
    assert first.stat().st_mode & 0o777 == 0o700
    first.chmod(0o777)
    assert own_temporary_folder() != first


def test_machine_without_a_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(ConfigError, match=r"No usable temporary directory .*: set TMPDIR to a folder"):
        temporary_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("home", ["/", "/root", None])
def test_process_of_an_unknown_user_gets_folders_that_it_can_write(home: str | None, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for folder in itertools.takewhile(lambda folder: folder != Path(tempfile.gettempdir()), tmp_path.parents):
        folder.chmod(0o755)
    source = Path(sys.modules["pipelinerl.world.home"].__file__ or "").read_text(encoding="utf-8")
    use = (
        "\nimport getpass, os, pathlib\nos.setgid(12345), os.setuid(12345)\n"
        "os.environ.update(writable_folders(os.environ))\n"
        "for name in ['HOME', *(variable for variable, *_ in CACHES)]:\n"
        "    pathlib.Path(os.environ[name]).mkdir(parents=True, exist_ok=True)\n"
        "    pathlib.Path(os.environ[name], 'file').touch()\n"
        "print(getpass.getuser(), pathlib.Path.home())"
    )
    env = {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})
    done = subprocess.run(
        [sys.executable, "-c", source + use], env=env, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.stdout.split() == [f"user{UNKNOWN}", f"{tmp_path}/pipelinerl-{UNKNOWN}"], done.stderr
