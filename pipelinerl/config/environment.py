"""Environment variables of a run's processes, set by the launcher. Imports nothing heavy: every role may read them."""

import hashlib
import hmac
import re
from collections.abc import Mapping, MutableMapping

SECRET_VARIABLE = "PIPELINERL_SECRET"
"""Bearer token of the control endpoints; roles on several machines get it from outside, the same everywhere."""
REDIS_PASSWORD_VARIABLE = "PIPELINERL_REDIS_PASSWORD"
RUN_VARIABLE = "PIPELINERL_RUN"
"""A random mark of all processes of a launch."""
ROLE_VARIABLE = "PIPELINERL_ROLE"
"""`<that mark>/<job>`, inherited by all that a role starts."""
CA_VARIABLE = "PIPELINERL_CA"
"""The certificate (PEM) of the authority that signed the servers' certificates. Set in a run with TLS."""
STRANGERS_VARIABLE = "PIPELINERL_STRANGERS"
"""Set if an inference server listens where processes outside its node can reach it."""
RANKS_FILE_VARIABLE = "PIPELINERL_RANKS_FILE"
"""The file in which the trainer ranks of one node meet."""
DRY_RUN_VARIABLE = "DRY_RUN"
"""`1` = as `dry_run=true`."""
PROGRAMS = ("VLLM", "RAY", "WANDB", "NCCL", "TORCH", "GRADIO")
"""First words of programs in a role's process that take variables with their name for settings."""
SECRET_VARIABLES = (SECRET_VARIABLE, REDIS_PASSWORD_VARIABLE)
MIN_SECRET_CHARS = 16


def derived_password(secret: str) -> str:
    """The redis password of a run whose roles share one secret."""
    return hmac.new(secret.encode(), b"redis", hashlib.sha256).hexdigest()


def secret_mark(secret: str) -> str:
    """A mark by which launchers see that they have the same secret. Nothing else follows from it."""
    return hmac.new(secret.encode(), b"launchers", hashlib.sha256).hexdigest()[:16]


def redis_password(env: Mapping[str, str]) -> str | None:
    """Returns the password in the environment, else the one derived from the secret. None if there is neither."""
    secret = env.get(SECRET_VARIABLE)
    return env.get(REDIS_PASSWORD_VARIABLE) or (derived_password(secret) if secret else None)


def drop_services(env: MutableMapping[str, str]) -> list[str]:
    """Deletes what Kubernetes sets beside a Service that is called like one of `PROGRAMS`, and returns the names.

    A Service `vllm` makes `VLLM_PORT=tcp://10.0.0.7:8000` and its brothers in every pod of its namespace.
    """
    found = set[str]()
    for name, value in env.items():
        service = name.removesuffix("_PORT")
        if service != name and service.split("_")[0] in PROGRAMS and re.match("(tcp|udp|sctp)://", value):
            of_service = rf"{re.escape(service)}_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
            found |= {other for other in env if re.fullmatch(of_service, other)}
    for name in found:
        del env[name]
    return sorted(found)
