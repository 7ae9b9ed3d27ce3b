"""The completion, run by a real bash."""

import subprocess

import pytest

from pipelinerl.config.completion import script

SCRIPT = script(["launch", "status"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pipelinerl la", ["launch"]),
        ("pipelinerl launch --config-name=quickstart_r", ["quickstart_ranks"]),
        ("pipelinerl launch --config-name=words attem", ["attempts="]),
        ("pipelinerl launch --con", ["--config-name="]),
    ],
)
def test_words_that_the_tab_key_offers(line: str, words: list[str]) -> None:
    place = f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={line.count(' ')}"
    program = f"{SCRIPT}\n{place}; _pipelinerl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == words
