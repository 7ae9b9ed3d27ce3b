"""References to environment variables, and literal secrets, which are refused by their names."""

from typing import Any

import pytest

from pipelinerl.config.environment import REFERRED
from pipelinerl.config.load import compose, to_container, validate
from pipelinerl.config.paths import config_names
from pipelinerl.config.variables import check_secrets, references, variables_of, with_values
from pipelinerl.errors import ConfigError
from tests.says import says

TOKEN = "planted-sk-4711"


def server(**keys: Any) -> dict[str, Any]:
    return {"dataset_loader_params": {"servers": {"docs": keys}}}


@pytest.mark.parametrize(
    ("container", "key"),
    [
        (server(headers={"Authorization": f"Bearer {TOKEN}"}), "servers.docs.headers.Authorization"),
        (server(headers={"X-API-Key": TOKEN}), "docs.headers.X-API-Key"),
        (server(headers={"proxy_authorization": TOKEN}), "docs.headers.proxy_authorization"),
        (server(headers={"Private-Token": TOKEN}), "docs.headers.Private-Token"),
        (server(headers={"Cookie": f"session={TOKEN}"}), "docs.headers.Cookie"),
        (server(env={"GITHUB_TOKEN": TOKEN}), "docs.env.GITHUB_TOKEN"),
        (server(env={"PGPASSWORD": TOKEN}), "docs.env.PGPASSWORD"),
        (server(env={"AWS_SECRET_ACCESS_KEY": TOKEN}), "docs.env.AWS_SECRET_ACCESS_KEY"),
        (server(env={"OPENAI_API_KEY": TOKEN}), "docs.env.OPENAI_API_KEY"),
        (server(args=["mcp-remote", "--header", f"Authorization: Bearer {TOKEN}"]), "docs.args.2"),
        (server(args=["serve", "--api-key", TOKEN]), "docs.args.2"),
        (server(args=[f"--header=Authorization: Bearer {TOKEN}"]), "docs.args.0"),
        (server(args=["run", f"--env=GITHUB_TOKEN={TOKEN}"]), "docs.args.1"),
        (server(env={"DB_PASSWD": TOKEN}), "docs.env.DB_PASSWD"),
        ({"dataset_loader_params": {"api_keys": [TOKEN]}}, "dataset_loader_params.api_keys.0"),
        (server(args=[f"--api_key={TOKEN}"]), "docs.args.0"),
        (server(url=f"https://host/mcp?a=1&api_key={TOKEN}"), "docs.url"),
        (server(url=f"https://me:{TOKEN}@host/mcp"), "docs.url"),
        ({"dataset_loader_params": {"api_key": TOKEN}}, "dataset_loader_params.api_key"),
        ({"dataset_loader_params": {"openaiApiKey": TOKEN}}, "dataset_loader_params.openaiApiKey"),
        ({"dataset_loader_params": {"hf_token": TOKEN}}, "dataset_loader_params.hf_token"),
        ({"dataset_loader_params": {"password": 12345678}}, "dataset_loader_params.password"),
        ({"dataset_loader_params": {"secret": {"value": TOKEN}}}, "dataset_loader_params.secret.value"),
        ({"domains": [{"dataset_loader_params": {"secret": TOKEN}}]}, "domains.0.dataset_loader_params.secret"),
        ({"environments": [{"_target_": "a.B", "password": TOKEN}]}, "environments.0.password"),
        ({"streams": {"options": {"password": TOKEN}}}, "streams.options.password"),
        ({"streams": {"password": TOKEN}}, "streams.password"),
        ({"vllm_config": {"vllm_kwargs": {"api-key": TOKEN}}}, "vllm_config.vllm_kwargs.api-key"),
        ({"vllm_config": {"env": {"HF_TOKEN": TOKEN}}}, "vllm_config.env.HF_TOKEN"),
        ({"judges": [{"name": "j", "api_key": TOKEN}]}, "judges.0.api_key"),
        ({"my_api_key": TOKEN, "extra_keys": ["my_api_key"]}, "my_api_key"),
        ({"dataset_loader_params": {"api_key": {"env": "no name"}}}, "dataset_loader_params.api_key.env"),
    ],
)  # fmt: skip
def test_literal_secret_is_refused_by_its_name_and_not_shown(container: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=says(key, "holds a secret")) as refused:
        check_secrets(container)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "container",
    [
        server(headers={"Authorization": {"env": "DOCS_AUTH"}}, env={"API_TOKEN": {"env": "T"}}, args=[{"env": "T"}]),
        server(args=["--header", "Authorization:$AUTH", "auth", "token", "get", "--api-key-file", "key.txt"]),
        server(args=["--env=GITHUB_TOKEN", "--header=Authorization:$AUTH", "--max-tokens=12"]),
        server(args=["--api-key", {"env": "T"}], url="https://host/mcp?page=2", headers={"Accept": "text/html"}),
        {"dataset_loader_params": {"api_key": None, "password": "", "api_key_env": "MY_KEY", "use_password": True}},
        {"dataset_loader_params": {"eos_token": "</s>", "max_token": 5, "token": "x", "cost_per_token": 0.1}},
        {"llm": {"parameters": {"stop_token": 7}}, "environment": {"env": "CartPole-v1"}},
        {"dataset_loader_params": {"env": "maze"}, "weights": {"store": "s3://key:secret@bucket/run"}},
        {"my_key": {"env": "M"}, "actor": {"agent": {"key": {"env": "K"}}}, "extra_keys": ["my_key", "actor.agent"]},
    ],
)  # fmt: skip
def test_references_empty_values_and_tokens_of_a_vocabulary_are_accepted(container: dict[str, Any]) -> None:
    check_secrets(container)


