"""Titles as parts of addresses."""

import re


def slug(title: str, taken: set[str] | None = None) -> str:
    """Returns lower-case letters and digits, with one dash between words, and a number if it is taken."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).lstrip("-")
    number = 2
    while name in (taken or ()):
        name = f"{name.rpartition('~')[0] or name}~{number}"
        number += 1
    return name
