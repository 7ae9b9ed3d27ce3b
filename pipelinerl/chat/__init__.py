"""Converts messages to tokens and back: `rendering` applies a chat template, `tool_calls` parses tool calls."""

from pipelinerl.chat.rendering import ChatRenderer, Rendered, Turn, extend, plain_message, renderer_of
from pipelinerl.chat.tool_calls import ReadText

__all__ = ["ChatRenderer", "ReadText", "Rendered", "Turn", "extend", "plain_message", "renderer_of"]
