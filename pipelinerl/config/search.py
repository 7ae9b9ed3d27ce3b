"""The order in which Hydra looks for configurations: the user's folder wins over the packaged ones."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from pipelinerl.config.paths import CONF_DIR, search_path


class OwnConfigurations(SearchPathPlugin):
    """Puts the folders before the packaged one in front of everything else."""

    folders: tuple[str, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(self.folders):
            search_path.prepend("pipelinerl", folder)


def set_search_path(config_dir: str | None = None, *, own: bool = True) -> None:
    """Let the next composition look into `config_dir`, or the working directory's `conf/` where `own`, first."""
    folders = search_path(config_dir) if own or config_dir else (CONF_DIR,)
    OwnConfigurations.folders = tuple(f"file://{folder}" for folder in folders if folder != CONF_DIR)
    if OwnConfigurations not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(OwnConfigurations)
