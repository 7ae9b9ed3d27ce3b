"""What stands around an actor's loop in tests: workers, trainer, drops and status that follow a script."""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl.actor.messages import GroupFinished, Servers, StartGroup
from pipelinerl.actor.worker_pool import Lost
from pipelinerl.records import ProbeMissed


class ScriptedWorkers:
    """Answers each start with ``answer(start)`` at the next poll; None = never."""

    def __init__(self, answer: Callable[[StartGroup], GroupFinished | Lost | None]):
        self.answer = answer
        self.running: dict[int, StartGroup] = {}
        self.started: list[StartGroup] = []
        self.most_running = 0
        self.servers: list[Servers] = []
        self.waiting: deque[StartGroup] = deque()

    @property
    def num_rollouts(self) -> int:
        return sum(len(start.attempts) for start in self.running.values())

    def set_servers(self, servers: Servers) -> None:
        self.servers.append(servers)

    def start(self, start: StartGroup) -> None:
        self.running[start.task_id] = start
        self.started.append(start)
        self.waiting.append(start)
        self.most_running = max(self.most_running, self.num_rollouts)

    def cancel(self, task_id: int) -> None:
        self.running.pop(task_id, None)

    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]:
        results = []
        for _ in range(len(self.waiting)):
            start = self.waiting.popleft()
            if start.task_id in self.running and (result := self.answer(start)) is not None:
                del self.running[start.task_id]
                results.append(result)
        return results


class ScriptedTrainer:
    def __init__(self, version: int = 0):
        self.version = version
        self.servers = ("s",)
        self.training_done = False
        self.verified: dict[str, int] = {}
        self.misses: list[ProbeMissed] = []

    @property
    def weights(self) -> tuple[int | None, dict[str, int]]:
        return self.version, dict.fromkeys(self.servers, self.version)

    def take_misses(self) -> list[ProbeMissed]:
        misses, self.misses = self.misses, []
        return misses


class ScriptedDrops:
    """What the preprocessor is said to have dropped."""

    def __init__(self) -> None:
        self.samples = Counter[str]()

    def total(self) -> int:
        return self.samples.total()

    def room(self) -> int:
        return self.samples.total()

    def by_domain(self) -> Mapping[str, int]:
        return self.samples


class QuietStatus:
    """A status that is not published: the real one registers a signal handler, which only a main thread may."""

    def progress(self, **fields: Any) -> None:
        pass

    def note(self, **fields: Any) -> None:
        pass

    def waiting(self, what: str, on: str | None = None) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()
