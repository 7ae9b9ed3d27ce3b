"""The run's servers as the configuration describes them: their models, vLLM's options, devices and capacity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipelinerl.config.nested import value_at, with_settings
from pipelinerl.config.objectives import loss_signature
from pipelinerl.config.sections import Config, JudgeSection
from pipelinerl.errors import ConfigError

EXPERT_PARALLEL = "enable-expert-parallel"
"""vLLM's option that gives each GPU of a server whole experts instead of a slice of every expert."""
EXPERT_KERNELS = "moe-backend"
"""vLLM's option that chooses the kernels of experts."""
SWAPPED_KERNELS = ("triton", "batched_triton")
"""Its values with which experts are swapped in place. vLLM itself chooses others on Blackwell."""
CAPTURED = 512
"""Sequences of the largest decoding step for which vLLM itself captures a CUDA graph. On Blackwell it is 1024."""
CAPTURE_SIZE = "max-cudagraph-capture-size"
CAPTURE_OPTIONS = (CAPTURE_SIZE, "cudagraph-capture-sizes", "compilation-config", "enforce-eager")


@dataclass(frozen=True, kw_only=True)
class ScoringModel:
    """A model whose log-probs of the trained tokens the loss needs."""

    path: str
    column: Literal["ref_logprobs", "teacher_logprobs"]
    """The samples' and micro-batches' field that gets them."""
    num_top: int = 0
    """How many most likely tokens of every place it scores, too."""
    domains: tuple[str, ...] | None = None
    """Domains whose samples it scores. None: all."""
    hint: bool = False
    """Whether it reads the problem's hint behind the prompt."""
    ema: float | None = None
    """Its weights are a moving average of the policy's with this decay. None: they stay."""

    @property
    def name(self) -> str:
        if self.ema is not None:
            return f"the policy's average (teachers.ema={self.ema:g})"
        return "the reference" if self.column == "ref_logprobs" else f"teacher {self.path}"

    def scores(self, domain: str) -> bool:
        return self.domains is None or domain in self.domains


def needs_reference(config: Config) -> bool:
    """Whether the loss reads the reference's log-probs at any step."""
    rl = config.finetune.rl
    return rl.kl_coef > 0 or rl.final_kl_coef > 0 or "ref_logprobs" in loss_signature(rl.policy_loss).figures


def scoring_models(config: Config) -> tuple[ScoringModel, ...]:
    """The reference model, if it is needed, and the teachers."""
    reference = ScoringModel(path=config.reference_model_path or config.model_path, column="ref_logprobs")
    teachers = [
        ScoringModel(
            path=teacher.model_path or config.model_path,
            column="teacher_logprobs",
            num_top=config.finetune.rl.teacher_top_k,
            domains=None if teacher.domains is None else tuple(teacher.domains),
            hint=teacher.hint,
            ema=teacher.ema,
        )
        for teacher in config.teachers
    ]
    return (*([reference] if needs_reference(config) else []), *teachers)


def sees_hint(config: Config, domain: str) -> bool:
    """Whether the teacher of a domain reads its problems' hints."""
    return any(model.hint and model.scores(domain) for model in scoring_models(config))


SideModel = ScoringModel | JudgeSection


def side_models(config: Config) -> tuple[SideModel, ...]:
    """The models that take turns in the servers of `preprocessor_llm`: those that score, then judges without a URL."""
    return (*scoring_models(config), *(judge for judge in config.judges if judge.url is None))


def side_model(config: Config, kind: str, number: int) -> SideModel | None:
    """The model of server ``number`` of its kind. None: it serves the policy's."""
    models = side_models(config) if kind.startswith("preprocessor_llm") else ()
    return models[number % len(models)] if models else None


def decay_of(config: Config, kind: str, number: int) -> float | None:
    """`teachers.ema` of server ``number`` of its kind. None: it is no average of the policy."""
    model = side_model(config, kind, number)
    return model.ema if isinstance(model, ScoringModel) else None


def takes_versions(config: Config, kind: str, number: int) -> bool:
    """Whether the trainer sends its versions to server ``number`` of a kind."""
    return kind == "actor_llm" or decay_of(config, kind, number) is not None


def served_path(config: Config, model: SideModel | None) -> str:
    """Path of the model that a server serves."""
    if model is None:
        return config.model_path
    return model.path if isinstance(model, ScoringModel) else model.model_path


def sends_adapter(config: Config) -> bool:
    """Whether the servers hold a frozen base and are sent the trainer's adapter alone."""
    return config.finetune.lora.enabled and config.finetune.lora.send == "adapter"


FIRST_ROLLOUTS = 32
MOST_ROLLOUTS = 1024
"""With `actor.llm_max_rollouts=auto`: rollouts at a time that a server takes at first, and at most."""

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2
"""Nats, of `weights.probe_tolerance=auto`: float32 at both ends, or a narrower type at one of them."""


