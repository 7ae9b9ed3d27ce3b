from slugs import slug

print(slug("Hello, World!"), slug("  A b "), slug("a", {"a"}), slug("a!", {"a", "a~2"}), slug("x-1"))
