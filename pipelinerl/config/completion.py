"""`eval "$(pipelinerl completion)"`: commands, configurations and keys on the Tab key, in bash and zsh."""

from collections.abc import Iterable

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


def script(commands: Iterable[str]) -> str:
    """The completion as a program of bash, which zsh runs as well."""
    experiments, keys = " ".join(config_names()), " ".join(f"{key.name}=" for key in declared(Config))
    return SCRIPT.format(commands=" ".join(commands), experiments=experiments, keys=keys)
