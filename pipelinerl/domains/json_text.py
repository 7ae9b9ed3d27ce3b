"""JSON of data sets and programs, whose integers may have any number of digits.

Python refuses to convert more than 4,300 digits, because that takes quadratic time. Such an integer stays text here.
"""

import json
import re
import sys
from typing import Any

MARK = "\ue000"
MARKED = re.compile(r'"\\ue000(-?[0-9]+)"')


class LongInteger(str):
    """An integer as `MARK` and its digits. JSON has no leading zeros, so equal integers are equal texts."""

    def __str__(self) -> str:
        return self[len(MARK) :]


def parse(text: str, **options: Any) -> Any:
    """Decodes JSON as ``json.loads`` does, with a `LongInteger` for each integer that has too many digits."""
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer has too many digits
        limit = sys.get_int_max_str_digits()
        return json.loads(
            text,
            parse_int=lambda digits: int(digits) if len(digits.lstrip("-")) <= limit else LongInteger(MARK + digits),
            **options,
        )


def dump(value: Any) -> str:
    """Encodes a value of `parse` as JSON."""
    return MARKED.sub(r"\1", json.dumps(value))
