"""The environment servers that a configuration asks for: the entries of `environments`, checked. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl.config.names import TARGET
from pipelinerl.config.sections import Config, WorldSection
from pipelinerl.errors import ConfigError

OURS = ("key", "mode", "replicas", "replicas_per_actor")
"""Keys of an entry that its class does not get."""
REMOTE, EMBEDDED = "remote", "embedded"


@dataclass(frozen=True, kw_only=True)
class EnvironmentServer:
    """One entry of `environments`."""

    key: str
    """Name that a domain asks for."""
    index: int
    """Place in `environments`."""
    target: str
    """Dotted name of a class with a method `launch(port)`."""
    arguments: Mapping[str, Any]
    """What the class is made with."""
    replicas: int | None
    """Servers in the run. None = as `replicas_per_actor` or `world` says."""
    replicas_per_actor: int | None
    """Servers per policy server."""


def environment_servers(cfg: Config) -> tuple[EnvironmentServer, ...]:
    """Return the environments that run as processes of their own. Entries of `mode: embedded` are the domain's.

    Raises:
        ConfigError: an entry has no `_target_`, has an impossible number, or a key twice.
    """
    found = [
        _entry(str(entry.get("key") or entry.get("name") or f"environment_{index}"), index, entry)
        for index, entry in enumerate(cfg.environments)
        if entry.get("mode", REMOTE) != EMBEDDED
    ]
    keys = [server.key for server in found]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"`environments` has the key {key!r} twice: give every entry a `key` of its own")
    return tuple(found)


def count_replicas(server: EnvironmentServer, world: WorldSection, policy_servers: int) -> int:
    """Return how many processes of this environment the run has, in a world with so many policy servers."""
    per_actor = server.replicas_per_actor or (None if server.replicas else world.env_replicas_per_actor)
    return per_actor * policy_servers if per_actor else server.replicas or world.env_replicas


def _entry(key: str, index: int, entry: Mapping[str, Any]) -> EnvironmentServer:
    where = f"`environments` entry {key!r}"
    target = entry.get(TARGET)
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"{where} is {entry!r}: it needs `{TARGET}: my_module.MyEnvironment`")
    if entry.get("mode", REMOTE) != REMOTE:
        raise ConfigError(f"{where} has mode={entry['mode']!r}: use `{REMOTE}` or `{EMBEDDED}`")
    for name in ("replicas", "replicas_per_actor"):
        number = entry.get(name)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{where} has {name}={number!r}: it must be an integer ≥ 1")
    return EnvironmentServer(
        key=key,
        index=index,
        target=target,
        arguments={name: value for name, value in entry.items() if name not in (*OURS, TARGET)},
        replicas=entry.get("replicas"),
        replicas_per_actor=entry.get("replicas_per_actor"),
    )
