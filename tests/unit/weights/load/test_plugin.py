"""What vLLM warns of that we chose is dropped, and nothing else."""

import logging

import pytest

from pipelinerl.weights.load.plugin import EXPECTED, EXPECTED_ON_CPU, drop_warnings


def test_expected_warnings_alone_are_dropped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in EXPECTED | EXPECTED_ON_CPU]
    before = [list(logger.filters) for logger in loggers]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.filterwarnings", lambda *_: None)
            drop_warnings(EXPECTED | EXPECTED_ON_CPU)
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own configuration forbids it
        logging.getLogger("vllm.v1.worker.cpu_worker").warning("%s is not found in LD_PRELOAD. For best …", "libiomp")
        logging.getLogger("vllm.config.vllm").warning("Enforce eager set, disabling torch.compile")
        logging.getLogger("vllm.config.vllm").warning("CUDA graphs are off because …")
        logging.getLogger("vllm.config.scheduler").warning("Enforce eager set")
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.filters[:] = filters
    assert [record.getMessage() for record in caplog.records] == ["CUDA graphs are off because …", "Enforce eager set"]
