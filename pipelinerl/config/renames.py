"""The keys of ServiceNow's PipelineRL (June 2026), and the key of this project for each.

The hint of a refused key, `pipelinerl migrate` and `docs/migrating.md` are made from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RenameKind = Literal["moved", "needless", "missing", "own"]
LEFT_OUT = "(left out)"
"""New value of a setting that is always on here."""
NO_EQUIVALENT = "(no equivalent)"
"""New value of a setting that does not exist here."""
SAMPLES = "samples"


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One key of PipelineRL, or with `.*` all keys below it, and its equivalent here."""

    old: str
    new: str | None = None
    """Dotted key; None = there is none."""
    kind: RenameKind
    why: str = ""
    """Reason, without a final full stop."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Old value → new value, if they differ."""
    unit: str = ""
    """Unit of the number there, if it differs from ours. The value is then carried over as text: `20000 samples`."""


def moved(old: str, new: str, why: str = "", *, values: Mapping[Any, Any] | None = None, unit: str = "") -> Rename:
    return Rename(old=old, new=new, kind="moved", why=why, values=values or {}, unit=unit)


def missing(old: str, why: str) -> Rename:
    return Rename(old=old, kind="missing", why=why)


QUANTISED = (
    "servers sample from the whole base, so a rounded one in the trainer would be another policy. "
    "The base is kept in `finetune.dtype`, without gradients and optimizer states"
)