def test_reference_where_none_is_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("judges.0.url", "JUDGE_URL", "dataset_loader_params")):
        check_secrets({"judges": [{"url": {"env": "JUDGE_URL"}}]})


def test_configurations_of_the_package_hold_no_secret_and_no_reference() -> None:
    for name in config_names():
        container = to_container(compose(name, ["output_dir=/tmp/x"]))
        check_secrets(container)
        assert references(container) == {}


@pytest.mark.parametrize(
    "override",
    [
        f"+dataset_loader_params.api_key={TOKEN}",
        f"+vllm_config.env.HF_TOKEN={TOKEN}",
        "+dataset_loader_params.api_key=${oc.env:PLANTED}",
        f"+streams.password={TOKEN}",
    ],
)
def test_secret_on_the_command_line_is_refused_before_types_are(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", TOKEN)
    with pytest.raises(ConfigError, match="holds a secret") as refused:
        validate(compose("quickstart", ["output_dir=/tmp/x", override]))
    assert TOKEN not in str(refused.value)


def test_values_take_the_place_of_references_and_are_never_logged() -> None:
    section = {"servers": {"docs": {"args": ["-y", {"env": "UNSEEN_A"}], "env": {"X": {"env": "UNSEEN_B"}, "y": 1}}}}
    found = with_values(section, {"UNSEEN_A": "a", "UNSEEN_B": "b"}, "dataset_loader_params")
    assert found == {"servers": {"docs": {"args": ["-y", "a"], "env": {"X": "b", "y": 1}}}}
    assert {"UNSEEN_A", "UNSEEN_B"} <= REFERRED


def test_roles_elsewhere_need_the_variables_of_references_and_the_key_of_judges_elsewhere() -> None:
    container = server(headers={"Authorization": {"env": "DOCS"}}, env={"A": {"env": "DOCS"}, "B": {"env": "B"}})
    assert variables_of(container) == ["B", "DOCS"]
    judges = [{"name": "one", "url": None}, {"name": "two", "url": "https://api.example/v1"}]
    assert variables_of({"judges": judges}) == ["OPENAI_API_KEY"]


def test_section_itself_is_no_reference() -> None:
    assert with_values({"env": "maze"}, {}, "domains.my.games.dataset_loader_params") == {"env": "maze"}
    assert with_values({"vllm_config": {"env": {"env": "maze"}}}, {}) == {"vllm_config": {"env": {"env": "maze"}}}


@pytest.mark.parametrize("env", [{}, {"DOCS_AUTH": ""}])
def test_missing_variable_is_named_with_its_key(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=says("dataset_loader_params.key", "DOCS_AUTH", "set it")):
        with_values({"key": {"env": "DOCS_AUTH"}}, env, "dataset_loader_params")
