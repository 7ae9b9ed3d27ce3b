"""Files of a store of weights, in a folder or at an fsspec URL. Every method raises ``StoreError`` on failure.

A file in a folder is durable, with its name, when its write returns. Object stores promise the same of a PUT.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.config.paths import without_credentials
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import StoredFile
from pipelinerl.weights.store.manifest import StoreError
from pipelinerl.world.disk import make_folder, replacement

CHUNK_BYTES = 8 << 20
"""Bytes that are hashed and written at a time."""


class OpenFile(Protocol):
    """An open file."""

    def readinto(self, view: memoryview, /) -> int | None: ...
    def seek(self, place: int, /) -> int: ...


class Files(Protocol):
    """The files of one store. All names are of one folder."""

    def put(self, name: str, content: memoryview) -> StoredFile:
        """Writes a file and returns when it is durable. Nobody sees a part of it under its name."""
        ...

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Returns a small file, None if there is none. A larger one is refused before it is read."""
        ...

    def open(self, name: str, bucket_bytes: int) -> contextlib.AbstractContextManager[OpenFile]:
        """Opens a file that is read in pieces of ``bucket_bytes``."""
        ...

    def size(self, name: str) -> int | None:
        """Returns the length of a file, None if there is none."""
        ...

    def names(self) -> list[str]: ...
    def remove(self, name: str) -> None: ...


class MissingFileError(StoreError):
    """The file is not there. It may have been removed because newer versions were published."""


@lru_cache(maxsize=8)
def open_files(url: str) -> Files:
    """Returns the store at a `pipelinerl.config.paths.weight_store`: a folder, or an fsspec URL (``s3://bucket/run``).

    Credentials and options come from the environment, as the file system's own library reads them, or as fsspec's
    ``FSSPEC_<PROTOCOL>_<OPTION>``.

    Raises:
        StoreError: there is no such file system, or its library is not installed.
    """
    return RemoteFiles(url) if "://" in url else FolderFiles(Path(url))


class FolderFiles:
    """Files in a folder, which machines may share."""

    def __init__(self, folder: Path):
        self._folder = folder

    def put(self, name: str, content: memoryview) -> StoredFile:
        digest = hashlib.sha256()
        with self._explained():
            make_folder(self._folder)
            with replacement(self._folder / name, mode=0o600, sync=True) as file:
                for chunk in pieces(content):
                    digest.update(chunk)
                    file.write(chunk)
        return StoredFile(name=name, sha256=digest.hexdigest(), num_bytes=len(content))

    def get(self, name: str, max_bytes: int) -> bytes | None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            with open(self._folder / name, "rb") as file:
                return bounded(file.read(max_bytes + 1), name, max_bytes)
        return None

    @contextmanager
    def open(self, name: str, bucket_bytes: int) -> Iterator[OpenFile]:
        with self._explained(), open(self._folder / name, "rb", buffering=0) as file:
            yield file

    def size(self, name: str) -> int | None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return (self._folder / name).stat().st_size
        return None

    def names(self) -> list[str]:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self._folder))
        return []

    def remove(self, name: str) -> None:
        with self._explained():
            (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFileError(f"{error.filename} is not there") from error
        except OSError as error:
            raise StoreError(f"the store {self._folder}: {error}") from error


class RemoteFiles:
    """Files at an fsspec URL. A file is one object and becomes visible when it is complete."""

    def __init__(self, url: str):
        import fsspec

        self._url = without_credentials(url)
        with self._explained():
            # An instance that fsspec keeps has the credentials of its first use.
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            system, self._root = fsspec.url_to_fs(url, **options)
        self._system: Any = system

    def put(self, name: str, content: memoryview) -> StoredFile:
        digest = hashlib.sha256()
        with self._explained():
            self._system.makedirs(self._root, exist_ok=True)
            if len(content) <= CHUNK_BYTES:
                digest.update(content)
                self._system.pipe_file(self._path(name), bytes(content))
            else:
                with self._system.open(self._path(name), "wb", block_size=CHUNK_BYTES) as file:
                    for chunk in pieces(content):
                        digest.update(chunk)
                        file.write(chunk)
        return StoredFile(name=name, sha256=digest.hexdigest(), num_bytes=len(content))

    def get(self, name: str, max_bytes: int) -> bytes | None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return bounded(self._system.cat_file(self._path(name), start=0, end=max_bytes + 1), name, max_bytes)
        return None

    @contextmanager
    def open(self, name: str, bucket_bytes: int) -> Iterator[OpenFile]:
        with self._explained():
            options = {"block_size": bucket_bytes, "cache_type": "none"}
            with self._system.open(self._path(name), "rb", **options) as file:
                yield file

    def size(self, name: str) -> int | None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return int(self._system.info(self._path(name))["size"])
        return None

    def names(self) -> list[str]:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            return sorted(path.rpartition("/")[2] for path in self._system.ls(self._root, detail=False))
        return []

    def remove(self, name: str) -> None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (WeightUpdateError, GeneratorExit):
            raise
        except FileNotFoundError as error:
            raise MissingFileError(f"{self._url}: {error} is not there") from error
        except Exception as error:  # file systems raise their libraries' own errors
            raise StoreError(f"the store {self._url}: {type(error).__name__}: {error}") from error


def pieces(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def bounded(content: bytes, name: str, max_bytes: int) -> bytes:
    if len(content) > max_bytes:
        raise StoreError(f"{name} has more than {max_bytes} bytes")
    return content
