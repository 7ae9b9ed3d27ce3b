"""The answer between ``<answer>`` and ``</answer>``, found in one pass however long the output is."""

OPENING, CLOSING = "<answer>", "</answer>"


def last_answer(output: str) -> str | None:
    """Returns the content of the last ``<answer>…</answer>`` in an output. None: no answer is closed."""
    start = output.rfind(OPENING, 0, max(output.rfind(CLOSING), 0))
    if start < 0:
        return None
    return output[start + len(OPENING) : output.index(CLOSING, start)]
