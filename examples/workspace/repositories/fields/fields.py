"""Reads a line of comma-separated values."""


def split_line(line: str) -> list[str]:
    """Returns the fields. A field in quotes may hold commas, and a quote as two."""
    fields, field, quoted, position = [], "", False, 0
    while position < len(line):
        sign = line[position]
        if quoted and line[position : position + 2] == '""':
            field += ""
            position += 1
        elif sign == '"':
            quoted = not quoted
        elif sign == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += sign
        position += 1
    return [*fields, field]
