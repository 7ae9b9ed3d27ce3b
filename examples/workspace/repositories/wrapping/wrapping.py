"""Breaks text into lines."""


def wrap(text: str, width: int) -> list[str]:
    """Returns lines of at most ``width`` characters. A longer word has a line of its own."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines
