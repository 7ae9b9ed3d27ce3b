import os
from pathlib import Path

from tapeagents.core import Tape


def save_json_tape(tape: Tape, path: str, name: str) -> None:
    os.makedirs(path, exist_ok=True)
    (Path(path) / f"{name}.json").write_text(tape.model_dump_json())
