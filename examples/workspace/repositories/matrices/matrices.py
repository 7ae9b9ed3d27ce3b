"""Matrices as lists of rows."""

Matrix = list[list[int]]


def multiply(left: Matrix, right: Matrix) -> Matrix:
    """Returns the product."""
    if len(left[0]) != len(right):
        raise ValueError(f"{len(left[0])} columns do not meet {len(right)} rows")
    columns = range(len(right))
    return [[sum(row[k] * right[k][j] for k in range(len(right))) for j in columns] for row in left]
