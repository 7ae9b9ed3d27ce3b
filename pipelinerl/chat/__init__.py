"""Messages to tokens and back: rendering with a chat template (`rendering`), reading tool calls (`tool_calls`)."""

from pipelinerl.chat.rendering import ChatRenderer, Rendered, Turn, extend, plain_message, renderer_of
from pipelinerl.chat.tool_calls import ReadText

__all__ = ["ChatRenderer", "ReadText", "Rendered", "Turn", "extend", "plain_message", "renderer_of"]
