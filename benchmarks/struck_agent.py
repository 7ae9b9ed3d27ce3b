"""An agent of 20 turns that writes down every answer it is given, for runs that are struck (`struck_run.py`).

``read_plays`` reads what all processes of a run wrote, so that the answers of a rollout before and after a strike can
be compared.
"""

import hashlib
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents import record_agent
from pipelinerl.agents.endpoint import RecordedAgent
from pipelinerl.domains.largest import load_problems
from pipelinerl.llm import LLMCall, TrainableLLM
from pipelinerl.rollouts import RolloutResult

__all__ = ["generate_rollout", "load_problems"]

TURNS = 20
FOLDER = "played"


@dataclass
class Play:
    """One time that the agent of a rollout ran."""

    began: int
    """Unix time in ns."""
    answers: list[str] = field(default_factory=list)
    """Digest of tokens, log-probabilities and versions of each answer that the agent was given."""


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Asks 20 times over HTTP. The reward is the share of turns that were answered with the right number."""
    began, name, right = time.time_ns(), llm.state.name, 0
    path = Path(cfg.output_dir) / FOLDER / f"{os.getpid()}.jsonl"
    path.parent.mkdir(exist_ok=True)
    messages = [{"role": "user", "content": problem["question"]}]
    with path.open("ab", buffering=0) as written:
        async with record_agent(llm, session) as agent:
            for turn in range(TURNS):
                message = await ask(agent, session, messages)
                line = {"rollout": name, "began": began, "turn": turn, "answer": digest(agent.calls[-1])}
                written.write(json.dumps(line).encode() + b"\n")
                right += str(problem["answer"]) in (message["content"] or "")
                messages += [message, {"role": "user", "content": "Again."}]
            return agent.result(reward=right / TURNS, success=right > TURNS / 2, dataset_name=problem.get("dataset"))


async def ask(agent: RecordedAgent, session: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Posts a request to the endpoint and returns the message."""
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": f"Bearer {agent.api_key}"}
    async with session.post(f"{agent.base_url}/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["message"]


def digest(call: LLMCall) -> str:
    """Returns a digest of what is trained of the answer."""
    tokens = call.call_tokens
    assert tokens is not None
    assert tokens.logprobs is not None
    parts = (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs, tokens.version_spans)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def read_plays(run_dir: Path) -> dict[str, list[Play]]:
    """Returns the plays of every training rollout, in their order. The trial before a start is none, it has no name."""
    plays: dict[str, dict[int, Play]] = defaultdict(dict)
    for path in (run_dir / FOLDER).glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            found = json.loads(line)
            if found["rollout"] and not found["rollout"].startswith("test-"):
                play = plays[found["rollout"]].setdefault(found["began"], Play(found["began"]))
                play.answers.append(found["answer"])
    return {name: [found[began] for began in sorted(found)] for name, found in plays.items()}


def sampled_again(plays: list[Play]) -> int:
    """Returns how many turns of a rollout have another answer in one play than in its longest."""
    longest = max(plays, key=lambda play: len(play.answers)).answers
    return sum(a != b for play in plays for a, b in zip(play.answers, longest, strict=False))
