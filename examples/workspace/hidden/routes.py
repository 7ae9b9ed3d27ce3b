from routes import shortest

roads = {"a": ["b", "c"], "c": ["d"], "d": ["e"], "e": ["z"], "b": ["z"], "z": ["a"]}
print(shortest(roads, "a", "z"), shortest(roads, "z", "e"), shortest(roads, "b", "b"), shortest(roads, "a", "q"))
