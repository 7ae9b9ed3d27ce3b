"""The tiny model with which a run may begin: whether it must be built, and its builder, which starts with the roles."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError


def discard_broken_model(config: Config, say: Callable[[str], None]) -> None:
    """Remove a tiny model that a power cut left incomplete, so that it is built again."""
    from pipelinerl.tiny_model.builder import discard_broken  # imports the domains

    broken = discard_broken(Path(config.model_path)) if config.tiny_model is not None else None
    if broken:
        say(f"`model_path` {config.model_path!r} is incomplete ({broken}), as after a power cut: it is built again")


def needs_tiny_model(config: Config, overrides: Sequence[str]) -> bool:
    """Whether the recipe must build `model_path` first. `overrides` are the arguments of the command line.

    A `model_path` typed on the command line is never built silently, because a misspelt path would train a toy.
    """
    if config.tiny_model is None or Path(config.model_path).exists():
        return False
    typed = any(re.match(r"\+*model_path=", override) for override in overrides)
    if typed and not any(re.match(r"\+*tiny_model", override) for override in overrides):
        given = os.path.relpath(config.model_path)
        hub = ", add `tiny_model=null` if it is a Hugging Face name" if given.count("/") == 1 else ""
        raise ConfigError(
            f"`model_path` is {given!r}: it does not exist; correct it{hub}, or build it with `python -m "
            f"pipelinerl.tiny_model --recipe {config.tiny_model.recipe} --seed "
            f"{config.tiny_model.seed} --out {given}`"
        )
    return True


async def build_tiny_model(config: Config, env: Mapping[str, str]) -> str | None:
    """Build `model_path` in a process of its own, which imports torch. Returns why it could not be built, or None.

    Args:
        env: environment that contains the run's mark, so that the builder ends with the run.
    """
    recipe = config.tiny_model
    assert recipe is not None
    argv = ["-m", "pipelinerl.tiny_model", "--out", config.model_path, "--recipe", recipe.recipe]
    argv += ["--seed", str(recipe.seed), "--if-missing"]  # another node may have built it first in a shared folder
    for name, value in recipe.params.items():
        argv += ["--param", f"{name}={json.dumps(value)}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), limit_s := config.launcher.startup_timeout_s)
    except TimeoutError:
        process.kill()
        return f"`tiny_model` did not build {config.model_path!r} within launcher.startup_timeout_s={limit_s:g} s"
    if process.returncode == 0:
        return None
    last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return f"`tiny_model` could not build {config.model_path!r}: {last.removeprefix('error: ')}"
