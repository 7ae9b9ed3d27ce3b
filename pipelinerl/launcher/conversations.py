"""Conversations to imitate, before the start: whether they can be read, and the steps that their epochs take."""

import functools
import math
import re
from collections.abc import Sequence

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.preprocess.conversation_rows import DatasetReport, load_conversations


def steps_of(config: Config, overrides: Sequence[str]) -> int:
    """Optimizer steps of `sft.epochs`. The last one may have conversations of the next epoch.

    Args:
        overrides: arguments of the command line.
    Raises:
        ConfigError: `finetune.max_train_steps` is among them, too.
        DomainError: the data sets cannot be read.
    """
    epochs = config.sft.epochs
    assert epochs is not None
    given = next((one for one in overrides if re.match(r"\+*finetune\.max_train_steps=", one)), None)
    if given is not None:
        raise ConfigError(f"`sft.epochs` is {epochs:g} but {given!r} is given: remove one, or set sft.epochs=null")
    rows = sum(read_report(name, config.sft.max_left_out).kept for name in config.sft.datasets)
    return math.ceil(rows * epochs / config.batch_size)


def check_conversations(config: Config) -> list[str]:
    """Refuse data sets that cannot be read. Returns notes about rows that are left out."""
    names = (*config.sft.datasets, *config.sft.test_datasets)
    return [note for name in names for note in read_report(name, config.sft.max_left_out).notes()]


@functools.cache
def read_report(name: str, max_left_out: float) -> DatasetReport:
    """Read one data set, once for its epochs and its check."""
    _, (report,) = load_conversations([name], max_left_out)
    return report
