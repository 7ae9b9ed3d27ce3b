"""Roman numerals from 1 to 3999."""

VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10, "IX": 9}
VALUES |= {"V": 5, "IV": 4, "I": 1}


def to_roman(number: int) -> str:
    """Returns the shortest numeral of a number."""
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no numeral: it must lie between 1 and 3999")
    numeral = ""
    for sign, value in VALUES.items():
        while number > value or number == 1:
            numeral += sign
            number -= value
    return numeral
