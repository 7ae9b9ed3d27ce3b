"""Converts messages to tokens and back.

`rendering` applies a chat template, `families` the code of a model family, `continuation` continues sampled tokens,
`reading` reads thoughts and tool calls.
"""

from pipelinerl.chat.continuation import Turn, answers_of, extend, history_of, left_turn
from pipelinerl.chat.families import renderer_of
from pipelinerl.chat.reading import ReadText
from pipelinerl.chat.rendering import ChatRenderer, Rendered

__all__ = [
    "ChatRenderer",
    "ReadText",
    "Rendered",
    "Turn",
    "answers_of",
    "extend",
    "history_of",
    "left_turn",
    "renderer_of",
]
