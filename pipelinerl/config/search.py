"""The order in which Hydra looks for configurations: the user's folder, the packaged ones, the examples."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from pipelinerl.config.paths import CONF_DIR, search_path


class OtherConfigurations(SearchPathPlugin):
    """Puts the folders that win over the packaged one before everything else, and the examples behind."""

    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(self.before):
            search_path.prepend("pipelinerl", folder)
        for folder in self.behind:
            search_path.append("examples", folder)


def set_search_path(config_dir: str | None = None, *, own: bool = True) -> None:
    """Let the next composition look into `config_dir`, or the working directory's `conf/` where `own`, first."""
    folders = search_path(config_dir, own=own)
    packaged = folders.index(CONF_DIR)
    addresses = tuple(f"file://{folder}" for folder in folders)
    OtherConfigurations.before, OtherConfigurations.behind = addresses[:packaged], addresses[packaged + 1 :]
    if OtherConfigurations not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(OtherConfigurations)
