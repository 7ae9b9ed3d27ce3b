from search import first_index

print(first_index([1, 3, 3, 5], 3), first_index([1, 3, 3, 5], 5), first_index([1, 3], 2), first_index([], 1))
print(first_index([7], 7), first_index([7], 8))
