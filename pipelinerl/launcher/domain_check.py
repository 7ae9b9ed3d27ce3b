"""Tries the domain before the run does: `python -m pipelinerl.launcher.domain_check < configuration as JSON`.

Loads the problems and plays a few rollouts against a scripted model. Answers {"refusal": text or null, "names": data
sets that it is about, "warnings": [text]}. It refuses only what would fail in the run as well, and metrics that the run
would have to leave out. A slow loader or a service that is not up gives a warning.
"""

import argparse
import asyncio
import contextlib
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf

from pipelinerl.actor.groups import dataset_of
from pipelinerl.actor.sampling import try_sampler
from pipelinerl.config.dotted import self_imports
from pipelinerl.config.environment_servers import environment_servers
from pipelinerl.config.load import parse_container
from pipelinerl.config.rules.experiment import METRIC_GROUPS, METRICS_OF_ALL
from pipelinerl.config.servers import sees_hint
from pipelinerl.domains.contract import cfg_of_domains, domains_of
from pipelinerl.domains.environments.serve import check_class
from pipelinerl.errors import ConfigError, DatasetError, DomainError, RecordError, TransportError, VerifierError
from pipelinerl.launcher.chat_trial import Messages, Tools, tokenizer_of, try_chat
from pipelinerl.launcher.reference_trial import try_references, with_verifiers_here
from pipelinerl.launcher.trial import answer
from pipelinerl.launcher.trial_tokenizer import ByteTokenizer, TokenizerLimitError, asked_of, with_plain_chat
from pipelinerl.llm import TrainableLLM
from pipelinerl.observability.catalogue import unclear_metrics
from pipelinerl.observability.logging import redacted
from pipelinerl.rollouts import RewardMode, check_named_rewards, check_result, numeric_metrics
from pipelinerl.testing import FakeLLM
from pipelinerl.world.proxies import open_session

ROLLOUT_TIMEOUT_S = 3.0
"""Up to four rounds of rollouts, one after the other, fit into `preflight.DOMAIN_TIMEOUT_S`."""
NOWHERE = "http://127.0.0.1:9"
ANSWERS = ("<answer>1</answer>", "I do not know.", "\\boxed{2}", "")
"""The scripted model's answer in each rollout."""
OUTSIDE_ERRORS = (OSError, aiohttp.ClientError, asyncio.TimeoutError, TransportError, VerifierError)


class TrialFailure(Exception):
    """A mistake of a domain. `certain`: the run would fail in the same way, and no network is involved."""

    def __init__(self, message: str, *, certain: bool):
        super().__init__(message)
        self.certain = certain


class WatchedProblem(dict[str, Any]):
    """A problem that remembers which missing keys were asked for."""

    def __init__(self, problem: dict[str, Any]):
        super().__init__(problem)
        self.missing: list[str] = []

    def __missing__(self, key: str) -> Any:
        self.missing.append(key)
        raise KeyError(key)


