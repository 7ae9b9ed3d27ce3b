"""Accounts whose sum never changes."""

from collections import Counter


def balances(transfers: list[tuple[str, str, int]]) -> dict[str, int]:
    """Returns what each account has after transfers ``(giver, taker, amount)``, in the order of their names."""
    accounts: Counter[str] = Counter()
    for giver, taker, amount in transfers:
        if amount <= 0:
            raise ValueError(f"{amount} cannot be transferred: it must be positive")
        accounts[giver] += amount
        accounts[taker] += amount
    return dict(sorted(accounts.items()))