def first_capacity(config: Config) -> int:
    """Rollouts at a time that a server takes until its lease has a number."""
    wanted = config.actor.llm_max_rollouts
    return FIRST_ROLLOUTS if wanted == "auto" else wanted


def most_rollouts(config: Config) -> int:
    """Rollouts at a time that a server takes at most."""
    wanted = config.actor.llm_max_rollouts
    return MOST_ROLLOUTS if wanted == "auto" else wanted


def captured_sequences(config: Config) -> int | None:
    """Sequences of the largest decoding step for which a policy server has a CUDA graph. None: by the user's choice."""
    options = config.vllm_config.vllm_kwargs
    most = options.get("max-num-seqs")
    is_chosen = any(options[key] not in (None, False) and option_of(key) in CAPTURE_OPTIONS for key in options)
    return most if isinstance(most, int) and not is_chosen else None


def requests_per_worker(config: Config, num_servers: int) -> int:
    """Requests that a rollout worker has under way at most when its actor's servers are full."""
    return -(-num_servers * most_rollouts(config) // config.actor.rollout_workers)


def with_plain_options(container: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with one spelling of vLLM's options: dashes, and `x` for its negation `no-x`.

    `x.y` sets a part of the option `x`. The name of the part, behind the dot, stays as it is.

    Raises:
        ConfigError: an option is named twice with different values, or whole and in parts.
    """
    given = value_at(container, "vllm_config.vllm_kwargs")
    if not isinstance(given, Mapping):
        return dict(container)
    options: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in given.items():
        option, *part = str(key).split(".", 1)
        name = ".".join([option.replace("_", "-"), *part])
        if name.startswith("no-") and (value == "" or isinstance(value, bool)):
            name, value = name.removeprefix("no-"), value is False
        if name in options and options[name] != value:
            first = spelt[name]
            raise ConfigError(
                f"`vllm_config.vllm_kwargs` names one option twice: {first}={options[name]!r} and {key}={value!r}; "
                f"set {first} alone"
            )
        options[name], spelt[name] = value, key
    for name in options:
        if (whole := option_of(name)) != name and whole in options:  # vLLM would read the parts alone
            raise ConfigError(
                f"`vllm_config.vllm_kwargs` names {spelt[whole]} and {spelt[name]}: set {spelt[whole]} alone, with "
                "that in it"
            )
    if options.get("max-num-seqs") == "auto":  # as actor.llm_max_rollouts, from which it is taken
        options["max-num-seqs"] = MOST_ROLLOUTS
    return with_settings(container, {"vllm_config.vllm_kwargs": options})


def option_of(name: str) -> str:
    """The option that a key of `vllm_kwargs` sets, whole or a part of it: `x` for `x` and `x.y`."""
    return name.partition(".")[0]


def max_model_len(config: Config) -> int | None:
    """Largest number of tokens in a request, prompt and completion together. None: the model's own.

    Raises:
        ConfigError: it is no whole number of at least 1. vLLM's `10k` and `auto` are not known here.
    """
    length = config.vllm_config.vllm_kwargs.get("max-model-len")
    if length is None:
        return None
    if not str(length).isdecimal() or int(length) < 1:
        raise ConfigError(f"`vllm_config.vllm_kwargs.max_model_len` is {length!r}: give a number of tokens, or null")
    return int(length)


def probe_tolerance(config: Config) -> float:
    """Largest deviation of a healthy server in nats, with `weights.probe_tolerance=auto` by the data types."""
    wanted = config.weights.probe_tolerance
    if wanted != "auto":
        return wanted
    served = config.vllm_config.vllm_kwargs.get("dtype")
    in_float32 = config.finetune.dtype == "float32" and served in ("float32", "float")
    return FLOAT32_TOLERANCE if in_float32 else HALF_TOLERANCE


def parallel_sizes(config: Config) -> tuple[int, int]:
    """Tensor-parallel and pipeline-parallel size of a server."""
    options = config.vllm_config.vllm_kwargs
    sizes = [str(options.get(key) or 1) for key in ("tensor-parallel-size", "pipeline-parallel-size")]
    if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise ConfigError(
            f"`vllm_config.vllm_kwargs`: tensor × pipeline parallel size is {' × '.join(sizes)}: both must be whole "
            "numbers of at least 1"
        )
    return int(sizes[0]), int(sizes[1])


def devices_per_server(config: Config) -> int:
    """Tensor-parallel × pipeline-parallel size."""
    tensor, pipeline = parallel_sizes(config)
    return tensor * pipeline


def devices_per_node(config: Config, nodes: int) -> int:
    """Devices that a server on this many nodes has on each of them.

    Raises:
        ConfigError: its devices cannot be divided by the nodes.
    """
    devices = devices_per_server(config)
    if devices % nodes:
        raise ConfigError(
            f"a server has {devices} device(s) (tensor × pipeline parallel size), which {nodes} nodes cannot share "
            "evenly: change `vllm_config.vllm_kwargs.tensor-parallel-size`, pipeline-parallel-size or the nodes"
        )
    return devices // nodes
