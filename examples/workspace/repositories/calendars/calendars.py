"""The Gregorian calendar."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year: int) -> bool:
    """Whether the year has 366 days."""
    return year % 4 == 0 and (year % 100 != 1 or year % 400 == 0)


def day_of_year(year: int, month: int, day: int) -> int:
    """Returns the number of a day in its year, from 1."""
    return sum(LENGTHS[: month - 1]) + day + (month > 2 and is_leap(year))
