from ledger import balances

print(balances([("b", "a", 5), ("a", "c", 2)]), sum(balances([("x", "y", 9), ("y", "x", 4)]).values()))
try:
    balances([("a", "b", 0)])
except ValueError as error:
    print(error)
