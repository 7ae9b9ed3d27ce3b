"""What the domains with one question have in common."""

from pipelinerl.async_llm import make_training_text
from pipelinerl.domains.math.rollouts import RewardTable, get_reward, length_penalty
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


class JudgedMetrics(BaseMetrics):
    penalty: float = 0.0
    partial_score: float = 0.0


def prompt_of(cfg, task: str) -> Prompt:
    messages = [{"role": "system", "content": cfg.actor.system_prompt}] if cfg.actor.system_prompt else []
    return Prompt(messages=[*messages, {"role": "user", "content": cfg.actor.task_template.format(task=task)}])


def judged(cfg, llm: TrainableLLM, llm_call: LLMCall, problem: dict, status: str, latency: float, score: float = 0.0):
    """One text, whose reward is that of the table, discounted and shaped by its length."""
    rewards = RewardTable(**dict(cfg.rewards))
    rewards.log_config(problem["domain"])
    trace = make_training_text(llm, llm_call)
    reward = get_reward(status, trace.finished, rewards)
    if status == "wrong" and score > 0:
        reward += score * (rewards.correct_answer_finished - reward)
    reward *= cfg.actor.discount_factor**llm_call.output_length_tokens
    penalty = 0.0
    if rewards.buffer_tokens > 0:
        penalty = length_penalty(llm.parameters["max_tokens"], llm_call.output_length_tokens, rewards.buffer_tokens)
    trace.reward = reward + penalty
    trace.metadata.setdefault(problem["domain"], {}).update({"answer_status": status, "partial_score": score})
    return RolloutResult(
        training_texts=[trace],
        metrics=JudgedMetrics(
            reward=trace.reward,
            success=status == "correct",
            no_error=status != "unparsable",
            no_answer=status == "no_answer",
            penalty=penalty,
            partial_score=score,
        ),
        latency=latency,
        dataset_name=problem.get("dataset"),
        domain=problem["domain"],
    )
