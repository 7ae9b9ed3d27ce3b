from wrapping import wrap

print(wrap("one two three", 7), wrap("one two three", 6), wrap("a bcd ef", 4))
print(wrap("extraordinary day", 5), wrap("  ", 5))
