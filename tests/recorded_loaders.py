"""Learns the shards of real vLLM models as workers of a server do, without an engine, and swaps versions into them.

    python -m tests.recorded_loaders OUTPUT FOLDER…        # a line of JSON per model, kind (tp, ep) and worker

A folder without weights has only its shards learned, for a server of two workers. Runs in a process of its own: it
makes vLLM believe that this is one worker of several. Layers are those of GPUs: they keep their weights as they were
loaded.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.adapter import adapter_specs
from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy, add_adapters
from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.adapter import AdapterSlots, hold_adapter
from pipelinerl.weights.load.adapter_request import ADAPTER
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.live_check import differing
from pipelinerl.weights.load.swap import PACKED_PRODUCT, Census, Swap, bare_model
from pipelinerl.weights.load.worker import StagedWeightTransferEngine
from pipelinerl.weights.protocol import Failed, ParamSpec, PayloadRange, Staged, WeightUpdateRequest
from pipelinerl.weights.publish.origin import Origin
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.transfer.shard import Shard, gather_runs, staged_copies, staged_wholes
from tests.sender_kit import sender_settings

CPU = torch.device("cpu")


def be(rank: int, size: int, *, experts: bool) -> None:
    """Makes this process one tensor-parallel worker, which also has whole experts if ``experts``."""
    for name in ("_TP", "_PP", "_DP", "_PCP", "_DCP", "_EP"):
        number, count = (rank, size) if name == "_TP" or (name == "_EP" and experts) else (0, 1)
        group = {"world_size": count, "rank_in_group": number, "rank": number, "ranks": list(range(count))}
        group |= {"is_first_rank": number == 0, "is_last_rank": number == count - 1}
        process_group = SimpleNamespace(rank=partial(int, number), size=partial(int, count))
        setattr(parallel_state, name, SimpleNamespace(**group, device_group=process_group, cpu_group=process_group))


def as_on_gpus(model: Any) -> Any:
    """Has every layer multiply with its weights as they were loaded."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "unquantized_backend"):
            method.unquantized_backend = UnquantizedMoeBackend.TRITON
        elif method is not None:
            module.__dict__[PACKED_PRODUCT] = nn.functional.linear
    return model


def with_memory(model: Any) -> Any:
    """Gives zeros to a bare model."""
    made = {id(parameter): materialize_meta_tensor(parameter).zero_() for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    return model


def specs_of(folder: Path) -> tuple[ParamSpec, ...]:
    """The tensors that a trainer sends of a model of which only the configuration is there."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    names = CheckpointNames(lm)
    parts = [(name, "bfloat16", parameter) for name, parameter in lm.named_parameters()]
    parts += [(name, spec_of(name, buffer).dtype, buffer) for name, buffer in names.buffers()]
    return tuple(
        ParamSpec(block.name, dtype, block.shape)
        for name, dtype, part in parts
        for block in names.blocks(name, tuple(part.shape))
    )


def learned(config: Any, layout: Layout) -> dict[str, Any]:
    bare = bare_model(config)
    plan = learn(bare, bare.load_weights, layout.specs)
    shard = Shard.of(layout, plan, [0])
    parameters = sum(parameter.nbytes for parameter in bare.parameters())
    sizes = {"parameters": parameters, "shard": shard.num_bytes, "of": layout.num_bytes, "copies": len(plan.copies)}
    return sizes | {"whole": shard.whole, "unlearned": plan.unlearned}


@torch.no_grad()
def swapped(config: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compares a model of which the shard was copied into place with one into which vLLM loaded the whole version."""
    layout = Layout(tuple(spec_of(*item) for item in weights.items()))
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, whole).fill(weights.items())
    bare, live, expected = (as_on_gpus(bare_model(config)) for _ in range(3))
    plan = learn(bare, bare.load_weights, layout.specs)
    shard = Shard.of(layout, plan, [0])
    buffer = gather_runs(shard.stripes[0], whole, 0, 0, shard.num_bytes)
    with_memory(expected).load_weights(weights.items())
    swap, census = Swap.of(with_memory(live), bare, config.model_config, CPU), Census(live)
    before, copies = census.take(), staged_copies(layout, plan, shard)
    swap.prepare(copies, buffer, plan.unlearned, staged_wholes(layout, plan, shard, buffer))
    swap.swap()
    ours, theirs = dict(live.named_parameters()), dict(expected.named_parameters())
    return {
        "moved": [old for old, new in zip(before, census.take(), strict=True) if old != new],
        "packed": sorted(swap.packed),
        "differing": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
        "compared": [*differing(copies, ours, buffer)],
    }


