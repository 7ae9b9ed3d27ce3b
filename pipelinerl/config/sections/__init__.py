"""The typed mirror of ``conf/``: one class per section, every key declared with `pipelinerl.config.keys.key`.

A key that is not here is refused. ``make format`` writes the YAML files and the page of the documentation from here.
"""

from pipelinerl.config.keys import Section
from pipelinerl.config.sections.experiment import Config, DomainSection, JudgeSection, SubsetSection
from pipelinerl.config.sections.machines import (
    ArchiveSection,
    LauncherSection,
    StreamsSection,
    VerifierSection,
    WandbSection,
    WorldSection,
)
from pipelinerl.config.sections.rollouts import LLMSection
from pipelinerl.config.sections.serving import WeightsSection
from pipelinerl.config.sections.training import FinetuneSection, LoraSection, RLSection

__all__ = [
    "ArchiveSection",
    "Config",
    "DomainSection",
    "FinetuneSection",
    "JudgeSection",
    "LLMSection",
    "LauncherSection",
    "LoraSection",
    "RLSection",
    "Section",
    "StreamsSection",
    "SubsetSection",
    "VerifierSection",
    "WandbSection",
    "WeightsSection",
    "WorldSection",
]
