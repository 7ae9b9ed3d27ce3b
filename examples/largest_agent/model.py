"""The quickstart's tiny model, with its answer as a call of the tool `submit`."""

from random import Random

from pipelinerl.tiny_model.recipes import ANSWER_TAGS, Messages, Recipe, largest

SUBMIT = ('<tool_call>{"name": "submit", "arguments": {"number": ', "}}</tool_call>")


def largest_agent(max_number: int = 30, steps: int = 300) -> Recipe:
    """Like ``largest``, with the answer as a tool call."""

    def conversation(rng: Random) -> Messages:
        asked, answered = shown.conversation(rng)
        number = answered["content"].removeprefix(ANSWER_TAGS[0]).removesuffix(ANSWER_TAGS[1])
        return [asked, {"role": "assistant", "content": number.join(SUBMIT)}]

    shown = largest(max_number)
    return Recipe(tags=SUBMIT, max_number=max_number, conversation=conversation, steps=steps)
