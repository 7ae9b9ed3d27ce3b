"""What an error or a warning has to say: its facts (key, value, fix), whatever the words around them are."""

import re


def says(*facts: object) -> str:
    """A pattern for `pytest.raises(match=…)`: a text that has every fact, in any order, as whole words."""
    return "".join(rf"(?=[\s\S]*(?<!\w){re.escape(str(fact))}(?!\w))" for fact in facts)
