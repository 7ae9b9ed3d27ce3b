"""`environments` in each of the forms that PipelineRL's configurations have."""

from typing import Any

import pytest

from pipelinerl.config.environment_servers import count_replicas, environment_servers
from pipelinerl.config.load import compose, validate
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from tests.says import says

DICE = {"_target_": "my_module.Dice", "sides": 20}


def config_of(world: dict[str, Any] | None = None, **keys: Any) -> Config:
    cfg = compose("guessing", ["output_dir=x"])
    cfg.update(keys)
    cfg.world.update(world or {})
    return validate(cfg)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"environments": [{**DICE, "key": "dice"}]}, [("dice", 0)]),
        ({"environments": [DICE, {**DICE, "mode": "embedded"}, DICE]}, [("environment_0", 0), ("environment_2", 2)]),
        ({"environments": {"dice": DICE, "maze": DICE}}, [("dice", 0), ("maze", 1)]),
        ({"environment": DICE}, [("default", 0)]),
        ({"environment": {"anything": 1}}, []),
        ({"environment": DICE, "environments": [{**DICE, "key": "dice"}]}, [("dice", 0)]),
    ],
)
def test_every_form_is_read(keys: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    found = environment_servers(config_of(**keys))
    assert [(server.key, server.index) for server in found] == expected
    assert all(server.target == "my_module.Dice" for server in found)
    assert all(dict(server.arguments) == {"sides": 20} for server in found)


@pytest.mark.parametrize(
    ("entry", "world", "count"),
    [
        ({}, {}, 1),
        ({}, {"env_replicas": 3}, 3),
        ({}, {"env_replicas": 3, "env_replicas_per_actor": 2}, 8),
        ({"replicas": 5}, {"env_replicas": 3, "env_replicas_per_actor": 2}, 5),
        ({"replicas_per_actor": 3}, {"env_replicas": 7}, 12),
    ],
)
def test_number_of_servers_in_a_world_of_four_policy_servers(
    entry: dict[str, int], world: dict[str, int], count: int
) -> None:
    config = config_of(world, environments=[{**DICE, **entry}])
    assert count_replicas(environment_servers(config)[0], config.world, 4) == count


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"key": "dice"}, says("`_target_: my_module.MyEnvironment`")),
        ({"_target_": "Dice"}, says("'Dice'", "`_target_: my_module.MyEnvironment`")),
        ({**DICE, "mode": "far"}, says("'environment_0'", "mode='far'", "`remote`", "`embedded`")),
        ({**DICE, "replicas": 0}, says("'environment_0'", "replicas=0", "integer ≥ 1")),
        ({**DICE, "replicas": "two"}, says("'environment_0'", "replicas='two'", "integer ≥ 1")),
    ],
)
def test_wrong_entry_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_servers(config_of(environments=[entry]))


def test_a_key_belongs_to_one_entry() -> None:
    with pytest.raises(ConfigError, match="'dice' twice"):
        environment_servers(config_of(environments=[{**DICE, "key": "dice"}, {**DICE, "key": "dice"}]))
