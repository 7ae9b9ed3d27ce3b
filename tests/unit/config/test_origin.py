"""A run belongs to no working directory: what is made absolute, what follows a moved folder, and what stays a name."""

import json
import os
import sys
from pathlib import Path

import pytest

from pipelinerl.config.load import load_run_dictconfig
from pipelinerl.config.origin import absolute, copy_of, make_importable, origin_document, placeless, with_moved_paths
from pipelinerl.streams import run_key


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a run makes its modules importable for this process and its children."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data/train.jsonl", "/base/data/train.jsonl"),
        ("../rows.csv", "/rows.csv"),
        ("data/*.parquet", "/base/data/*.parquet"),
        ("rows.json@test", "/base/rows.json@test"),
        ("/there/rows.jsonl:main@test", "/there/rows.jsonl:main@test"),
        ("openai/gsm8k:main@train", "openai/gsm8k:main@train"),
        ("train", "train"),
        ("https://host/rows.json", "https://host/rows.json"),
        ("s3://bucket/rows.json", "s3://bucket/rows.json"),
        ("math::train@test", "math::train@test"),
        ("math::data/train.jsonl@test", "math::data/train.jsonl@test"),
        ("/mail/me@home/a:b/rows.jsonl", "/mail/me@home/a:b/rows.jsonl"),
        ("./me@home/rows.jsonl@train", "/base/me@home/rows.jsonl@train"),
        ("~nobody-here/rows.jsonl", "/base/~nobody-here/rows.jsonl"),
        ("my data/数学 #1.v2/rows.json", "/base/my data/数学 #1.v2/rows.json"),
    ],
)
def test_data_sets_in_files_are_absolute_and_names_stay(name: str, expected: str) -> None:
    section = {"train_dataset_names": [name], "test_dataset_names": [name]}
    found = absolute({**section, "domains": [section]}, Path("/base"))
    wanted = {"train_dataset_names": [expected], "test_dataset_names": [expected]}
    assert found == {**wanted, "domains": [wanted]}


def test_data_set_is_a_folder_if_it_is_there_or_looks_like_one_and_has_a_slash(tmp_path: Path) -> None:
    for folder in ("train", "data/rows", "openai/gsm8k"):
        (tmp_path / folder).mkdir(parents=True)
    names = ["train", "train/", "data/rows", "data/rows@test", "./later", "data/*", "openai/gsm8k:main@train", "Qwen/x"]
    expected = ["train", "{}/train", "{}/data/rows", "{}/data/rows@test", "{}/later", "{}/data/*"]
    expected = [name.format(tmp_path) for name in expected] + ["openai/gsm8k:main@train", "Qwen/x"]
    assert absolute({"train_dataset_names": names}, tmp_path)["train_dataset_names"] == expected


def test_model_is_a_folder_if_it_is_there_looks_like_one_or_will_be_built(tmp_path: Path) -> None:
    (tmp_path / "me" / "model").mkdir(parents=True)

    def model(path: str, **others: object) -> str:
        return absolute({"model_path": path, **others}, tmp_path)["model_path"]

    assert model("me/model") == f"{tmp_path}/me/model"
    assert model("Qwen/Qwen2.5-7B") == "Qwen/Qwen2.5-7B"
    assert model("./later") == f"{tmp_path}/later"
    assert model("toys/one", tiny_model={"recipe": "chat"}) == f"{tmp_path}/toys/one"
    assert model("~/x").startswith(str(Path.home()))


def test_models_of_teachers_and_judges_are_folders_like_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "models" / "a b").mkdir(parents=True)
    judge = {"name": "j", "model_path": "models/a b/", "url": None}
    found = absolute(
        {"judges": [judge, judge | {"url": "https://h/v1"}], "teachers": [{"model_path": "models/a b"}]}, tmp_path
    )
    assert [judge["model_path"] for judge in found["judges"]] == [f"{tmp_path}/models/a b", "models/a b/"]
    assert found["teachers"] == [{"model_path": f"{tmp_path}/models/a b"}]


