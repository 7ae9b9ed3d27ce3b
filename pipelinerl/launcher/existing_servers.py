"""Asks the servers of `debug.existing_llms` for a score before the start, and compares their model with the run's."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.plan.model_shape import find_longrope_limit
from pipelinerl.records.answers import ANSWER_PATH, AnswerRequest
from pipelinerl.streams.codec import Codec
from pipelinerl.world.proxies import own_client

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 60.0
"""The first request to a server that has just started is slow: it compiles kernels."""
REFUSED, UNKNOWN = (401, 403), (404, 405)

_codec: Codec[AnswerRequest] = Codec(AnswerRequest)


class _Models(msgspec.Struct):
    """The part of `/v1/models` that is read."""

    data: list[dict[str, Any]]


def check_existing(config: Config, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return warnings about servers of another model.

    Raises:
        ConfigError: a server does not answer as the servers of this project do.
    """
    urls = [url.rstrip("/") for url in config.debug.existing_llms]
    if not urls:
        return []
    import httpx  # slow, and few runs have such servers

    secret = env.get(SECRET_VARIABLE, "")
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    with httpx.Client(timeout=TIMEOUT_S, headers=headers, **own_client()) as client:
        return [warning for url in urls for warning in _check(client, url, config)]


def _check(client: "httpx.Client", url: str, config: Config) -> list[str]:
    import httpx

    key = f"`debug.existing_llms` has {url}"
    request = AnswerRequest(token_ids=np.zeros(2, dtype=np.int32), scores=True)
    try:
        status = client.post(url + ANSWER_PATH, content=_codec.encode(request)).status_code
        models = client.get(f"{url}/v1/models") if status == httpx.codes.OK else None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"{key}, which does not answer ({type(error).__name__}); debug.mode=servers starts servers and prints "
            "their URLs"
        ) from error
    if status in REFUSED:
        raise ConfigError(f"{key}, which needs a secret: set {SECRET_VARIABLE} to the one of its run")
    if status in UNKNOWN:
        raise ConfigError(f"{key}, which is no server of this project; debug.mode=servers starts servers")
    if models is None:
        raise ConfigError(f"{key}, which answers a request with status {status}; see its log")
    try:
        entries = msgspec.json.decode(models.content, type=_Models).data
    except (ValueError, RecursionError):
        said = f"status {models.status_code} at /v1/models"
        return [f"{url} does not say which model it serves ({said}): is it model_path?"]
    return [warning for entry in entries for warning in compare(url, entry, config)]


def compare(url: str, entry: Mapping[str, object], config: Config) -> list[str]:
    """Compare an entry of `/v1/models` with the configuration. Returns warnings.

    Raises:
        ConfigError: the server takes other factors of longrope than the trainer.
    """
    warnings = []
    served, wanted = str(entry.get("root") or ""), config.model_path
    if served and Path(served).name != Path(wanted).name:
        warnings.append(
            f"{url} serves {served}, and model_path is {wanted}, whose tokenizer this run uses: are they the same?"
        )
    longest, context = entry.get("max_model_len"), config.vllm_config.vllm_kwargs.get("max-model-len")
    if not isinstance(longest, int) or not isinstance(context, int):
        return warnings
    limit = find_longrope_limit(wanted)
    if limit is not None and (longest > limit) != (context > limit):
        raise ConfigError(
            f"{url} has max_model_len {longest}, and vllm_config.vllm_kwargs.max_model_len is {context}: the model's "
            f"original_max_position_embeddings, {limit}, is between them, so the server and the trainer would take "
            "different factors of longrope; set the second to the server's"
        )
    if longest < context:
        warnings.append(
            f"{url} takes {longest} tokens, and vllm_config.vllm_kwargs.max_model_len is {context}: longer ones fail"
        )
    return warnings
