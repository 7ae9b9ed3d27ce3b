"""Time of the swap at the shapes of published models, on one CPU core, with vLLM's layers as they are on GPUs.

    python -m benchmarks.swap [--models Qwen2.5-7B/1 …] [--out benchmarks/swap.json]

Each model has all of its layers, as one worker of a server sees them: NAME/WORKERS, and NAME/WORKERS/ep with whole
experts. The first layer has memory, the others have none, so their copies cost what it costs to start a copy. `host_ms`
is the CPU time of a whole swap without the bytes of the first layer: copies that are started, layers that are processed
after loading, and both looks at the addresses. `layer_ms` is the time of the first layer's bytes, beside a plain copy
of as many bytes. On a GPU the host only starts the copies, and the device moves the bytes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.swap import Census, Swap, bare_model
from pipelinerl.weights.transfer.shard import Shard, staged_copies
from tests.models import save_published
from tests.recorded_loaders import CPU, as_on_gpus, be, specs_of, with_memory

MODELS = (
    "Qwen2.5-7B/1",
    "Qwen2.5-7B/2",
    "Qwen2.5-72B/8",
    "Qwen3-30B-A3B/2",
    "Qwen3-235B-A22B/8",
    "Qwen3-235B-A22B/8/ep",
)
REPEATS = 5


def best_ms(work: Callable[[], Any]) -> float:
    """Least CPU time of some repetitions."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - started))
    return round(min(found), 3)


@torch.no_grad()
def measure(folder: Path, name: str, workers: int, *, experts: bool) -> dict[str, Any]:
    arguments = EngineArgs(
        model=str(save_published(folder / "model", name)), skip_tokenizer_init=True, enforce_eager=True
    )
    config = arguments.create_engine_config()
    config.parallel_config.enable_expert_parallel = experts
    layout = Layout(specs_of(folder / "model"))
    be(0, workers, experts=experts)
    with set_current_vllm_config(config):
        bare, live = as_on_gpus(bare_model(config)), as_on_gpus(bare_model(config))
        started = time.process_time()
        plan = learn(bare, bare.load_weights, layout.specs)
        learn_s = time.process_time() - started
        with_memory(live.model.layers[0])
        swap, census = Swap.of(live, bare, config.model_config, CPU), Census(live)
    shard = Shard.of(layout, plan, [0])
    staged = torch.from_file(str(folder / "staged"), shared=True, size=shard.num_bytes, dtype=torch.uint8)
    copies = staged_copies(layout, plan, shard)
    prepared = time.process_time()
    swap.prepare(copies, staged)
    prepare_s = time.process_time() - prepared
    first = [one for one in copies if not dict(live.named_parameters())[one.target].is_meta]
    return {
        "model": name,
        "workers": workers,
        "experts": experts,
        "tensors": len(layout.specs),
        "copies": len(copies),
        "shard_bytes": shard.num_bytes,
        "learn_s": round(learn_s, 2),
        "prepare_s": round(prepare_s, 2),
    } | timed(swap, census, live, first, staged)


def timed(swap: Swap, census: Census, live: Any, first: list[Any], staged: torch.Tensor) -> dict[str, Any]:
    """``first``: the copies of the layer that has memory."""
    params = {name: param.data for name, param in live.named_parameters()}
    targets = [one.target_view.read(params[one.target]) for one in first]
    sources = [one.source(staged) for one in first]
    layer_bytes = sum(target.nbytes for target in targets)
    plain, copied = torch.zeros(layer_bytes, dtype=torch.uint8), torch.zeros(layer_bytes, dtype=torch.uint8)
    before = census.take()
    layer_ms = best_ms(lambda: torch._foreach_copy_(targets, sources))
    swap_ms = best_ms(lambda: (swap.swap(), census.check(census.take(), captures_graphs=True)))
    census.check(before, captures_graphs=True)
    plain_ms = best_ms(lambda: copied.copy_(plain))
    return {
        "host_ms": round(swap_ms - layer_ms, 3),
        "layer_ms": layer_ms,
        "layer_bytes": layer_bytes,
        "layer_gb_per_s": round(layer_bytes / layer_ms / 1e6, 2),
        "plain_copy_gb_per_s": round(layer_bytes / plain_ms / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME/WORKERS[/ep]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in args.models:
        name, workers, *kind = case.split("/")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), name, int(workers), experts=kind == ["ep"]))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps({"torch": torch.__version__, "threads": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
