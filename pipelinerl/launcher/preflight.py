"""Checks of model, domain and objective before the start. The user's code runs in a process of its own (`trial`)."""

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipelinerl.chat.vocabulary import check_same_vocabulary
from pipelinerl.config.engine import engine_of
from pipelinerl.config.environment import is_on
from pipelinerl.config.rules.objective import objective_is_default
from pipelinerl.config.sections import Config, JudgeSection
from pipelinerl.config.servers import max_model_len, option_of, scoring_models
from pipelinerl.domains.judge_prompt import judge_messages
from pipelinerl.errors import ConfigError, DatasetError, DomainError
from pipelinerl.launcher.chat_trial import parsers_of
from pipelinerl.launcher.trial import TrialError, TrialTimeoutError, run_trial
from pipelinerl.plan.model_shape import find_context_limit

DOMAIN_TIMEOUT_S = 14.0
"""For the domain's own code. The user waits for it at every start, and a longer one only gives a warning."""
TORCH_TIMEOUT_S = 300.0
"""For trials that import torch. One that takes longer on a machine that can train never ends."""
HUB_TIMEOUT_S = 8.0
"""A start waits no longer for a hub that does not answer."""
COMPANIONS = ("torchvision", "torchaudio")
"""Packages of torch that transformers imports where they are installed."""
CHARS_PER_TOKEN = 4
"""Approximate, for English."""
PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types for which every layout and attention implementation is known to be correct (tests/numerics)."""
PLAIN_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rope whose frequencies depend on no length."""
MIXED_TYPES = ("minimax",)
"""Model types that multiply by float32 constants, which autocast narrows and fsdp2's half precision does not."""
MODEL_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_domain(container: Mapping[str, Any]) -> list[str]:
    """Import the domain's functions, load its problems and try its rollouts. Returns warnings.

    Args:
        container: the configuration with the world's `jobs`.

    Raises:
        DomainError: the run would fail.
    """
    module = ("-m", "pipelinerl.launcher.domain_check", "--timeout-s", str(DOMAIN_TIMEOUT_S))
    try:
        verdict = run_trial(*module, job=container, timeout_s=2 * DOMAIN_TIMEOUT_S)
    except TrialTimeoutError as slow:  # a busy machine is no reason against a run
        return [f"the domain's functions were not checked: the check did not end within {slow.timeout_s:g} s"]
    except TrialError as error:
        raise DomainError(f"the domain's code ended the process that imported it ({error.how}): {error}") from error
    if verdict["refusal"]:
        raise DatasetError(verdict["refusal"], *verdict["names"])
    return list(verdict["warnings"])


def check_parsers(config: Config, container: Mapping[str, Any]) -> None:
    """Make vLLM's parsers of answers with the model's tokenizer, in a separate process that imports vLLM."""
    if not parsers_of(config):
        return
    what = "the trial of `llm.tool_parser` and `llm.reasoning_parser`"
    try_in_process(what, "-m", "pipelinerl.launcher.chat_trial", job=container)


def try_in_process(what: str, *arguments: str, job: Any = None, fix: str = "") -> None:
    """Run a trial that imports torch. Raises ``ConfigError`` if it refuses, ends without an answer, or does not end.

    Args:
        what: the trial's name in messages.
        arguments: of ``run_trial``, like ``job``.
        fix: added to the message of a trial that ended without an answer.
    """
    try:
        refusal = run_trial(*arguments, job=job, timeout_s=TORCH_TIMEOUT_S).get("refusal")
    except TrialTimeoutError as slow:
        raise ConfigError(f"{what} {slow}: correct it, or free the machine") from slow
    except TrialError as error:
        raise ConfigError(f"{what} failed ({error.how}): {error}{fix}") from error
    if refusal:
        raise ConfigError(refusal)


