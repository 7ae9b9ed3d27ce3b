"""Plugins of vLLM that exist only for the processes of one test."""

import os
from pathlib import Path

TESTS = Path(__file__).parent


def environment_with(plugin: str, folder: Path) -> dict[str, str]:
    """Makes ``tests/<plugin>_hook/<plugin>.py`` a plugin of vLLM for processes with the returned environment.

    ``folder``: gets its description.
    """
    described = folder / f"{plugin}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {plugin}:register\n")
    paths = (str(folder), str(TESTS / f"{plugin}_hook"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
