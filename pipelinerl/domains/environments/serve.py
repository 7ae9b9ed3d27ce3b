"""The child of the role: makes the class of one entry of ``environments`` and calls its ``launch``.

    python -m pipelinerl.domains.environments.serve --run-dir R --index 0 --port 8100 --host 127.0.0.1

A process of its own, because ``launch`` blocks, and a web server wants the signals of its process for itself.
"""

import argparse
import inspect
import os
from pathlib import Path
from typing import Any

from hydra.utils import get_object, instantiate

from pipelinerl.config.environment_servers import EnvironmentServer, environment_servers
from pipelinerl.config.load import load_run
from pipelinerl.config.names import TARGET
from pipelinerl.config.variables import with_values
from pipelinerl.errors import DomainError
from pipelinerl.observability.logging import show_prints


def check_class(server: EnvironmentServer) -> None:
    """Imports the environment's class, without an object of it.

    Raises:
        DomainError: it cannot be imported, or has no method ``launch``.
    """
    where = f"`environments` entry {server.key!r} has {TARGET}={server.target}"
    try:
        found = get_object(server.target)
    except Exception as error:  # importing runs the user's code
        raise DomainError(f"{where}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    if isinstance(found, type) and not callable(getattr(found, "launch", None)):
        raise DomainError(f"{where}: it has no method `launch(port)`, which serves and blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True, help="place in `environments`")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True, help="address to listen on")
    args = parser.parse_args()
    show_prints()
    server = next(one for one in environment_servers(load_run(args.run_dir)) if one.index == args.index)
    check_class(server)
    arguments = with_values(server.arguments, os.environ, f"environments.{server.key}")
    environment: Any = instantiate({TARGET: server.target, **arguments})
    takes_host = "host" in inspect.signature(environment.launch).parameters
    environment.launch(args.port, **({"host": args.host} if takes_host else {}))


if __name__ == "__main__":
    main()
