"""Walks around a ring of stations. Their lengths have a heavy-tailed distribution."""

from random import Random

from pipelinerl.domains.datasets import Problem, generate_problems

TAIL = 1.8
"""Exponent of the Pareto distribution of laps."""
STOPS = 4
"""Number of stations in each half that questions ask for, evenly spread."""


def question(laps: int, station: int) -> str:
    return f"Walk {laps} laps, early to {station}."


def is_held_out(num_stations: int, laps: int, station: int) -> bool:
    """Whether a question is held out for tests. For each number of laps this is one stop of each half."""
    return stops(num_stations).index(min(station, num_stations - station)) == laps % STOPS


def stops(num_stations: int) -> list[int]:
    """Returns the stations of the first half that questions ask for. Those of the second half mirror them."""
    return [num_stations * number // (2 * STOPS + 1) for number in range(1, STOPS + 1)]


def walk(num_stations: int, laps: int, station: int, step: int) -> str:
    """Writes out a walk: station and direction first, then one line per lap, numbered downwards.

    Args:
        num_stations: stations of the ring.
        laps: laps of the walk.
        station: the station to reach early.
        step: 1 walks upwards, -1 downwards.
    """
    stations = " ".join(str(step * passed % num_stations) for passed in range(1, num_stations + 1))
    lines = [f"lap {left}: {stations}" for left in range(laps, 0, -1)]
    return "\n".join([f"to {station} {'up' if step == 1 else 'down'}", *lines, "done"])


def direction(num_stations: int, station: int) -> int:
    """Returns 1 if a walk upwards from 0 reaches ``station`` within half a lap, -1 if a walk downwards does."""
    return 1 if 2 * station < num_stations else -1


def draw_laps(rng: Random, min_laps: int, max_laps: int) -> int:
    """Draws from a Pareto distribution that starts at ``min_laps`` and is cut at ``max_laps``."""
    return min(max_laps, int(min_laps * (1 - rng.random()) ** (-1 / TAIL)))


def draw_stop(rng: Random, num_stations: int) -> int:
    """Draws one of the stations that questions ask for."""
    nearest = rng.choice(stops(num_stations))
    return rng.choice((nearest, num_stations - nearest))


def load_problems(
    dataset_names: list[str],
    num_stations: int = 44,
    min_laps: int = 5,
    max_laps: int = 50,
    num_train_problems: int = 4096,
    num_test_problems: int = 96,
    seed: int = 0,
) -> list[Problem]:
    """Generates problems ``{"dataset", "num_stations", "laps", "station"}``.

    Args:
        dataset_names: any of ``train`` and ``test``.
        num_stations: the ring's stations are 0 … num_stations - 1.
        min_laps: laps of the shortest walk. Half of the walks have more than 1.4 times as many.
        max_laps: laps of the longest walk.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
    """

    def draw(rng: Random, held_out: bool) -> Problem:
        laps = draw_laps(rng, min_laps, max_laps)
        while is_held_out(num_stations, laps, station := draw_stop(rng, num_stations)) != held_out:
            pass
        return {"num_stations": num_stations, "laps": laps, "station": station}

    return generate_problems(
        "laps",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )
