"""Process 1 of a workspace's container: `python3 -c … PORT`. It ends when its standard input does.

It passes connections to PORT of loopback (0: there is none) on to the Unix socket of the rollout's endpoint. For every
line of input it kills all other processes of the container. It prints a line when it is ready, and when it has killed.
The text of this file is sent there alone: standard library of Python 3.8 or newer.
"""

import asyncio
import os
import signal
import sys

ENDPOINT = "/endpoint/socket"
READY = "ready"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        chunk = await reader.read(1 << 16)
        if not chunk:
            break
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answers, requests = await asyncio.open_unix_connection(ENDPOINT)
    await asyncio.gather(copy(reader, requests), copy(answers, writer), return_exceptions=True)
    requests.close()
    writer.close()


async def main(port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes what process 1 inherits
    server = await asyncio.start_server(connect, "127.0.0.1", port) if port else None
    print(READY, flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        if os.getpid() == 1:  # elsewhere these are the processes of the whole machine
            os.kill(-1, signal.SIGKILL)
        print(READY, flush=True)
    if server:
        server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
