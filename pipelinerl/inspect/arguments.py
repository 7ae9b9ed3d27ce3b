"""The command line of the commands that read a run."""

import argparse


def command_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `pipelinerl <command>`, without arguments.

    Args:
        doc: the module's docstring. Its first line is the description, and the rest stands below the arguments.
    """
    lines = (doc or "").splitlines()
    return argparse.ArgumentParser(
        prog=f"pipelinerl {command}",
        description=lines[0],
        epilog="\n".join(lines[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
