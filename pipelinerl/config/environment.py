"""The environment variables that this project reads, each with its type. Imports nothing heavy: every role reads them.

`VARIABLES` declares them all. Their values are checked once, where the launcher and each role start.
"""

import codecs
import hashlib
import hmac
import locale
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from pipelinerl.errors import ConfigError

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
"""As `dry_run=true`."""
PROGRAMS = ("VLLM", "RAY", "WANDB", "NCCL", "TORCH", "GRADIO")
"""First words of programs in a role's process that take variables with their name for settings."""
JUDGE_KEY_VARIABLE = "OPENAI_API_KEY"
"""Key of the judges with a `url`."""
HIDDEN = "***"
"""What stands in the place of a secret."""
NEVER_LOGGED = (
    *(SECRET_VARIABLE, REDIS_PASSWORD_VARIABLE, JUDGE_KEY_VARIABLE, "PIPELINERL_LLM_TOKEN", "WANDB_API_KEY"),
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DAYTONA_API_KEY", "E2B_API_KEY", "MODAL_TOKEN_SECRET", "RAY_AUTH_TOKEN"),
)
"""Variables whose values no log shows."""
REFERRED: set[str] = set()
"""More of them: those to which a configuration that this process has read refers."""
MIN_SECRET_CHARS = 16
"""Shortest `PIPELINERL_SECRET`: 64 bits, if it is written in hexadecimal digits."""


class Kind(NamedTuple):
    """A type of environment variables."""

    pattern: str
    """Regular expression of the whole value. Case does not matter."""
    allowed: str
    """The same in words."""


def one_of(*values: str) -> Kind:
    return Kind("|".join(values), f"{', '.join(values[:-1])} or {values[-1]}")


TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
BOOLEAN = one_of(*TRUE, *FALSE)
NUMBER = Kind(r"\d+", "a whole number")
COUNTS = Kind(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", "a whole number of at least 1, or several such as 4,2")
_DEVICE = r"\s*(-?\d+|(GPU|MIG)-[\w/-]+|none|void|NoDevFiles|)\s*"
DEVICES = Kind(f"{_DEVICE}(,{_DEVICE})*", "numbers or names of GPUs, such as 0,1 or GPU-8f2c,GPU-2a7d")
ADDRESS = Kind(r"https?://\S+", "an address such as http://127.0.0.1:8080")
TEXT = Kind("(?s).*", "text")
VARIABLES: Mapping[str, tuple[Kind, str]] = {
    DRY_RUN_VARIABLE: (BOOLEAN, "as `dry_run=true`"),
    SECRET_VARIABLE: (TEXT, f"secret of a run on several machines, at least {MIN_SECRET_CHARS} characters"),
    REDIS_PASSWORD_VARIABLE: (TEXT, "password of an external redis"),
    "PIPELINERL_HOSTS": (TEXT, "host names of the nodes in their order, with commas"),
    "PIPELINERL_CACHE": (TEXT, "folder of tiny models that were built before"),
    "PIPELINERL_LLM_TOKEN": (TEXT, "default of `TrainableLLM.api_token`"),
    CA_VARIABLE: (TEXT, "set by the launcher: certificate of the authority of a run with TLS"),
    RUN_VARIABLE: (TEXT, "set by the launcher: mark of its processes"),
    ROLE_VARIABLE: (TEXT, "set by the launcher: mark of a role's processes"),
    RANKS_FILE_VARIABLE: (TEXT, "set by the trainer: where the ranks of a node meet"),
    STRANGERS_VARIABLE: (BOOLEAN, "set by a server that other nodes reach"),
    "PIPELINERL_END_WITH_PARENT": (BOOLEAN, "set by a server for its processes"),
    "PIPELINERL_RECORD_EXPERTS": (BOOLEAN, "set by a server with `finetune.router_replay`"),
    "WORLD_SIZE": (NUMBER, "nodes of the run, from torchrun or by hand. In a role: trainer ranks"),
    "RANK": (NUMBER, "this node's number, or the trainer rank's"),
    "GROUP_RANK": (NUMBER, "this node's number, from torchrun"),
    "LOCAL_RANK": (NUMBER, "a trainer rank's number on its node"),
    "LOCAL_WORLD_SIZE": (NUMBER, "launchers on this node, from torchrun: 1"),
    "TORCHELASTIC_RUN_ID": (TEXT, "identity of a run under torchrun"),
    "MASTER_ADDR": (TEXT, "identity of a run on several nodes. In a trainer: where its ranks meet"),
    "MASTER_PORT": (TEXT, "likewise"),
    "SLURM_NODEID": (NUMBER, "this node's number, from SLURM"),
    "SLURM_LOCALID": (NUMBER, "this task's number on its node"),
    "SLURM_STEP_NODELIST": (TEXT, "the nodes of the step"),
    "SLURM_JOB_NODELIST": (TEXT, "the nodes of the job"),
    "SLURM_STEP_TASKS_PER_NODE": (TEXT, "one launcher per node is started"),
    "SLURM_JOB_ID": (TEXT, "identity of the run"),
    "SLURM_STEP_ID": (TEXT, "likewise"),
    "CUDA_VISIBLE_DEVICES": (DEVICES, "GPUs that the run may use"),
    "OMP_NUM_THREADS": (COUNTS, "threads of torch on GPUs' hosts. Without a GPU the run sets it"),
    "MKL_NUM_THREADS": (COUNTS, "likewise, of MKL"),
    "OPENBLAS_NUM_THREADS": (COUNTS, "likewise, of NumPy"),
    "PYTORCH_ALLOC_CONF": (TEXT, "torch's allocator, instead of what the run sets"),
    "GLOO_SOCKET_IFNAME": (TEXT, "network interface, instead of what the run finds"),
    "NCCL_SOCKET_IFNAME": (TEXT, "likewise"),
    "VLLM_HOST_IP": (TEXT, "set by the launcher: where a server listens"),
    "VLLM_PLUGINS": (TEXT, "vLLM's plugins. Servers add ours to the list"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (BOOLEAN, "allows requests beyond the model's positions"),
    "HF_HUB_OFFLINE": (BOOLEAN, "the hub is not asked"),
    "TRANSFORMERS_OFFLINE": (BOOLEAN, "likewise"),
    "HF_DATASETS_OFFLINE": (BOOLEAN, "likewise, for data sets"),
    "WANDB_MODE": (
        one_of("online", "offline", "disabled", "run", "dryrun"),
        "what is sent to wandb, if that is less than what `wandb.mode` says. `run` is online, `dryrun` is offline",
    ),
    "WANDB_API_KEY": (TEXT, "key of wandb"),
    "WANDB_BASE_URL": (ADDRESS, "wandb's server"),
    "NETRC": (TEXT, "file of keys, instead of `~/.netrc`"),
    "OPENAI_API_KEY": (TEXT, "key of judges with a `url`"),
    "OPENAI_BASE_URL": (ADDRESS, "set for programs of agents: the policy's address"),
    "SANDBOX_ENDPOINT": (ADDRESS, "SandboxFusion service, if `sandbox_endpoint` is null"),
    "RAY_AUTH_MODE": (one_of("token", "disabled", "k8s"), "how a Ray cluster knows who may use it"),
    "TMPDIR": (TEXT, "folder of the run's temporary files"),
    "PYTHONPATH": (TEXT, "folders of your own modules"),
    "HOME": (TEXT, "folder of the user. Where it cannot be used, a temporary one is"),
    "XDG_CACHE_HOME": (TEXT, "folder of caches, by default `~/.cache`"),
    "XDG_CONFIG_HOME": (TEXT, "folder of settings, by default `~/.config`"),
}
"""Name: type and meaning."""


def checked_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the booleans among the variables `env` as `1` or `0`, which every library reads alike.

    Raises:
        ConfigError: a value is not of its variable's type. An empty one counts as not set.
    """
    given = {name: kind for name, (kind, _) in VARIABLES.items() if env.get(name)}
    wrong = [name for name, kind in given.items() if not re.fullmatch(kind.pattern, env[name], re.IGNORECASE)]
    if wrong:
        faults = "; ".join(f"{name}={env[name]!r}: it may be {given[name].allowed}" for name in wrong)
        raise ConfigError(f"environment variable {faults}")
    return {name: str(int(env[name].lower() in TRUE)) for name, kind in given.items() if kind is BOOLEAN}


def is_on(env: Mapping[str, str], name: str) -> bool:
    """Whether a boolean variable is set and true."""
    return env.get(name, "").lower() in TRUE


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


def in_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if its locale has another encoding. Call it before all else."""
    if codecs.lookup(locale.getencoding()).name != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
