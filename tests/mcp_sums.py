"""An MCP server for tests: ``python -m tests.mcp_sums`` speaks over standard input and output."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def end() -> int:
    """Ends the server."""
    os._exit(3)


@server.tool()
def tell_key() -> str:
    """Tells the secret of its environment, and prints it in red."""
    print(f"key {os.environ['SUMS_KEY']}\x1b[31m", file=sys.stderr, flush=True)
    return f"key is {os.environ['SUMS_KEY']}"


@server.tool()
async def hang() -> int:
    """Never answers."""
    await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    server.run()
