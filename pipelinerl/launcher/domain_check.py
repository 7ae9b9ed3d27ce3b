"""Tries the domain before the run does: `python -m pipelinerl.launcher.domain_check < configuration as JSON`.

Imports the rollout function and the loader, checks how they can be called, loads the problems and plays a few rollouts
against a scripted model. Prints one JSON object {"refusal": text or null, "warnings": [text]} as its last line.
It refuses only what would fail in the run as well. A slow loader or a service that is not up gives a warning.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config.environment_servers import environment_servers
from pipelinerl.config.load import parse_container
from pipelinerl.domains.contract import domains_of
from pipelinerl.environments.serve import check_class
from pipelinerl.errors import DomainError
from pipelinerl.launcher.trial import TrialFailure, try_rollouts


class OutOfTimeError(BaseException):
    """The deadline of the check passed, which does not show that the domain is wrong.

    It is a `BaseException` so that an `except Exception` in the domain does not catch it.
    """


def check_domains(container: dict[str, Any], warnings: list[str]) -> None:
    """Check every domain and environment. Appends to `warnings` and raises `DomainError` on the first refusal."""
    cfg = parse_container({key: value for key, value in container.items() if key != "jobs"})
    for server in environment_servers(cfg):
        check_class(server)
    domains = domains_of(cfg)
    rollouts = [domain.rollout() for domain in domains]
    for domain, rollout in zip(domains, rollouts, strict=True):
        section = domain.section
        train, test = domain.train_problems(), domain.test_problems()
        if section.test_dataset_names and not test:
            names = section.test_dataset_names
            warnings.append(f"{section.dataset_loader} returns no problems for {names}: no evaluation")
        domain.check_keys(rollout, train + test)
        try:
            asyncio.run(try_rollouts(OmegaConf.create(container), rollout, train))
        except TrialFailure as failure:
            text = f"`{domain.key('rollout_policy')}` is {section.rollout_policy}: it {failure}"
            if failure.certain:
                raise DomainError(text) from failure
            warnings.append(text)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = parser.parse_args()
    container = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the domain prints is not the answer
    warnings: list[str] = []
    refusal = None
    try:
        with deadline(arguments.timeout_s):
            check_domains(container, warnings)
    except OutOfTimeError:
        warnings.append(f"the domain's problems took more than {arguments.timeout_s:g} s to load: not checked further")
    except DomainError as error:
        refusal = str(error)
    answer.write(json.dumps({"refusal": refusal, "warnings": warnings}) + "\n")
    answer.flush()
    os._exit(0)  # threads that the domain left behind must not hold the launcher up


if __name__ == "__main__":
    main()
