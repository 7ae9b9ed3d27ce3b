"""The peer of `peers.py`: TRL's synchronous `GRPOTrainer` with transformers' generation, in a process of its own.

Reads one JSON file (task, overrides, seed, model, steps, threads, snapshot interval, output folder) and writes
`peer.json` there: the time of every optimizer step, in seconds since the process began, the CPU seconds of its
generation and of the rest of it, and the trainer's settings. Saving a snapshot stops its clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.peers_task import Task, load_task  # noqa: E402


def settings_of(task: Task, job: dict[str, Any]) -> dict[str, Any]:
    """Our own values where both have the setting, the peer's defaults elsewhere."""
    finetune, sampling = task.settings["finetune"], task.settings["llm"]["parameters"]
    batch = finetune["gradient_accumulation_passes"] * finetune["train_batch_size"]
    passes = job["peer_passes"]
    return {
        "max_steps": job["steps"],
        "per_device_train_batch_size": batch // passes,
        "gradient_accumulation_steps": passes,
        "num_generations": task.settings["attempts"],
        "max_completion_length": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "learning_rate": finetune["learning_rate"],
        "lr_scheduler_type": finetune["lr_scheduler_type"],
        "warmup_steps": finetune["num_warmup_steps"],
        "adam_beta1": finetune["optimizer"]["betas"][0],
        "adam_beta2": finetune["optimizer"]["betas"][1],
        "max_grad_norm": finetune["gradient_clipping_threshold"],
        "weight_decay": 0.0,
        "beta": 0.0,
        "seed": job["seed"],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Clock(TrainerCallback):
    """Notes when steps end and keeps the weights of some of them."""

    def __init__(self, folder: Path, every: int, tokenizer: Any):
        self.steps_s: list[float] = []
        self.training_began_s = 0.0
        self._folder, self._every, self.tokenizer = folder, every, tokenizer
        self._stopped_s = self._stopped_cpu_s = self._began_cpu_s = 0.0
        self.cpu_s = 0.0
        """Of all steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training_began_s = time.time() - STARTED
        self._began_cpu_s = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        now, cpu_s = time.time(), time.process_time()
        self.steps_s.append(now - STARTED - self._stopped_s)
        self.cpu_s = cpu_s - self._began_cpu_s - self._stopped_cpu_s
        if state.global_step % self._every == 0:
            for part in (model, self.tokenizer):
                part.save_pretrained(self._folder / f"step_{state.global_step}")
        self._stopped_s += time.time() - now
        self._stopped_cpu_s += time.process_time() - cpu_s


class TimedTrainer(GRPOTrainer):
    """Notes the CPU seconds of generation, rewards included."""

    generation_cpu_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        before = time.process_time()
        made = super()._generate_and_score_completions(inputs)
        self.generation_cpu_s += time.process_time() - before
        return made


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    torch.set_num_threads(job["threads"])
    task = load_task(job["task"], job["seed"], job["overrides"])
    rows = [{"prompt": task.messages(problem), "problem": json.dumps(problem)} for problem in task.problems("train")]

    def reward(completions: list[Any], completion_ids: list[list[int]], problem: list[str], **_: Any) -> list[float]:
        said = [completion[0]["content"] for completion in completions]
        ended = [ids[-1] == clock.tokenizer.eos_token_id for ids in completion_ids]
        asked = map(json.loads, problem)
        return [task.reward(*one) for one in zip(said, asked, ended, strict=True)]

    settings = settings_of(task, job)
    trainer = TimedTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder / "trainer"), **settings),
        train_dataset=Dataset.from_list(rows),
    )
    clock = Clock(folder, job["snapshot_every"], trainer.processing_class)
    trainer.add_callback(clock)
    trainer.train()
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    report = {
        "settings": settings,
        "defaults": {name: getattr(trainer.args, name) for name in ("loss_type", "scale_rewards", "epsilon", "top_k")},
        "training_began_s": clock.training_began_s,
        "steps_s": clock.steps_s,
        "generation_core_s": trainer.generation_cpu_s / job["steps"],
        "training_core_s": (clock.cpu_s - trainer.generation_cpu_s) / job["steps"],
        "mean_tokens": sum(lengths) / len(lengths),
    }
    (folder / "peer.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
