from matrices import multiply

print(multiply([[1, 2]], [[3], [4]]), multiply([[1], [2]], [[3, 4, 5]]), multiply([[1, 2], [3, 4]], [[0, 1], [1, 0]]))
