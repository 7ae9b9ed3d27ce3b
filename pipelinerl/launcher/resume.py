"""`pipelinerl resume RUN [key=value …]`: go on with the run in a folder, with the settings that it was made with.

It needs neither the working directory nor the configuration files of the first launch. The folder may have been moved.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelinerl.config.load import load_run_dictconfig, suggestion
from pipelinerl.config.resume import OF_ONE_LAUNCH
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.reading import command_parser
from pipelinerl.launcher.command_line import interruptible


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: `sys.argv`) and return the exit code."""
    parser = command_parser("resume", __doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that a resumed run may change")
    args = parser.parse_args(argv)
    return interruptible(lambda: go_on(args.run, args.overrides))


def go_on(run_dir: Path, overrides: Sequence[str]) -> int:
    """Go on with a run.

    Raises:
        ConfigError: the folder has no run, or a setting is unknown or makes it another experiment.
    """
    from pipelinerl.launcher.program import launch

    cfg = load_run_dictconfig(run_dir)
    cfg.merge_with(OF_ONE_LAUNCH)  # settings for one launch hold again only if they are given again
    OmegaConf.set_struct(cfg, True)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise ConfigError(f"`{override}` is not of the form key=value")
        try:
            cfg.merge_with_dotlist([override])
        except OmegaConfBaseException as error:
            raise ConfigError(f"`{key}` is not a configuration key{suggestion(key)}") from error
    return launch(cfg, overrides)


if __name__ == "__main__":
    sys.exit(main())
