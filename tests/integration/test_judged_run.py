"""Whole runs: one that learns from a judge's verdicts, and one whose teacher is the policy's start with a hint."""

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.hostile_answers import GullibleJudge
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.llm import load_tokenizer
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, MicroBatch, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.launches import run_experiment

TIMEOUT_S = 600


def says_right(messages: Sequence[dict[str, str]]) -> int:
    asked = messages[-1]["content"]
    (reference,), answers = re.findall(r"Reference:\n(\d+)", asked), re.findall(r"\n< answer>(\d+)< /answer>\n", asked)
    return int(answers == [reference])


def says_well_formed(messages: Sequence[dict[str, str]]) -> int:
    return int(re.search(r"\n< answer>\d+< /answer>\n", messages[-1]["content"]) is not None)


@contextmanager
def served(judge: GullibleJudge) -> Iterator[str]:
    """Serves a scripted judge in a thread while the block lasts."""
    loop, address = asyncio.new_event_loop(), list[str]()
    started, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with judge.serving() as url:
            address.append(url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_run_learns_from_two_judges_as_rewards_of_their_own(tmp_path: Path) -> None:
    run_dir, right, form = tmp_path / "run", GullibleJudge(says_right), GullibleJudge(says_well_formed)
    with served(right) as right_url, served(form) as form_url:
        judges = ", ".join(
            f"{{name: {name}, model_path: scripted, url: '{url}'}}"
            for name, url in (("right", right_url), ("form", form_url))
        )
        run_experiment(
            "quickstart",
            run_dir,
            f"judges=[{judges}]",
            "dataset_loader=tests.largest_tasks.load_judged",
            "dataset_loader_params.num_test_problems=256",
            "actor.rollout_policy=examples.judged.domain.generate_rollout",
            "finetune.rl.advantage=gdpo",
            "finetune.rl.reward_weights={right: 1.0, form: 0.3}",
            "finetune.max_train_steps=120",
            "eval_every_n_versions=0",
            timeout_s=TIMEOUT_S,
        )
    assert read_ledger(run_dir).violations == ()
    points = list(read_metrics(run_dir, "actor"))
    successes = [point["eval/success"] for point in points if "eval/success" in point]
    assert successes[-1] >= successes[0] + 0.3, successes
    assert {"right", "form", "right_std", "form_std"} <= points[-1].keys()
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    for group in groups[:20]:
        for rollout in group.rollouts:
            assert rollout.reward == pytest.approx(rollout.metrics["right"] + 0.3 * rollout.metrics["form"])


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_policy_learns_from_its_start_that_sees_a_hint(tmp_path: Path) -> None:
    """Scores of a real server against transformers', on prompt, hint and sampled tokens. Tolerance: as for teachers."""
    from transformers import AutoModelForCausalLM

    run_dir = tmp_path / "run"
    run_experiment(
        "quickstart",
        run_dir,
        "dataset_loader=tests.largest_tasks.load_hinted",
        "teachers=[{model_path: '${model_path}', hint: true}]",
        *("finetune.rl.teacher_coef=1", "finetune.rl.reward_coef=0", "finetune.max_train_steps=6", "attempts=2"),
        *("world.cpu_slots=3", "world.preprocessor_fraction=1", "eval.at_start=false", "eval.at_end=false"),
        timeout_s=TIMEOUT_S,
    )
    assert read_ledger(run_dir).violations == ()
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(run_dir / "model"))
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        records = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    hinted = {}
    for group in records:
        for rollout in group.rollouts:
            (sequence,) = rollout.sequences
            hinted[f"{group.group_id}/{rollout.attempt}/0"] = sequence
    checked, moved = 0, 0.0
    with open_reader(SingleStreamSpec(run_dir, "training_data"), MicroBatch, name=None) as reader:
        batches = [batch for _, batch in reader.read_all()]
    for batch in batches[:2]:
        ends = np.cumsum(batch.segment_lengths)
        for end, length, name in zip(ends, batch.segment_lengths, batch.sequence_ids, strict=True):
            sequence = hinted[name]
            first = int(sequence.spans[0, 0])
            prompt = tokenizer.decode(sequence.token_ids[:first])
            assert "It is" not in prompt
            assert "It is" in tokenizer.decode(sequence.hinted_prompt)
            answer = sequence.token_ids[first:].tolist()
            oracle = logprobs_after(model, sequence.hinted_prompt.tolist(), answer)
            plain = logprobs_after(model, sequence.token_ids[:first].tolist(), answer)
            found = batch.teacher_logprobs[end - length + first : end]
            np.testing.assert_allclose(found, oracle, atol=2e-5)
            checked, moved = checked + len(answer), max(moved, float(np.abs(oracle - plain).max()))
    assert checked > 0
    assert moved > 0.01, "the teacher reads the hint"


@torch.no_grad()
def logprobs_after(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> np.ndarray:
    ids = torch.tensor([[*prompt, *answer]])
    logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
