"""Trains an existing agent: it calls an endpoint with OpenAI's or Anthropic's API, and every call is training data.

``record_agent`` opens an endpoint for one rollout. ``run_agent`` and ``run_agent_process`` open one and run a function
or a program against it. ``play_text_environment`` plays Gymnasium environments whose observations are text.
"""

from pipelinerl.agents.endpoint import RecordedAgent, record_agent
from pipelinerl.agents.environment import play_text_environment
from pipelinerl.agents.run import run_agent, run_agent_process

__all__ = ["RecordedAgent", "play_text_environment", "record_agent", "run_agent", "run_agent_process"]