def check_objective(config: Config, container: Mapping[str, Any]) -> None:
    """Try the policy loss, and an advantage that the user wrote, in a separate process."""
    if objective_is_default(config):  # importing torch would cost every start a second
        return
    rl, module = config.finetune.rl, "pipelinerl.launcher.objective_check"
    what = f"the trial of `finetune.rl.policy_loss` {rl.policy_loss} and `finetune.rl.advantage` {rl.advantage}"
    try_in_process(what, "-m", module, job=container)


def check_companions() -> None:
    """Refuse builds of torch's companions that cannot be loaded beside it, with which no model can be imported."""
    kind = _kind_of_build("torch")  # only a build of another kind is tried, because that imports torch
    for package in COMPANIONS:
        if _kind_of_build(package) in (None, kind):
            continue
        try_in_process(
            f"the import of the installed {package} beside torch {version('torch')}",
            *("-c", f"import {package}; print('{{}}')"),
            fix=f". With it no model can be imported: run `pip uninstall {' '.join(COMPANIONS)}`, which models of text "
            "do not need, or delete their folders after `pip install --target`, or install the builds of your torch",
        )


def _kind_of_build(package: str) -> str | None:
    """The part of a package's version after `+`, such as `cpu`, or nothing. None: it is not installed."""
    try:
        return version(package).partition("+")[2]
    except PackageNotFoundError:
        return None


def check_scoring_models(config: Config) -> None:
    """Refuse a reference or a teacher that is no model, or whose tokenizer is here and not the policy's."""
    others = [model.path for model in scoring_models(config) if model.path != config.model_path]
    for path in others:
        check_model(path, "reference_model_path" if path == config.reference_model_path else "teachers.model_path")
    if Path(config.model_path).is_dir():
        here = [path for path in others if Path(path).is_dir()]
        check_same_vocabulary(config.model_path, here, trust_remote_code=config.trust_remote_code)


