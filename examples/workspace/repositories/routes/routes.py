"""Routes through a map of one-way roads."""

from collections import deque


def shortest(roads: dict[str, list[str]], start: str, goal: str) -> list[str] | None:
    """Returns the places of a route with the fewest roads. None: there is none."""
    routes, seen = deque([[start]]), {start}
    while routes:
        route = routes.pop()
        if route[-1] == goal:
            return route
        for place in roads.get(route[-1], []):
            if place not in seen:
                seen.add(place)
                routes.append([*route, place])
    return None
