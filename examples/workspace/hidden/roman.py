from roman import to_roman

print(*map(to_roman, (1, 4, 5, 9, 40, 1994, 2000, 3999)))
try:
    to_roman(4000)
except ValueError as error:
    print(error)
