"""Chooses the sandbox of a run: the user's own, SandboxFusion, or the embedded one."""

import asyncio
import os
from weakref import WeakKeyDictionary

import aiohttp
from omegaconf import DictConfig

from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.sandbox.fusion import RUN_TIMEOUT_S, SandboxFusion
from pipelinerl.domains.sandbox.protocol import ProgramRunner
from pipelinerl.domains.sandbox.runner import Sandbox

ENDPOINT_VARIABLE = "SANDBOX_ENDPOINT"

_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def runner_of(cfg: DictConfig, session: aiohttp.ClientSession) -> ProgramRunner:
    """Returns the run's sandbox.

    It is the result of the function that ``sandbox`` in the configuration names, else SandboxFusion if an endpoint is
    configured, else the embedded sandbox, one per event loop.
    """
    if named := cfg.get("sandbox"):
        return resolve_function(named)(cfg, session)
    endpoint = cfg.get("sandbox_endpoint") or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint:
        return SandboxFusion(endpoint, session, run_timeout_s=cfg.get("sandbox_timeout_s") or RUN_TIMEOUT_S)
    return _sandboxes.setdefault(asyncio.get_running_loop(), Sandbox())
