"""`eval "$(pipelinerl completion)"`: commands, configurations and keys on the Tab key, in bash and zsh."""

import argparse
from collections.abc import Iterable

from pipelinerl.__main__ import COMMANDS
from pipelinerl.config.keys import declared
from pipelinerl.config.paths import config_names
from pipelinerl.config.sections import Config

SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U bashcompinit && bashcompinit
_pipelinerl() {{
  local word="${{COMP_LINE:0:COMP_POINT}}"; word="${{word##* }}"
  case "$word" in
    --config-name=*) COMPREPLY=($(compgen -W "{experiments}" -- "${{word#*=}}")) ;;
    *=*) COMPREPLY=($(compgen -f -- "${{word#*=}}")) ;;
    *) if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "{commands}" -S " " -- "$word"))
       else COMPREPLY=($(compgen -W "--config-name= {keys}" -- "$word") $(compgen -f -- "$word")); fi ;;
  esac
}}
complete -o nospace -F _pipelinerl pipelinerl
"""


def script(commands: Iterable[str], experiments: Iterable[str], keys: Iterable[str]) -> str:
    """The completion as a program of bash, which zsh runs as well."""
    words = {"commands": commands, "experiments": experiments, "keys": (f"{key}=" for key in keys)}
    return SCRIPT.format(**{name: " ".join(given) for name, given in words.items()})


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="pipelinerl completion", description='completion of bash and zsh: eval "$(pipelinerl completion)"'
    ).parse_args()
    print(script(COMMANDS, config_names(), [key.name for key in declared(Config)]), end="")
