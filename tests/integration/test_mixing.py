"""Three domains in one run, through the real actor and preprocessor: what is trained meets the weights.

The trainer and the server are played; rollouts of one domain take ten times as long as those of another.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import pipelinerl.actor.role
import pipelinerl.preprocess.loop
from pipelinerl.config.load import compose, load_run
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.membership.role import RoleContext
from pipelinerl.records import PreprocessorProgress, SamplesProcessed, TrainerMessage, WeightUpdateSuccess, topics
from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader, open_writer
from pipelinerl.testing import FakeServer, byte_tokenizer, save_tokenizer
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node
from tests.scripted_actor import QuietStatus

TOKENIZER = byte_tokenizer()
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}
STEPS, BATCH, ATTEMPTS = 20, 32, 4
TIMEOUT_S = 120

DOMAIN = """
import asyncio
from pipelinerl.domains import largest

def load_problems(names, *, domain, seconds):
    return [p | {"seconds": seconds} for p in largest.load_problems(["train"], max_number=12)]

async def generate_rollout(cfg, llm, problem, session):
    result = await largest.generate_rollout(cfg, llm, problem, session)
    await asyncio.sleep(problem["seconds"])
    return result
"""


def domains_override(seconds: dict[str, float]) -> str:
    domains = [
        f"{{name: {name}, weight: {weight}, rollout_policy: slow_domain.generate_rollout,"
        f" dataset_loader: slow_domain.load_problems, train_dataset_names: [train], test_dataset_names: [],"
        f" dataset_loader_params: {{domain: {name}, seconds: {seconds[name]}}}}}"
        for name, weight in WEIGHTS.items()
    ]
    return f"domains=[{','.join(domains)}]"


def write_run(run_dir: Path, url: str, seconds: dict[str, float]) -> None:
    save_tokenizer(run_dir / "model", TOKENIZER)
    (run_dir / "model" / "config.json").write_text(f'{{"vocab_size": {len(TOKENIZER)}}}')
    cfg = compose(
        "base",
        [
            f"output_dir={run_dir}",
            f"model_path={run_dir / 'model'}",
            "dataset_loader=slow_domain.load_problems",
            "actor.rollout_policy=slow_domain.generate_rollout",
            domains_override(seconds),
            f"attempts={ATTEMPTS}",
            f"finetune.gradient_accumulation_passes={BATCH}",
            f"finetune.max_train_steps={STEPS}",
            "actor.llm_max_rollouts=256",
            "max_lag_steps=3",
            "eval.at_start=false",
            "eval.at_end=false",
            "eval_every_n_versions=0",
            "llm.parameters.max_tokens=64",
            "wandb.mode=disabled",
        ],
    )
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    container.pop("hydra", None)
    (run_dir / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(container), run_dir / "conf" / "config.yaml")
    jobs = (
        Job(name="actor_0", kind="actor"),
        Job(name="preprocessor_0", kind="preprocessor"),
        Job(name="actor_llm_0", kind="actor_llm", url=url),
        Job(name="finetune_0", kind="finetune", num_ranks=1),
    )
    nodes = (Node(rank=0, hostname="127.0.0.1", devices=1, cores=(0,)),)
    WorldMap(accelerator="cpu", nodes=nodes, jobs=jobs, master_port=1, weight_port=2, weight_ports=1).save(run_dir)


async def train(run_dir: Path, server: FakeServer) -> list[str]:
    """Plays the trainer, one optimizer step per packed batch; returns the ids of the samples it trained."""
    trained: list[str] = []
    with (
        open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as trainer_topic,
        open_reader(SingleStreamSpec(run_dir, topics.PREPROCESSOR), PreprocessorProgress, name=None) as packed,
    ):
        trainer_topic.write(WeightUpdateSuccess(version=0, servers=("actor_llm_0",)))
        while len(trained) < STEPS * BATCH:
            for _, progress in await asyncio.to_thread(packed.poll, 0.05):
                if progress.packed_sample_ids:
                    trained += progress.packed_sample_ids
                    server.version = progress.step
                    trainer_topic.write(SamplesProcessed(samples_processed=len(trained), step=progress.step))
                    trainer_topic.write(WeightUpdateSuccess(version=progress.step, servers=("actor_llm_0",)))
    return trained


async def beside(roles: list[Coroutine[Any, Any, None]], work: Coroutine[Any, Any, list[str]]) -> list[str]:
    """The work's result; a role that ends before it fails the test with its reason."""
    tasks = [asyncio.ensure_future(role) for role in roles]
    main = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([main, *tasks], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {main}:
        task.result()
    main.cancel()
    assert main in done, "training did not get there"
    return main.result()


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param({"a": 0.3, "b": 0.03, "c": 0.1}, id="heaviest-domain-slowest"),
        pytest.param({"a": 0.03, "b": 0.1, "c": 0.3}, id="lightest-domain-slowest", marks=pytest.mark.slow),
    ],
)
async def test_trained_mix_is_within_two_points_of_the_weights_at_every_step(
    seconds: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_domain.py").write_text(DOMAIN)
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    stop = threading.Event()

    def answer(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
        return [*TOKENIZER.encode(f"<answer>{index}</answer>"), TOKENIZER.eos_token_id]

    async with FakeServer(answer) as server:
        write_run(run_dir, server.url, seconds)
        cfg = load_run(run_dir)
        backend_from_config(cfg, run_dir)
        world = WorldMap.load(run_dir)

        def role(run: Callable[[RoleContext], None], job: str) -> Coroutine[Any, Any, None]:
            status: Any = QuietStatus()
            context = RoleContext(run_dir=run_dir, job=world.job(job), cfg=cfg, world=world, status=status, stop=stop)
            return asyncio.to_thread(run, context)

        roles = [role(pipelinerl.actor.role.run, "actor_0"), role(pipelinerl.preprocess.loop.run, "preprocessor_0")]
        try:
            trained = await beside(roles, train(run_dir, server))
        finally:
            stop.set()

    assert_mix(trained)


def assert_mix(trained: list[str]) -> None:
    """``trained`` are the ids of samples in the order of training."""
    assert len(trained) == STEPS * BATCH
    domains = [sample_id.split("-")[0] for sample_id in trained]
    shares = {name: count / len(trained) for name, count in Counter(domains).items()}
    assert shares == pytest.approx(WEIGHTS, abs=0.02)
    # From the first step on the mix is right, within two groups, not only when a slow domain has caught up.
    for step in range(1, STEPS + 1):
        counts = Counter(domains[: step * BATCH])
        assert all(abs(counts[n] - w * step * BATCH) <= 2 * ATTEMPTS for n, w in WEIGHTS.items()), (step, counts)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_launched_run_with_a_slow_domain_trains_the_mix(tmp_path: Path) -> None:
    """The same with real servers and trainer; the lightest domain takes ten times as long as the heaviest."""
    (tmp_path / "slow_domain.py").write_text(DOMAIN)
    run_dir = tmp_path / "run"
    overrides = (
        domains_override({"a": 0.2, "b": 0.6, "c": 2.0}),
        f"attempts={ATTEMPTS}",
        f"finetune.gradient_accumulation_passes={BATCH}",
        f"finetune.max_train_steps={STEPS}",
        "dataset_loader_params.max_number=12",
        "eval.at_start=false",
        "eval.at_end=false",
    )
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *overrides], env=env, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert read_ledger(run_dir).violations == ()
    with open_reader(SingleStreamSpec(run_dir, topics.PREPROCESSOR), PreprocessorProgress, name=None) as packed:
        assert_mix([sample_id for _, record in packed.read_all() for sample_id in record.packed_sample_ids])
