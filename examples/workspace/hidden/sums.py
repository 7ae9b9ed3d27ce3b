from sums import evaluate

print(evaluate("10-4-3"), evaluate("7-2+10"), evaluate("5"), evaluate("1+2+3-4-5-6"))
