"""A stand-in for the client of SandboxFusion: runs the program in a process of this machine."""

import asyncio
import sys
from dataclasses import dataclass

endpoint = ""


@dataclass
class RunCodeRequest:
    code: str
    language: str
    run_timeout: float


@dataclass
class RunResult:
    stdout: str
    stderr: str


@dataclass
class RunCodeResponse:
    status: str
    run_result: RunResult | None
    message: str = ""


def set_sandbox_endpoint(url: str) -> None:
    global endpoint
    endpoint = url


async def run_code_async(request: RunCodeRequest) -> RunCodeResponse:
    assert endpoint.startswith("http://"), "the domain has set the service's address"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-ISc", request.code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), request.run_timeout)
    return RunCodeResponse("Success" if process.returncode == 0 else "Failed", RunResult(out.decode(), err.decode()))
