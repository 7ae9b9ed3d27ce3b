r"""Whether a right answer is paid in the form that the prompt asks for, tried before the start.

A data set's own questions may ask for ``Answer: 42`` where the judge reads ``\boxed{42}``: right answers then earn
nothing, without a word. The scripted model answers training problems with their own ``answer``, in each form.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pipelinerl.domains.verifier_client import IN_PROCESS
from pipelinerl.rollouts import BaseMetrics

BOXED = r"\boxed{{{}}}"
ASKED = {
    BOXED: re.compile(r"\\boxed"),
    "Answer: {}": re.compile(r"\b(?:form|format|after|with|as|line)\b\W{1,6}Answer:", re.IGNORECASE),
    "#### {}": re.compile("####"),
    "<answer>{}</answer>": re.compile("<answer>"),
}
"""Form of an answer → pattern of prompts that ask for it."""
Play = Callable[[dict[str, Any], Callable[[str], str]], Awaitable[Any]]
"""(problem, prompt → reply) → the result of its rollout."""


def with_verifiers_here(container: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration whose verifiers are this process, because the run's are not up yet."""
    jobs = container.get("jobs") or ()
    here = [{**job, "url": IN_PROCESS} if job["kind"] == "verifier" else job for job in jobs]
    return {**container, "jobs": here}


async def try_references(play: Play, problems: Sequence[Mapping[str, Any]]) -> str | None:
    """Plays problems with their own answers: one in the forms that its prompt asks for, all in every form if one fails.

    Args:
        play: plays one rollout. One that raises is ignored.
        problems: training problems. Those without an ``answer`` are not played.

    Returns:
        A warning if the prompt asks for a form that is never paid and another one is. Else None.
    """
    asked: set[str] = set()
    found: list[tuple[str, BaseMetrics]] = []

    async def try_form(problem: Mapping[str, Any], form: str) -> None:
        def reply(prompt: str) -> str:
            asked.update(form for form, asks in ASKED.items() if asks.search(prompt))
            return form.format(problem["answer"])

        with contextlib.suppress(Exception):  # of the user's function
            found.append((form, (await play(dict(problem), reply)).metrics))

    def paid() -> set[str]:
        return {form for form, one in found if one.success}

    answered = [problem for problem in problems if isinstance(problem.get("answer"), str | int | float)]
    for problem in answered[:1]:
        await try_form(problem, BOXED)
        await asyncio.gather(*(try_form(problem, form) for form in asked - {BOXED}))
    if asked <= paid():
        return None
    await asyncio.gather(*(try_form(problem, form) for problem in answered for form in ASKED))
    found.sort(key=lambda pair: pair[1].reward)  # the best one of a form is the last
    said = {form: f"`{form.format('…')}` earn {one.reward:g}" for form, one in found}
    unpaid = [said[form] for form in ASKED if form in said and form in asked - paid()]
    if not unpaid or not paid():
        return None
    return (
        f"right answers as {' and as '.join(unpaid)}, although the prompt asks for that form; as "
        f"{' and as '.join(said[form] for form in ASKED if form in paid())}. Change `actor.system_prompt` or "
        "`actor.task_template`, or what is judged (of `math`: `environment.answer_format`)"
    )
