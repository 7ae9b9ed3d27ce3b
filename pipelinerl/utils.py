"""What domains written for PipelineRL import from here: where the run's services listen."""

from omegaconf import DictConfig

from pipelinerl.world import Job


def resolve_environment_key(cfg: DictConfig, default: str | None = None) -> str | None:
    """The name of the environment to ask; here every verifier judges every kind of answer, so it selects nothing."""
    return cfg.get("environment_key") or default


def get_environment_jobs(cfg: DictConfig, key: str | None = None) -> list[Job]:
    """The run's verifiers, as jobs of kind "environment"."""
    return [Job(**job) for job in cfg.get("jobs") or () if job["kind"] == "environment"]
