"""The address of a run, and how a role starts that has only this address.

    results/guessing                           a folder that the role shares with the launcher
    redis://10.0.0.1:15000/guessing-0a1b2c     the run's redis server and the run's name on it (rediss:// with TLS)

A role that starts with a redis address copies configuration and world from there into a run folder of its own, whose
streams and leases are on the server. The password comes from the environment.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE, SECRET_VARIABLE, redis_password
from pipelinerl.config.paths import RUN_ADDRESS, RUN_CONFIG
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DeadlineError
from pipelinerl.membership.stores import FolderStore, LeaseStore, RedisStore, StoreAwayError, StoreRefusedError
from pipelinerl.world.disk import replace_file
from pipelinerl.world.map import WORLD_FILE, WorldMap
from pipelinerl.world.tls import redis_options

log = logging.getLogger(__name__)

WAIT_S = 600.0
"""A role that starts alone waits this long for the launcher: platforms may start it minutes before."""
POLL_S = 0.5
"""Between two questions to a redis that is starting."""
DOCUMENTS: Mapping[str, Path] = {"config": Path(RUN_CONFIG), "world": WORLD_FILE}


@dataclass(frozen=True)
class RedisAddress:
    """A run on a redis server."""

    host: str
    port: int
    run_id: str
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.tls}://{host}:{self.port}/{self.run_id}"


def parse_address(text: str) -> Path | RedisAddress:
    """Parse a run's address.

    Raises:
        ConfigError: it is neither a folder's name nor `redis://HOST:PORT/RUN`.
    """
    if "://" not in text:
        return Path(text)
    form = "write redis://HOST:PORT/RUN, as the launcher prints it at its start"
    parts = urlsplit(text)
    if parts.password or parts.username:
        raise ConfigError(f"a run's address holds no password: set {REDIS_PASSWORD_VARIABLE}, and {form}")
    try:
        port = parts.port
    except ValueError:
        port = None
    run_id = parts.path.removeprefix("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or not port or not run_id or "/" in run_id:
        raise ConfigError(f"{text!r} is not the address of a run: {form}")
    return RedisAddress(parts.hostname, port, run_id, tls=parts.scheme == "rediss")


def address_of(cfg: Config, run_dir: Path, world: WorldMap | None = None) -> Path | RedisAddress:
    """Return the address of a run's leases, which are in the same place as its streams.

    Args:
        world: the map, if it is not in the run folder yet.
    """
    if cfg.streams.backend != "redis":
        return run_dir
    from pipelinerl.streams.redis import redis_place

    return RedisAddress(*redis_place(cfg, run_dir, world=world), tls=cfg.world.tls)


def open_store(address: Path | RedisAddress, env: Mapping[str, str] = os.environ) -> LeaseStore:
    """Open the store of the leases at an address. The redis password is taken from `env`."""
    return FolderStore(address) if isinstance(address, Path) else redis_store(address, env)


def redis_store(address: RedisAddress, env: Mapping[str, str] = os.environ) -> RedisStore:
    options = {"host": address.host, "port": address.port, "password": redis_password(env)}
    return RedisStore(options | (redis_options(env) if address.tls else {}), address.run_id)


def publish_run(address: RedisAddress, run_dir: Path) -> None:
    """Publish configuration and world of a run folder on redis, for roles that have only the address.

    Raises:
        StoreAwayError: the server does not answer.
    """
    redis_store(address).publish_documents({name: (run_dir / path).read_bytes() for name, path in DOCUMENTS.items()})


def refused_by(error: StoreRefusedError) -> ConfigError:
    """The refusal of a process without the run's secret, for which waiting does not help."""
    return ConfigError(f"{error}: set {SECRET_VARIABLE} (or {REDIS_PASSWORD_VARIABLE}) to that of the run")


def fetch_run(address: RedisAddress, folder: Path, wait_s: float = WAIT_S) -> Path:
    """Wait until the run is published at this address, copy it into the folder, and return the folder.

    Raises:
        ConfigError: the folder belongs to another run, or the server refuses the password.
        DeadlineError: the server did not answer within `wait_s`, or the run was not published.
    """
    mark = folder / RUN_ADDRESS
    if (folder / RUN_CONFIG).exists() and (
        not mark.is_file() or mark.read_text(encoding="utf-8").strip() != str(address)
    ):
        raise ConfigError(f"--run-dir {folder} belongs to another run than {address}: choose another folder")
    store = redis_store(address)
    deadline = time.monotonic() + wait_s
    reason = "it knows no such run"
    while True:
        try:
            documents = store.documents()
        except StoreRefusedError as error:
            raise refused_by(error) from error
        except StoreAwayError as error:
            documents, reason = {}, str(error)
        if documents.keys() >= DOCUMENTS.keys():
            break
        if time.monotonic() > deadline:
            raise DeadlineError(f"{address} was not published within {wait_s:g} s: {reason}")
        time.sleep(POLL_S)
    for name, path in DOCUMENTS.items():
        (folder / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(folder / path, documents[name], mode=0o600)
    replace_file(mark, f"{address}\n", mode=0o600)
    return folder