EXPERIMENT = (
    moved("finetune.attempts", "attempts"),
    moved("max_lag", "max_lag_steps", "counted in samples there and in optimizer steps here", unit=SAMPLES),
    moved("finetune.max_lag", "max_lag_steps", "counted in samples there and in optimizer steps here", unit=SAMPLES),
    moved(
        "eval_every_n_versions",
        "eval_every_n_versions",
        "a version is a number of samples there and of optimizer steps here",
        unit=SAMPLES,
    ),
    moved("fp32_layer_prefix", "fp32_lm_head", "the head is found in the model", values={"lm_head": True}),
    missing("accelerate_config", "the launcher starts the ranks: set `use_deepspeed`, `use_fsdp`, or neither of them"),
    moved(
        "debug.mode",
        "debug.mode",
        "one kind of role at a time: run the next one on the first one's streams",
        values={
            "": LEFT_OUT,
            "actor+preprocessor": NO_EQUIVALENT,
            "finetune+preprocessor": NO_EQUIVALENT,
            "open_loop": NO_EQUIVALENT,
        },
    ),
    missing("debug.use_existing_llms", "name the servers: `debug.existing_llms: [http://HOST:PORT]`"),
    missing("environment_start_port", "see `world.port_base`"),
    moved("actor.sandbox_endpoint", "sandbox_endpoint"),
    moved("actor.sandbox_timeout", "sandbox_timeout_s"),
)
OUTCOMES = {"correct": "correct_answer", "wrong": "wrong_answer", "no_answer": "no_answer", "unparsable": "unparsable"}
"""Verdict → what PipelineRL's tables of rewards call it."""
ROLLOUTS = (
    moved("actor.log_each_n_secs", "actor.log_every_s", values={0: LEFT_OUT}),
    moved(
        "actor.max_rollout_retries", "actor.max_group_reissues", "a group is tried again whole", values={-1: LEFT_OUT}
    ),
    missing("actor.domain_mix", "write `domains`, a list with a `weight` each"),
    missing("domain_rollouts", "write it into `actor.domain_rollouts`, or `domains` with a weight each"),
    missing("actor.difficulty_aware_penalty", "a domain does not see its group; give the reward in the domain"),
    moved("rollout_timeout", "actor.rollout_timeout_s"),
    *(moved(f"rewards.{there}_finished", f"rewards.{here}") for here, there in OUTCOMES.items()),
    *(moved(f"rewards.{there}_not_finished", f"rewards.unfinished.{here}") for here, there in OUTCOMES.items()),
    moved("rewards.buffer_tokens", "preprocess.overlong_buffer_tokens", "the same soft penalty, for every domain"),
)
SERVERS = (
    missing("vllm_config.quantization", "remove it: weight updates are not quantized"),
    moved(
        "vllm_config.vllm_kwargs.enable-prefix-caching",
        "vllm_config.prefix_caching",
        "keys and values are bound to the weights that computed them, so it is exact and on",
        values={False: LEFT_OUT, True: "version", "": "version"},
    ),
    moved("vllm_config.vllm_kwargs.max-num-seq", "vllm_config.vllm_kwargs.max-num-seqs"),
    moved(
        "vllm_config.vllm_kwargs.tool-call-parser",
        "llm.tool_parser",
        "the actor reads tool calls from the tokens, not the server",
        values={"hermes": LEFT_OUT},
    ),
)
WORLD = (
    moved("world.actor_group_port", "world.port_base", "first port of the run's block", values={9000: LEFT_OUT}),
    moved("world.environment_start_port", "world.port_base", "first port of the run's block", values={7777: LEFT_OUT}),
)
TRAINER = (
    moved(
        "finetune.weight_update_interval",
        "finetune.weight_update_interval",
        "counted in samples there and in optimizer steps here",
        values={1: 1},
        unit=SAMPLES,
    ),
    moved(
        "finetune.model_class",
        "finetune.rl.advantage",
        "the value head is one of the advantages",
        values={
            "causal-language-modeling": LEFT_OUT,
            "causal-language-modeling-with-value-head": "value",
            "vision2seq-language-modeling": LEFT_OUT,
            "seq2seq-language-modeling": NO_EQUIVALENT,
        },
    ),
    moved("finetune.weight_decay", "finetune.optimizer.weight_decay", "of matrices; norms and biases have none"),
    moved(
        "finetune.load_as_bf16",
        "finetune.dtype",
        "weights and moments are float32",
        values={True: "bfloat16", False: "float32"},
    ),
    moved("finetune.fp32_layer_prefix", "fp32_lm_head", "the head is found in the model", values={"lm_head": True}),
    moved(
        "finetune.attn_implementation",
        "finetune.attn_implementation",
        "the best one is found",
        values={"flash_attention_2": LEFT_OUT},
    ),
    moved("finetune.use_flash_attention", "finetune.attn_implementation", values={True: LEFT_OUT, False: "sdpa"}),
    moved(
        "finetune.keep_intermediate_checkpoints",
        "finetune.keep_exports",
        "the number of exported models; null = all",
        values={True: LEFT_OUT, False: 1},
    ),
    missing(
        "finetune.interrupt_train_steps",
        "`finetune.max_train_steps` ends the run, `finetune.schedule_steps` the learning rate's schedule",
    ),
    moved("finetune.seed", "seed", "one seed for all"),
    moved("finetune.trust_remote_code", "trust_remote_code"),
    moved("finetune.force_restart", "force_restart"),
    moved(
        "finetune.optim",
        "finetune.optimizer.name",
        values={
            "adamw_torch": LEFT_OUT,
            "adafactor": "torch.optim.Adafactor",
            "cpuadam": NO_EQUIVALENT,
            "lion": "bitsandbytes.optim.Lion",
        },
    ),
    missing("finetune.also_save_steps", "set `finetune.save_checkpoint_steps`"),
    missing("finetune.sft_config_name", "`stage=sft` imitates the conversations of `sft.datasets`"),
    missing("finetune.memory_debug.enabled", "the trainer does not log its memory"),
    missing("finetune.lora.base_model_8bit", QUANTISED),
    missing("finetune.lora.base_model_4bit", QUANTISED),
    missing("finetune.lora.bias", "biases are not trained"),
    moved("finetune.lora.target_modules", "finetune.lora.target_modules", values={(): LEFT_OUT}),
)
OBJECTIVE = (
    moved(
        "finetune.rl.divide_advantage_by_std",
        "finetune.rl.advantage",
        "`group_std` subtracts the group's mean, PipelineRL the mean of the others: a factor of (G − 1) / G",
        values={True: "group_std", False: "loo"},
    ),
    moved("finetune.rl.clamp_log_ratio_ref_new_value", "finetune.rl.kl_clamp"),
    moved("finetune.rl.overlong_filtering", "preprocess.overlong_filtering"),
    moved(
        "finetune.rl.aggregate_loss",
        "finetune.rl.aggregation",
        "PipelineRL sums, whatever this key says",
        values={"sum": "sum_over_batch", "mean": "sum_over_batch"},
    ),
    moved(
        "finetune.rl.group_normalization",
        "finetune.rl.aggregation",
        "by trained tokens, where PipelineRL counts prompts too",
        values={True: "prompt_mean", False: LEFT_OUT},
    ),
    moved("finetune.rl.use_advantages", "finetune.rl.advantage", values={True: LEFT_OUT, False: NO_EQUIVALENT}),
    missing("finetune.rl.reward_minus_kl_coef", "set `finetune.rl.kl_coef`, a term of the loss"),
    missing("finetune.rl.relu_log_p_weights", "write an advantage or a loss of your own (docs/objectives.md)"),
)
WANDB = (moved("wandb.use_wandb", "wandb.mode", values={True: "online", False: "disabled"}),)
GROUPS: Mapping[str, tuple[Rename, ...]] = {
    "Experiment": EXPERIMENT,
    "Rollouts and rewards": ROLLOUTS,
    "Servers": SERVERS,
    "World and streams": WORLD,
    "Trainer": TRAINER,
    "Objective": OBJECTIVE,
    "wandb": WANDB,
}
NEEDLESS = frozenset(
    """
    actor.chunk_size actor.problem_queue_size actor.result_queue_size actor.rollout_retry_initial_delay_s
    actor.rollout_retry_max_delay_s actor.shared_memory_entry_size actor.submit_delay actor.threads_per_llm
    actor.throughput_window_size debug.place_inference_workers finetune.auto_device_map finetune.config_name
    finetune.cuda_empty_cache finetune.data finetune.eval_callback.* finetune.input finetune.log_each_n_steps
    finetune.lora.task_type finetune.max_eval_steps finetune.memory_debug.* finetune.n_examples
    finetune.objective finetune.output_dir finetune.pop_old_data finetune.queue_size
    finetune.reentrant_checkpointing finetune.resume_dataloader finetune.rl.batch_size
    finetune.save_final_training_state finetune.send_weight_updates finetune.use_safetensors
    finetune.valid_batch_size fsdp.* jobs me.* pop_old_data preprocess.chunk_n_groups
    preprocess.dataset_buffer_size preprocess.input preprocess.input_queue_size preprocess.log_every_n_samples
    preprocess.max_ready_samples_per_lead preprocess.n_workers preprocess.output preprocess.output_queue_size
    preprocess.pop_old_data preprocess.queue_size preprocess.raw_queue_size preprocess.ring_buffer_size
    preprocess.shared_memory_entry_size streams.save vllm_config.use_v1 vllm_config.vllm_kwargs.async-scheduling
    vllm_config.vllm_kwargs.enable-auto-tool-choice vllm_config.vllm_kwargs.enable-chunked-prefill
    vllm_config.vllm_kwargs.logprobs-mode vllm_config.vllm_kwargs.num-scheduler-steps
    vllm_config.vllm_kwargs.return-tokens-as-token-ids vllm_config.vllm_kwargs.tool-parser-plugin
    wandb.wandb_dir wandb.wandb_id wandb.wandb_resume wandb.wandb_use_basename wandb.wandb_workspace_root
    world.environment_mode
    """.split()  # noqa: SIM905 — a list would take a line for each
)
"""Keys that nothing here needs, or with `.*` all keys below one."""
OF_DOMAINS = frozenset(
    """
    actor.agent_max_loops actor.ensure_boxed_answers actor.ifeval_partial_credit actor.max_tests_per_problem
    actor.task_prompt agent agent_attempts agent_max_loops length_shaping max_tests_per_problem python_tool_shaping
    reward_computation sandbox_timeout save_tapes start_attempts
    """.split()  # noqa: SIM905
)
"""Keys that only PipelineRL's domains read. They stay where they are, and `extra_keys` names them."""
RENAMES: Mapping[str, Rename] = {
    **{row.old: row for rows in GROUPS.values() for row in rows},
    **{name: Rename(old=name, kind="needless") for name in NEEDLESS},
    **{name: Rename(old=name, kind="own") for name in OF_DOMAINS},
}
GAMES = "pipelinerl.domains.pipelinerl_games."
DOTTED_NAMES = {
    "pipelinerl.domains.math.load_datasets": "pipelinerl.domains.math.load_problems",
    "pipelinerl.domains.guessing.load_problems": f"{GAMES}guessing.load_problems",
    "pipelinerl.domains.guessing.guessing.load_problems": f"{GAMES}guessing.load_problems",
    "pipelinerl.domains.guessing.generate_guessing_rollout": f"{GAMES}guessing.generate_rollout",
    "pipelinerl.domains.guessing.guessing.generate_guessing_rollout": f"{GAMES}guessing.generate_rollout",
    "pipelinerl.domains.counting.load_problems": f"{GAMES}counting.load_problems",
    "pipelinerl.domains.counting.counting.load_problems": f"{GAMES}counting.load_problems",
    "pipelinerl.domains.counting.generate_counting_rollout": f"{GAMES}counting.generate_rollout",
    "pipelinerl.domains.counting.counting.generate_counting_rollout": f"{GAMES}counting.generate_rollout",
}
"""Functions of PipelineRL's domains that have another name here. Data, prompts and judge are the same."""
SAME_DOMAINS = ("math", "dispatcher", "multidomain", "pipelinerl_games")
"""Folders and modules of `pipelinerl.domains` whose names mean the same there and here."""


def rename_of(key: str) -> Rename | None:
    """The row of a dotted key: its own, or that of a section around it."""
    if key in RENAMES:
        return RENAMES[key]
    parts = key.split(".")
    around = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((RENAMES[name] for section in around for name in (section, f"{section}.*") if name in RENAMES), None)


def hint(row: Rename) -> str:
    """Returns the hint for a user who writes the old key."""
    explanation = explained(row)
    if row.kind == "moved":
        return f"PipelineRL's key is `{row.new}` here" + (f" ({explanation})" if explanation else "")
    if row.kind == "own":
        return f"it is the domain's own: add it to `extra_keys: [{row.old}]`"
    if row.kind == "needless":
        return "PipelineRL's key is not needed here"
    return f"PipelineRL's key has no equivalent here: {explanation}"


def explained(row: Rename) -> str:
    """Returns reason, values and unit of a row. May be empty."""
    values = "; ".join(f"{_in_yaml(old)} → {_in_yaml(new)}" for old, new in row.values.items() if old != new)
    example = f"e.g. `1024 {row.unit}`" if row.unit else ""
    return ", ".join(part for part in (row.why, values, example) if part)


def _in_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value) or '""'
