"""The typed mirror of ``conf/``: one class per section, every key declared with `pipelinerl.config.keys.key`.

A key that is not here is refused. ``make format`` writes the YAML files and the page of the documentation from here.
"""

from pipelinerl.config.keys import Section
from pipelinerl.config.sections.experiment import (
    Config,
    DebugSection,
    DomainSection,
    JudgeSection,
    SFTSection,
    SubsetSection,
    TeacherSection,
    TinyModelSection,
)
from pipelinerl.config.sections.machines import (
    ArchiveSection,
    LauncherSection,
    StreamsSection,
    TracingSection,
    VerifierSection,
    WandbSection,
    WorldSection,
)
from pipelinerl.config.sections.rollouts import (
    ActorSection,
    EvalSection,
    EvaluationLLMSection,
    LLMSection,
    PreprocessSection,
)
from pipelinerl.config.sections.serving import VLLMSection, WeightsSection
from pipelinerl.config.sections.training import FinetuneSection, LoraSection, OptimizerSection, RLSection

__all__ = [
    "ActorSection",
    "ArchiveSection",
    "Config",
    "DebugSection",
    "DomainSection",
    "EvalSection",
    "EvaluationLLMSection",
    "FinetuneSection",
    "JudgeSection",
    "LLMSection",
    "LauncherSection",
    "LoraSection",
    "OptimizerSection",
    "PreprocessSection",
    "RLSection",
    "SFTSection",
    "Section",
    "StreamsSection",
    "SubsetSection",
    "TeacherSection",
    "TinyModelSection",
    "TracingSection",
    "VLLMSection",
    "VerifierSection",
    "WandbSection",
    "WeightsSection",
    "WorldSection",
]
