from recent import Recent

cache = Recent(2)
cache.put("a", 1)
cache.put("b", 2)
cache.get("a")
cache.put("c", 3)
print(cache.get("a"), cache.get("b"), cache.get("c"))
cache.put("a", 4)
cache.put("d", 5)
print(cache.get("a"), cache.get("c"), cache.get("d"))