def test_paths_among_the_users_own_parameters_are_absolute_where_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.txt").touch()
    (tmp_path / "train").mkdir()
    own = {"prompt": "prompts/a.txt", "deep": [{"file": "prompts"}], "name": "train", "text": "a.txt", "n": 3}
    found = absolute(
        {"dataset_loader_params": own, "weights": {"store": "w"}, "debug": {"streams_from": "../old"}}, tmp_path
    )
    kept = {"name": "train", "text": "a.txt", "n": 3, "deep": [{"file": "prompts"}]}
    assert found["dataset_loader_params"] == {**kept, "prompt": f"{tmp_path}/prompts/a.txt"}
    assert found["weights"]["store"] == f"{tmp_path}/w"
    assert found["debug"]["streams_from"] == str(tmp_path.parent / "old")
    assert absolute({"weights": {"store": "s3://b/x"}}, tmp_path)["weights"]["store"] == "s3://b/x"


def test_chat_template_is_a_file_if_it_is_there_and_a_text_stays(tmp_path: Path) -> None:
    """A text of 300 characters is longer than the name of a file may be, which was a traceback."""
    (tmp_path / "own.jinja").write_text("")
    found = absolute({"llm": {"chat_template": "own.jinja"}, "test_llm": {"chat_template": "{{ x }}" * 50}}, tmp_path)
    assert found["llm"]["chat_template"] == str(tmp_path / "own.jinja")
    assert found["test_llm"]["chat_template"] == "{{ x }}" * 50


def test_paths_within_a_moved_folder_follow_it_and_others_stay() -> None:
    saved = {"output_dir": "/a/run", "model_path": "/a/run/model", "x": ["/a/run", "/a/runs/1", "/b"], "n": 1}
    expected = {"output_dir": "/c/d", "model_path": "/c/d/model", "x": ["/c/d", "/a/runs/1", "/b"], "n": 1}
    assert with_moved_paths(saved, Path("/c/d")) == expected
    assert with_moved_paths(saved, Path("/a/run")) == saved


def test_two_nodes_that_start_one_run_from_their_own_folders_agree() -> None:
    first = {"output_dir": "/a/run", "model_path": "/a/run/model", "data": ["/a/proj/x.jsonl", "/data/y"], "seed": 1}
    second = {"output_dir": "/b/run", "model_path": "/b/run/model", "data": ["/b/x.jsonl", "/data/y"], "seed": 1}
    assert placeless(first, Path("/a/proj")) == placeless(second, Path("/b"))
    assert placeless(first, Path("/a/proj")) != placeless({**second, "seed": 2}, Path("/b"))


def made(run_dir: Path) -> Path:
    (run_dir / "conf").mkdir(parents=True)
    (run_dir / "conf" / "config.yaml").write_text(f"output_dir: {run_dir}\nmodel_path: {run_dir}/model\n")
    (run_dir / "conf" / "origin.json").write_text(origin_document(run_dir))
    return run_dir


def test_a_moved_run_keeps_its_name_and_reads_its_own_model(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    key = run_key(run)
    there = run.rename(tmp_path / "elsewhere")
    assert run_key(there) == key
    assert run_key(tmp_path / "another") != key
    assert load_run_dictconfig(there).model_path == f"{there}/model"
    assert copy_of(there) is None
    assert json.loads(origin_document(there))["run_dir"] == str(run)


def test_a_copy_is_told_from_a_run_that_was_moved(tmp_path: Path) -> None:
    run, copy = made(tmp_path / "run"), tmp_path / "copy"
    (copy / "conf").mkdir(parents=True)
    for file in ("config.yaml", "origin.json"):
        (copy / "conf" / file).write_text((run / "conf" / file).read_text())
    assert copy_of(copy) == run
    assert copy_of(run) is None


def test_modules_of_the_run_can_be_imported_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/gone")
    run = made(tmp_path / "run")
    assert json.loads((run / "conf" / "origin.json").read_text())["import_path"] == [str(project), f"{tmp_path}/gone"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_importable(run)
    assert sys.path[-1] == str(project)
    assert f"{tmp_path}/gone" not in sys.path
    assert os.environ["PYTHONPATH"] == f"{tmp_path}/gone:{project}"
