"""Trained tokens until a tiny student is right as often as wanted: from rewards, and from a teacher alone.

The student is the quickstart's model. The teacher is the same model trained on solved problems that are not held out,
until an answer sampled for a held-out one is right with probability `--teacher`. Each run is a whole run of the
quickstart with evaluations of its own, at its learning rate and with its 64 rollouts per step:

- `grpo` learns from rewards, 8 attempts at a problem;
- `sampled` learns from the teacher's log-probs of the sampled tokens, with the same attempts;
- `teacher` learns from the divergence over the teacher's most likely tokens, one attempt at each of 64 problems.

The result is the trained tokens until the first evaluation that reaches `--target`.

    python -m benchmarks.teacher --seeds 0 1 2 --ways grpo teacher --json benchmarks/teacher.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.domains.largest import load_problems
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import EvaluationDone
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.records.topics import EVALUATION
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from pipelinerl.tiny_model import build

MAX_NUMBER, BATCH, ROUND = 30, 64, 3
EVERY = 5
TAUGHT = (
    "world.cpu_slots=3",
    "world.preprocessor_fraction=1",
    "finetune.rl.teacher_coef=1",
    "finetune.rl.reward_coef=0",
)
WAYS = {
    "grpo": ("finetune=grpo",),
    "sampled": TAUGHT,
    "teacher": (*TAUGHT, "finetune.rl.teacher_top_k=8", "attempts=1"),
}
COMMON = (
    f"eval_every_n_versions={EVERY}",
    "dataset_loader_params.num_test_problems=256",
    "eval.at_start=true",
    "eval.at_end=false",
    "finetune.save_checkpoint_steps=1000",
)


def make_teacher(student: Path, folder: Path, wanted: float) -> float:
    """Train the student on solved problems until an answer is right with probability ``wanted``. Returns that."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, model = Random(0), AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    train, test = load_problems(["train"], MAX_NUMBER), load_problems(["test"], MAX_NUMBER)

    def tensors(problems: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for problem in problems:
            asked = [{"role": "user", "content": problem["question"]}]
            prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            answer = f"<answer>{problem['answer']}</answer>{tokenizer.eos_token}"
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer)]
            rows.append((ids[0] + ids[1], len(ids[0])))
        longest = max(len(ids) for ids, _ in rows)
        ids_BT = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        labels_BT = ids_BT.clone()
        for row, (ids, begin) in enumerate(rows):
            labels_BT[row, :begin] = -100
            labels_BT[row, len(ids) :] = -100
        return ids_BT, labels_BT

    def success() -> float:
        ids_BT, labels_BT = tensors(test)
        with torch.no_grad():
            logprobs_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
        asked_BT = labels_BT[:, 1:] == -100
        logprobs_BT = logprobs_BTV.gather(2, ids_BT[:, 1:, None])[..., 0].masked_fill(asked_BT, 0.0)
        return logprobs_BT.sum(1).exp().mean().item()

    while (share := success()) < wanted:
        for _ in range(ROUND):
            ids_BT, labels_BT = tensors(rng.sample(train, BATCH))
            model(input_ids=ids_BT, labels=labels_BT, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return share


def run(way: str, seed: int, student: Path, teacher: Path, steps: int, target: float, folder: Path) -> dict:
    """One run, and the tokens until it reaches the target. null = it does not."""
    own = [] if way == "grpo" else [f"teachers=[{{model_path: {teacher}}}]"]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={folder}"]
    keys = [f"model_path={student}", "tiny_model=null", f"seed={seed}", f"finetune.max_train_steps={steps}"]
    subprocess.run([*command, *keys, *WAYS[way], *COMMON, *own], check=True, stdout=sys.stderr)
    tokens, total = {0: 0}, 0
    for point in read_metrics(folder, "finetune"):
        total += int(point["tokens"])
        tokens[int(point["step"])] = total
    curve = [{"step": step, "tokens": tokens[step], "success": success} for step, success in read_curve(folder)]
    reached = next((point["tokens"] for point in curve if point["success"] >= target), None)
    return {"way": way, "seed": seed, "tokens_to_target": reached, "curve": curve}


def read_curve(folder: Path) -> list[tuple[int, float]]:
    """(version, held-out success) of every evaluation."""
    set_streams_backend("files")
    with open_reader(SingleStreamSpec(folder, EVALUATION), EvaluationMessage, name=None) as reader:
        found = [message for _, message in reader.read_all() if isinstance(message, EvaluationDone)]
    return [(done.version, done.success) for done in found if done.success is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--target", type=float, default=0.85, help="held-out success to reach")
    parser.add_argument("--teacher", type=float, default=0.95, help="held-out success of the teacher")
    parser.add_argument("--steps", type=int, nargs=3, default=[160, 160, 70], help="longest run, by way")
    parser.add_argument("--folder", type=Path, help="keep the models and runs here")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        root = (args.folder or Path(scratch)).absolute()
        student = build(root / "student", "largest", 0, {"max_number": MAX_NUMBER}, if_missing=True)
        teacher = root / "teacher"
        share = make_teacher(student, teacher, args.teacher)
        limits = dict(zip(WAYS, args.steps, strict=True))
        results = []
        for seed in args.seeds:
            for way in args.ways:
                results.append(run(way, seed, student, teacher, limits[way], args.target, root / f"{way}_{seed}"))
                found = {"target": args.target, "teacher_success": share, "runs": results}
                args.json.write_text(json.dumps(found, indent=1) + "\n")
                print(way, seed, results[-1]["tokens_to_target"], flush=True)


if __name__ == "__main__":
    main()
