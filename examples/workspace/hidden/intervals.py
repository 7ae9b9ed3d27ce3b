from intervals import merge, size

print(merge([(5, 9), (1, 3), (3, 4)]), merge([(1, 8), (2, 3)]), merge([]))
print(size([(1, 3), (3, 5)]), size([(1, 1), (7, 9)]))
