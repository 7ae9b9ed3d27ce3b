"""Processes that get away from those who start them, for tests of what ends them.

Each runs a daemon of its own session that ignores SIGTERM and writes its process id to a file.
"""

from pathlib import Path

import psutil

DAEMON = """#!/bin/sh
trap "" TERM
echo $$ > "$1.new"
mv "$1.new" "$1"
exec sleep 600
"""
ESCAPES = {
    "session": "setsid {daemon} {file} &",
    "empty environment": "env -i setsid {daemon} {file} &",
    "double fork": "(setsid sh -c 'env -i {daemon} {file} &' &)",
}


def escape(how: str, file: Path) -> str:
    """Returns a shell's line that starts a daemon, and ends when it runs."""
    daemon = file.with_name("daemon.sh")
    if not daemon.exists():
        daemon.write_text(DAEMON)
        daemon.chmod(0o755)
    line = ESCAPES[how].format(daemon=daemon, file=file)
    return f"{line}\nwhile [ ! -e {file} ]; do sleep 0.01; done"


def is_alive(file: Path) -> bool:
    """Whether the daemon that wrote its process id to this file lives."""
    try:
        process = psutil.Process(int(file.read_text()))
        is_daemon = process.create_time() < file.stat().st_mtime + 2  # another process that got its id later is not
        return is_daemon and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
