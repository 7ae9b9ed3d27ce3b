"""Corrects the environment variables of a program of a run at its start: the launcher, or a role that starts alone."""

import os
from collections.abc import MutableMapping

from pipelinerl.config.environment import checked_variables, drop_services
from pipelinerl.world.home import temporary_folder, writable_folders
from pipelinerl.world.proxies import bypass


def complete(env: MutableMapping[str, str]) -> list[str]:
    """Correct ``env`` in place: no proxy to the run itself, no names of Kubernetes' Services, folders to write in.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: a variable has a wrong value, or there is no temporary folder.
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