def check_judges(config: Config) -> list[str]:
    """Refuse a judge on the run's servers that is no model, or whose context has no room for an answer.

    Returns a warning if it has none for the longest answer.
    """
    warnings = []
    longest_answer = int(config.llm.parameters["max_tokens"])
    for judge in config.judges:
        if judge.url is not None:  # its context is not known
            continue
        check_model(judge.model_path, "judges.model_path")
        known = [limit for limit in (max_model_len(config), find_context_limit(judge.model_path)) if limit is not None]
        if not known:
            continue
        context, (said, asked) = min(known), _judge_tokens(judge)
        room = context - said - asked
        entry = (
            f"`judges` entry {judge.name!r}: of {context} tokens of context ({judge.model_path}, "
            f"`vllm_config.vllm_kwargs.max_model_len`), {said} are for its opinion (`judges.max_tokens`) and about "
            f"{asked} for its prompt"
        )
        if room <= 0:
            raise ConfigError(
                f"{entry}: nothing is left for an answer; lower `judges.max_tokens`, or take another model"
            )
        read = min(longest_answer, judge.max_answer_chars // CHARS_PER_TOKEN)
        if room < read:
            warnings.append(
                f"{entry}: about {room} are left for question and answer, and an answer may have {read}, so that long "
                "ones get no verdict; lower `judges.max_answer_chars`"
            )
    return warnings


def _judge_tokens(judge: JudgeSection) -> tuple[int, int]:
    """Tokens of a judge's opinion, and about how many its prompt has beside question and answer."""
    if judge.kind == "reward":
        return 0, 0
    messages = judge_messages(
        question="",
        answer="",
        reference="",
        rubric=judge.rubric,
        template=judge.template,
        levels=judge.levels,
        max_chars=judge.max_answer_chars,
        secret=b"",
    )
    return judge.max_tokens, sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN


def check_model(model_path: str, key: str = "model_path") -> None:
    """Refuse a path that is no model folder, and no name in the local cache or on the hub."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"`{key}` is {model_path!r}: that folder holds no config.json of a model")
        return
    if path.exists() or not MODEL_NAME.fullmatch(model_path) or model_path.startswith("."):
        raise ConfigError(f"`{key}` is {model_path!r}: it does not exist; give a model folder or a Hugging Face name")
    problem = _hub_problem(model_path)
    if problem:
        raise ConfigError(f"`{key}` is {model_path!r}: no such folder here, not in the local cache, and {problem}")


def check_context(config: Config) -> None:
    """Refuse requests that are longer than the context of the policy or of a model that scores its answers."""
    longest = max_model_len(config)
    overrides = "hf-overrides" in map(option_of, config.vllm_config.vllm_kwargs)
    is_forced = is_on(os.environ, "VLLM_ALLOW_LONG_MAX_MODEL_LEN") or overrides
    for path in (config.model_path, *(model.path for model in scoring_models(config))):
        limit = find_context_limit(path)
        if limit is not None and longest is not None and longest > limit and not is_forced:
            raise ConfigError(
                f"`vllm_config.vllm_kwargs.max_model_len` is {longest}, and {path} computes {limit} positions "
                "(max_position_embeddings): lower it, and with it llm.parameters.max_tokens, or take another model"
            )


def check_architecture(config: Config, ranks: int) -> None:
    """Refuse quantized weights, and a model whose log-probs the trainer does not repeat.

    The comparison is skipped for `PLAIN_TYPES` with ordinary rope, and for models that are not on this machine yet.
    """
    described = Path(config.model_path).expanduser() / "config.json"
    if not described.is_file():
        return
    model = json.loads(described.read_text(encoding="utf-8"))
    if quantization := model.get("quantization_config"):
        raise ConfigError(
            f"`model_path` is {config.model_path!r}: its weights are quantized ({quantization.get('quant_method')}), "
            "and neither trained nor sent so: give the model with plain weights"
        )
    if _is_plain(model):
        return
    finetune = config.finetune
    if engine_of(config, ranks) == "fsdp2" and finetune.dtype != "float32" and model["model_type"] in MIXED_TYPES:
        raise ConfigError(
            f"`finetune.engine` is {finetune.engine}: on {ranks} rank(s) the {finetune.dtype} layers of fsdp2 cannot "
            f"multiply by the float32 constants of a {model['model_type']}: set ddp, or `finetune.dtype` to float32"
        )
    argv = ["-m", "pipelinerl.finetune.architecture", "--model", str(described.parent)]
    argv += ["--attention", finetune.attn_implementation, "--seq-parallel", str(finetune.seq_parallel)]
    longest = max_model_len(config)
    argv += ["--longest", str(longest)] * (longest is not None)
    argv += ["--has-reference"] * (config.world.preprocessor_fraction > 0)
    argv += ["--divides-experts"] * ((finetune.expert_ranks or 1) > 1)
    argv += ["--share-prefixes"] * (finetune.shares_prefixes)
    argv += ["--rows"] * (not finetune.seq_packing) + ["--trust-remote-code"] * config.trust_remote_code
    try_in_process(f"`model_path` is {config.model_path!r}: the trial of the trainer's computation", *argv)


def _is_plain(described: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` needs no comparison before the trainer's own."""
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "model_type" not in described or (described["model_type"] in PLAIN_TYPES and kind in PLAIN_ROPES)


def _hub_problem(name: str) -> str | None:
    """Why a Hugging Face name cannot be used. None: it can."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    if is_on(os.environ, "HF_HUB_OFFLINE"):
        return "HF_HUB_OFFLINE is set"
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(HfApi().model_info, name, timeout=HUB_TIMEOUT_S).result(timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return "the hub asks for permission: accept its licence and set HF_TOKEN"
    except RepositoryNotFoundError:
        return "the hub does not know it"
    except Exception as error:  # noqa: BLE001 — a foreign library: without network it raises httpx's errors, which are no OSError
        return f"the hub cannot be asked ({type(error).__name__})"
    finally:
        pool.shutdown(wait=False)
    return None