async def try_rollouts(
    cfg: DictConfig, rollout: Callable[..., Awaitable[Any]], problems: list[dict[str, Any]]
) -> list[tuple[Messages, Tools]]:
    """Play one rollout per scripted answer, concurrently, on evenly spaced problems.

    Args:
        cfg: the configuration as the domain gets it.

    Returns:
        Messages and tools of the first prompt of each rollout.
    Raises:
        TrialFailure: a result has the wrong type, or all rollouts failed.
    """
    failures: list[tuple[WatchedProblem, BaseException]] = []
    asked: list[tuple[Messages, Tools]] = []

    async def play(index: int, session: aiohttp.ClientSession) -> None:
        problem = WatchedProblem(problems[index * len(problems) // len(ANSWERS)])
        llm = scripted_llm(cfg, ANSWERS[index])
        try:
            result = await asyncio.wait_for(rollout(cfg, llm, problem, session), ROLLOUT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 — the user's function
            failures.append((problem, error))
            return
        asked.extend(asked_of(llm.tokenizer)[:1])
        try:
            mode: RewardMode = OmegaConf.select(cfg, "actor.rewards") or "rollout"
            checked = check_result(result, mode)
            names = OmegaConf.select(cfg, "finetune.rl.reward_weights") or ()
            check_named_rewards(numeric_metrics(checked), checked.rewards or mode, names)
            if unclear := unclear_metrics(numeric_metrics(checked)):
                raise TrialFailure(f"returns metrics that cannot be told apart: {unclear}", certain=True)
        except DomainError as error:
            raise TrialFailure(str(error).removeprefix("it "), certain=True) from error
        except RecordError as error:
            failures.append((problem, error))

    async with open_session(timeout=aiohttp.ClientTimeout(total=ROLLOUT_TIMEOUT_S)) as session:
        await asyncio.gather(*(play(index, session) for index in range(len(ANSWERS))))
    if len(failures) == len(ANSWERS):
        raise explain_failures(failures)
    return asked


async def right_answers(
    cfg: DictConfig, rollout: Callable[..., Awaitable[Any]], problems: list[dict[str, Any]]
) -> str | None:
    """Play four problems with their own answers. Returns a warning if the form that the prompt asks for is not paid."""

    async def play(problem: dict[str, Any], reply: Callable[[str], str]) -> Any:
        return await asyncio.wait_for(rollout(cfg, scripted_llm(cfg, reply), problem, session), ROLLOUT_TIMEOUT_S)

    spaced = [problems[index * len(problems) // len(ANSWERS)] for index in range(len(ANSWERS))]
    async with open_session(timeout=aiohttp.ClientTimeout(total=ROLLOUT_TIMEOUT_S)) as session:
        return await try_references(play, spaced)


def scripted_llm(cfg: DictConfig, answer: str | Callable[[str], str]) -> TrainableLLM:
    """Return a model with the run's sampling parameters and this answer. A function answers each prompt."""
    model = OmegaConf.select(cfg, "model_path") or ""
    tokenizer = tokenizer_of(model)
    return FakeLLM.saying(
        (lambda prompt: answer) if isinstance(answer, str) else answer,
        tokenizer=ByteTokenizer(model) if tokenizer is None else with_plain_chat(tokenizer),
        base_url=NOWHERE,
        model_name="policy",
        parameters=OmegaConf.to_container(cfg.llm.parameters),
    )


def explain_failures(failures: list[tuple[WatchedProblem, BaseException]]) -> TrialFailure:
    """Return the failure that explains why every rollout failed."""
    problem, error = failures[0]
    if isinstance(error, KeyError) and error.args and error.args[0] in problem.missing:
        return TrialFailure(
            f"needs {error.args[0]!r}, which the loader's problems do not have; a problem has {sorted(problem)}",
            certain=True,
        )
    if all(isinstance(error, RecordError) for _, error in failures):
        return TrialFailure(f"returns what cannot be trained: {error}", certain=True)
    places = {raised_at(error) for _, error in failures}
    certain = len(places) == 1 and not any(needs_outside(error) for _, error in failures)
    filename, line, kind = raised_at(error)
    text = f"raises on every rollout: {kind}: {error} ({filename}:{line})"
    return TrialFailure(
        text if certain else f"could not be tried without its services: {kind}: {error}", certain=certain
    )


def raised_at(error: BaseException) -> tuple[str, int | None, str]:
    """(file, line, error type) of the frame that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename, frames[-1].lineno, type(error).__name__


def needs_outside(error: BaseException | None) -> bool:
    """Whether an error was caused by the network, a service or the scripted model's limits."""
    while error is not None:
        if isinstance(error, (*OUTSIDE_ERRORS, TokenizerLimitError)):
            return True
        error = error.__cause__ or error.__context__
    return False


class OutOfTimeError(BaseException):
    """The deadline of the check passed. A `BaseException`, so that an `except Exception` in the domain misses it."""


def check_domains(container: dict[str, Any], warnings: list[str]) -> None:
    """Check every domain and environment. Appends to `warnings` and raises `DomainError` on the first refusal."""
    cfg = parse_container({key: value for key, value in container.items() if key != "jobs"})
    for server in environment_servers(cfg):
        check_class(server)
    if unclear := unclear_metrics([*METRICS_OF_ALL, *(judge.name for judge in cfg.judges)]):
        raise DomainError(f"`judges`: each is a metric of its name: {unclear}")
    container = with_verifiers_here(container)
    domains = domains_of(cfg)
    rollouts = [domain.rollout() for domain in domains]
    for domain, rollout in zip(domains, rollouts, strict=True):
        section = domain.section
        train, test = domain.train_problems(), domain.test_problems()
        if section.test_dataset_names and not test:
            names = section.test_dataset_names
            warnings.append(f"{section.dataset_loader} returns no problems for {names}: no evaluation")
        for dotted in dict.fromkeys((section.rollout_policy, section.dataset_loader)):
            warnings += self_imports(dotted)
        domain.check_keys(rollout, train + test)
        judge = domain.group_judge(rollout)
        if len(domains) == 1:
            check_data_sets(section.dataset_loader, train)
        if sees_hint(cfg, section.name) and not all(isinstance(problem.get("hint"), str) for problem in train):
            raise DomainError(
                f"`teachers.hint` is true, but a training problem of {section.dataset_loader} has no text `hint`"
            )
        try_sampler(cfg, section.name, train)
        try:
            asked = asyncio.run(try_rollouts(cfg_of_domains(container), rollout, train))
        except TrialFailure as failure:
            text = f"`{domain.key('rollout_policy')}` is {section.rollout_policy}: it {failure}"
            if failure.certain:
                raise DomainError(text) from failure
            warnings.append(text)
        else:
            warnings += try_chat(cfg, asked)
            paid = None if judge else asyncio.run(right_answers(cfg_of_domains(container), rollout, train))
            warnings += [f"`{domain.key('rollout_policy')}` is {section.rollout_policy}: {paid}"] if paid else []


def check_data_sets(loader: str, problems: Sequence[Mapping[str, Any]]) -> None:
    """Refuse names of data sets whose metrics would be mistaken for others."""
    names = sorted({dataset_of(problem) for problem in problems})
    for name in names if len(names) > 1 else ():  # one alone has no metrics of its own
        if (group := name.partition("/")[0]) in METRIC_GROUPS or not name:
            raise DomainError(
                f"{loader}: the `dataset` of a training problem is {name!r}: its metrics would be {name}/reward and so "
                f"on, but {group}/… are others; give it another name, e.g. train-{name}"
            )


@contextlib.contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the code of the block after `timeout_s`."""

    def expire(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def verdict_on(container: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    warnings: list[str] = []
    refusal: str | None = None
    names: tuple[str, ...] = ()
    try:
        with deadline(timeout_s):
            check_domains(container, warnings)
    except OutOfTimeError:
        warnings.append(
            f"the domain's loader, rollouts or `actor.sampler` took more than {timeout_s:g} s: not checked further"
        )
    except (ConfigError, DomainError) as error:
        refusal, names = str(error), error.names if isinstance(error, DatasetError) else ()
    return {"refusal": refusal and redacted(refusal), "names": names, "warnings": list(map(redacted, warnings))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, required=True)
    timeout_s = parser.parse_args().timeout_s
    answer(lambda container: verdict_on(container, timeout_s))


if __name__ == "__main__":
    main()