def served(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A model as a CPU server has it: loaded and packed by vLLM alone."""
    model = bare_model(config, CPU)
    model.load_weights(weights.items())
    process_weights_after_loading(model, config.model_config, CPU)
    return model


def unlike(ours: Any, theirs: Any, bare: Any) -> Iterator[str]:
    """Parameters that differ, and layers whose products differ."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(mine, other):
            yield name
    for (name, mine), other, plain in zip(ours.named_modules(), theirs.modules(), bare.modules(), strict=True):
        if PACKED_PRODUCT in mine.__dict__:
            inputs = torch.randn(5, plain.weight.shape[1], generator=torch.Generator().manual_seed(0))
            if not torch.equal(*(layer.cpu_linear(inputs, layer.weight, None) for layer in (mine, other))):
                yield name


@torch.no_grad()
def updated(config: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sends two versions to a worker of a CPU server, whose large layers and experts are packed."""
    live = served(config, weights)
    found: dict[str, Any] = {"checks": [], "unlike": []}
    with Updates(config, live) as updates:
        for version in (1, 2):
            sent = {name: torch.randn_like(tensor) * 0.1 for name, tensor in weights.items()}
            found["checks"].append(updates.swap(version, sent))
            found["unlike"] += unlike(live, served(config, sent), bare_model(config))
    return found


class Updates:
    """The engine of one worker, and a trainer that sends it versions."""

    def __init__(self, config: Any, live: nn.Module):
        self.engine = StagedWeightTransferEngine(WeightTransferConfig(backend="staged"), config, CPU, live)
        self.origin = Origin(sender_settings(secret=os.environ[SECRET_VARIABLE]), sender="run", rank=0, ranks=1)

    def __enter__(self) -> "Updates":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()
        self.origin.close()

    def stage(self, version: int, sent: dict[str, torch.Tensor]) -> Staged | Failed:
        specs = tuple(spec_of(*item) for item in sent.items())
        self.origin.take_snapshot(version, sent.items(), specs, SnapshotPlan())
        part = PayloadRange(start=0, end=Layout(specs).num_bytes, sources=(self.origin.address,))
        request = WeightUpdateRequest(
            **{"sender": "run", "version": version, "params": specs, "workers": ((part,),), "transport": "tcp"},
            **{"bucket_bytes": 1 << 20, "timeout_s": 60.0, "stall_s": 20.0},
        )
        end = self.engine.receiver.begin(request).reply(60)
        assert end is not None
        return end

    def swap(self, version: int, sent: dict[str, torch.Tensor]) -> list[Any]:
        """[bytes that were staged, whether they were compared, what differs, what was not compared]"""
        end = self.stage(version, sent)
        assert isinstance(end, Staged), end
        self.engine.finish_weight_update()
        check = self.engine.compare(version)
        return [end.staged_bytes, check.is_checked, check.differing, check.unlearned]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    """Random values of an adapter of all linear layers, or of attention beside experts, under the trainer's names."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"] if "moe" in folder.name else "all-linear"
    lora: Any = SimpleNamespace(r=4, alpha=4, dropout=0.0, target_modules=modules)
    lm = add_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora, seed=0)
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    specs = adapter_specs(ReplicatedEngine(Policy(lm), cfg, CPU), torch.float32)
    return {spec.name: torch.randn(spec.shape) for spec in specs}


def with_adapter(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A model whose layers vLLM has wrapped, and which holds the adapter of its requests."""
    model = served(config, weights)
    workers = LRUCacheWorkerLoRAManager(config, CPU, model.embedding_modules)
    workers.create_lora_manager(model, config)
    hold_adapter(workers)
    return model


@torch.no_grad()
def adapted(config: Any, weights: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Sends two adapters to a worker, and compares their places with those into which vLLM loads the second one."""
    live, expected = (with_adapter(config, weights) for _ in range(2))
    sent = [adapter_of(folder) for _ in range(2)]
    with Updates(config, live) as updates:
        checks = [updates.swap(version, adapter) for version, adapter in enumerate(sent)]
        manager = expected.lora_manager
        manager.remove_adapter(ADAPTER.lora_int_id)
        helper = PEFTHelper(r=4, lora_alpha=4, target_modules=[])
        manager.add_adapter(LoRAModel.from_lora_tensors(ADAPTER.lora_int_id, sent[1], helper, device="cpu"))
        manager.activate_adapter(ADAPTER.lora_int_id)
        ours, theirs = (dict(AdapterSlots(model.lora_manager).named_buffers()) for model in (live, expected))
        live.lora_manager.modules[next(iter(live.lora_manager.modules))].lora_a_stacked = ()
        moved = updates.engine.compare(1).differing
        unknown = {name.replace("q_proj", "z_proj"): tensor for name, tensor in sent[1].items()}
        refused = updates.stage(2, unknown)
    return {
        "checks": checks,
        "places": len(ours),
        "filled": sum(place.any().item() for place in ours.values()),
        "differing": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
        "of": sum(tensor.nbytes for tensor in sent[1].values()),
        "moved": moved,
        "refused": refused.error if isinstance(refused, Failed) else "",
    }


def main(output: str, folders: Iterable[Path]) -> None:
    with open(output, "w", buffering=1) as file:
        for folder in folders:
            path = folder / "model.safetensors"
            weights = load_file(path) if path.exists() else {}
            dtype = "float32" if weights else "bfloat16"
            specs = tuple(spec_of(*item) for item in weights.items()) or specs_of(folder)
            arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype=dtype)
            arguments.enable_lora, arguments.max_lora_rank = bool(weights), 8
            config = arguments.create_engine_config()
            for kind in ("tp", "ep") if config.model_config.is_moe else ("tp",):
                config.parallel_config.enable_expert_parallel = kind == "ep"
                size = 4 if weights else 2
                for rank in range(size):
                    be(rank, size, experts=kind == "ep")
                    with set_current_vllm_config(config):
                        found = learned(config, Layout(specs))
                        if weights:
                            found |= swapped(config, weights)
                        if weights and rank == 1:
                            found |= updated(config, weights)
                            found["adapter"] = adapted(config, weights, folder)
                    print(json.dumps({"model": folder.name, "kind": kind, "rank": rank} | found), file=file)


if __name__ == "__main__":
    os.environ.setdefault(SECRET_VARIABLE, "secret of these tests")
    main(sys.argv[1], map(Path, sys.argv[2:]))
