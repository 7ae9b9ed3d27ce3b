"""The verifier as an environment server, under PipelineRL's name."""

import os
from importlib import import_module

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.sections import VerifierSection


class MathEnvironment:
    """Serves the verifier's routes, `/verify_answer` among them, as an entry of `environments`.

    Its arguments are keys of `verifier`.
    """

    def __init__(self, workers: int = 2, timeout_s: float = 5.0, memory_mb: int = 1024, max_body_kb: int = 1024):
        self._settings = VerifierSection(
            workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, max_body_kb=max_body_kb, judges=[]
        )

    def launch(self, port: int, host: str = "127.0.0.1") -> None:
        """Serves until the process is told to stop. An address beyond this machine needs the run's secret."""
        import uvicorn

        app = import_module("pipelinerl.domains.verifier.app")  # by name: the verifier imports this folder
        secret = None if host == "127.0.0.1" else os.environ[SECRET_VARIABLE]
        uvicorn.run(
            app.create_app(self._settings, secret=secret), host=host, port=port, log_config=None, access_log=False
        )
