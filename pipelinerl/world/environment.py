"""What every program of a run does first with the variables of its environment: the launcher, and a role alone."""

import os
from collections.abc import MutableMapping

from pipelinerl.config.environment import checked_variables, drop_services
from pipelinerl.world.home import temporary_folder, writable_folders
from pipelinerl.world.proxies import bypass


def complete(env: MutableMapping[str, str]) -> list[str]:
    """Correct ``env`` in place: no proxy to the run itself, no names of Kubernetes' Services, folders to write in.

    Returns:
        What the user should know of it, a line each.

    Raises:
        ConfigError: a variable has a value that it may not have, or there is no temporary folder.
    """
    bypass(env)
    notes = []
    if dropped := drop_services(env):
        notes.append(
            f"dropped, as Kubernetes sets them beside a Service whose name is a program's: {', '.join(dropped)}"
        )
    env.update(checked_variables(env))
    temporary_folder()
    folders = writable_folders(env)
    if "XDG_CACHE_HOME" in folders:
        moved = ", ".join(f"{name}={folders[name]}" for name in ("HOME", "XDG_CACHE_HOME"))
        notes.append(f"user {os.getuid()} cannot write its home or a cache in it: this run uses {moved}")
    env.update(folders)
    return notes
