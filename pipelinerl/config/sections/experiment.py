"""The whole configuration: the keys of the experiment, and every section."""

from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipelinerl.config.keys import REQUIRED, Section, entry_key, key
from pipelinerl.config.objectives import POLICY_LOSSES
from pipelinerl.config.sections.machines import (
    ArchiveSection,
    LauncherSection,
    StreamsSection,
    TracingSection,
    VerifierSection,
    WandbSection,
    WorldSection,
)
from pipelinerl.config.sections.rollouts import (
    ActorSection,
    EvalSection,
    EvaluationLLMSection,
    LLMSection,
    PreprocessSection,
)
from pipelinerl.config.sections.serving import VLLMSection, WeightsSection
from pipelinerl.config.sections.training import FinetuneSection

TrackerName = Literal["wandb", "tensorboard", "trackio"]


class TinyModelSection(Section):
    """Recipe of a model that is built on the spot when `model_path` does not exist."""

    recipe: str = key(
        REQUIRED,
        "name of a recipe of `pipelinerl.tiny_model`. Or of a function of yours that returns a `Recipe` "
        "(`module.function`)",
    )
    seed: NonNegativeInt = key(REQUIRED, "seed of its weights")
    params: dict[str, Any] = key(REQUIRED, "arguments of the recipe")


class SFTSection(Section):
    """Conversations to imitate: all of a run with `stage: sft`, or beside the rollouts of one with `stage: rl`."""

    datasets: list[str] = key(
        [],
        "JSONL, JSON, CSV or parquet files, or names on the Hugging Face hub: `<name>[:<config>][@<split>]`. "
        "Columns: `messages` and perhaps `tools`, in OpenAI's form, or `prompt` and `completion`. "
        "[guides/sft.md](guides/sft.md) has the others, and the weights that rows and messages may give",
    )
    test_datasets: list[str] = key(
        [],
        "`stage: sft`: held-out conversations, in the same form. Their loss is computed when `eval.at_start`, "
        "`eval_every_n_versions` and `eval.at_end` say so, on the trainer",
        may_change=True,
    )
    epochs: PositiveFloat | None = key(
        None,
        "`stage: sft`: passes over the rows of `datasets`. They replace `finetune.max_train_steps`. Null = that many "
        "steps",
        may_change=True,
    )
    per_step: NonNegativeInt = key(
        0, "`stage: rl`: conversations beside the rollouts of each optimizer step. With `stage: sft` it is the batch"
    )
    weight: PositiveFloat = key(1.0, "weight of the mean of −log π over their tokens beside the loss of the rollouts")
    prompt_weight: float = key(
        0.0, "weight of a token that the assistant does not say, to that of one it says", ge=0, le=1
    )
    max_left_out: float = key(
        0.1,
        "largest share of the rows that may be left out because they do not say what to imitate, or cannot be rendered",
        ge=0,
        le=1,
        may_change=True,
    )


class JudgeSection(Section):
    """Who judges answers where no program can: a language model that says how good one is, or a reward model.
    [guides/judge.md](guides/judge.md) shows both."""

    name: str = key(REQUIRED, "name by which a domain asks for it, and of its metric")
    model_path: str = key(
        REQUIRED, "Hugging Face name or local folder of its model. With `url`, the name that the model has there"
    )
    url: str | None = entry_key(
        None,
        "address of an OpenAI-compatible API, as its clients take it (`https://api.openai.com/v1`). It gets "
        "`OPENAI_API_KEY` from the environment. Null = a server of the run, with a share of those of "
        "`world.preprocessor_fraction`",
    )
    kind: Literal["chat", "reward"] = entry_key(
        "chat",
        "`chat`: a model that reads the rubric and says a score. `reward`: a model for sequence classification with "
        "one label, whose number is the score",
    )
    rubric: str = entry_key("Judge whether the answer is right and complete.", "chat: what counts")
    template: str | None = entry_key(
        None, "chat: what is asked, with the places `{question}`, `{reference}`, `{answer}`. Null = the built-in one"
    )
    levels: PositiveInt = entry_key(1, "chat: the best score. The verdict is the score divided by this")
    votes: PositiveInt = entry_key(1, "chat: opinions about each answer")
    vote: Literal["mean", "majority"] = entry_key(
        "mean", "chat: what several opinions give. Of equally frequent ones the majority is the lowest"
    )
    temperature: NonNegativeFloat = entry_key(0.0, "chat: of its sampling")
    max_tokens: PositiveInt = entry_key(1024, "chat: longest opinion")
    max_answer_chars: PositiveInt = entry_key(
        20_000, "characters of an answer that it reads. Longer answers are truncated; the prompt says so"
    )
    concurrency: PositiveInt = entry_key(64, "requests at a time per rollout worker", may_change=True)
    timeout_s: PositiveFloat = entry_key(120, "longest time of one request", may_change=True)
    max_calls: PositiveInt | None = entry_key(
        None,
        "requests of one rollout worker, repeated ones too, after which the run ends. Null = no limit",
        may_change=True,
    )


class TeacherSection(Section):
    """A model whose log-probs of the sampled tokens are given to the loss. It has servers of its own."""

    model_path: str | None = entry_key(
        None, "Hugging Face name or local folder. Its tokenizer must be the policy's. Null = the policy's own"
    )
    ema: float | None = entry_key(
        None,
        "decay of the moving average: teacher = ema · teacher + (1 − ema) · policy in every optimizer step, from the "
        "run's start on. Null = its weights stay",
        ge=0,
        lt=1,
    )
    domains: list[str] | None = entry_key(None, "names of the domains that it teaches. Null = all")
    hint: bool = entry_key(
        False,
        "it reads the problem's text `hint` behind the prompt, and the policy does not. With the policy's own "
        "`model_path` this is self-distillation",
    )


class SubsetSection(Section):
    """A part of the training problems."""

    begin: NonNegativeInt = key(REQUIRED, "first problem")
    end: PositiveInt = key(REQUIRED, "the problem after the last one")


class DebugSection(Section):
    """Roles without the rest of the run. [guides/debug-modes.md](guides/debug-modes.md) shows each mode."""

    mode: Literal["servers", "actor", "evaluation", "preprocessor", "finetune"] | None = key(
        None,
        "start only these roles. `servers`: inference servers, until Ctrl-C. `actor`: rollouts without training, for "
        "`finetune.max_train_steps` batches. `evaluation`: the test problems once. `preprocessor` and `finetune`: on "
        "the streams of `debug.streams_from`. Null = the whole run",
    )
    existing_llms: list[str] = key(
        [],
        "actor and evaluation: URLs of running servers of this project, e.g. `[http://127.0.0.1:8080]`, instead of "
        "servers of the run's own. Any weights count as version 0",
        may_change=True,
    )
    streams_from: str | None = key(
        None,
        "preprocessor and finetune: folder of the run whose recorded streams they read. They are copied",
    )


class DomainSection(Section):
    """One domain of a mixed run."""

    name: str = key(REQUIRED, "name of the domain in metrics and messages")
    weight: PositiveFloat = key(REQUIRED, "share of the trained samples, relative to the other domains")
    rollout_policy: str = key(REQUIRED, "as `actor.rollout_policy`")
    dataset_loader: str = key(REQUIRED, "as `dataset_loader`")
    dataset_loader_params: dict[str, Any] = key(REQUIRED, "as `dataset_loader_params`")
    train_dataset_names: list[str] = key(REQUIRED, "as `train_dataset_names`")
    test_dataset_names: list[str] = key(REQUIRED, "as `test_dataset_names`")


class Config(Section):
    """The experiment."""

    output_dir: str = key(
        REQUIRED, "run folder: configuration, logs, streams, checkpoints, metrics, summary", may_change=True
    )
    model_path: str = key(
        "Qwen/Qwen2.5-7B", "Hugging Face name or local folder of the policy. It is also the reference model"
    )
    reference_model_path: str | None = key(
        None, "another reference model, with the policy's tokenizer. Null = `model_path`"
    )
    teachers: list[TeacherSection] = key(
        [],
        "models whose log-probs of the sampled tokens the loss sees ([objectives.md](objectives.md#teachers)). Each "
        "has a share of the servers of `world.preprocessor_fraction`",
    )
    judges: list[JudgeSection] = key(
        [], "models that judge answers for the domains that ask them ([guides/judge.md](guides/judge.md))"
    )
    stage: Literal["rl", "sft"] = key(
        "rl",
        "`rl`: learn from rollouts. `sft`: imitate the conversations of `sft`, without servers and rollouts. A run of "
        "the other stage starts from its export by `model_path`",
    )
    sft: SFTSection
    tiny_model: TinyModelSection | None = key(
        None,
        "recipe of a model that is built when `model_path` does not exist. The quickstart uses one. Null = "
        "`model_path` must exist",
    )
    seed: NonNegativeInt = key(42, "order of problems, sampling seeds of servers, initial values")
    attempts: PositiveInt = key(8, "rollouts of one problem, the group over which the advantage is taken")
    max_lag_steps: NonNegativeInt | None = key(
        8,
        "how far generation may run ahead: maximum mean lag of a rollout, in optimizer steps from start to "
        "training. `preprocess.lag_drop` makes it a bound on every token. 0 = synchronous, null = no bound. "
        "Also e.g. `2048 samples`",
    )
    schedule: Literal["pipeline", "conventional"] = key(
        "pipeline",
        "`pipeline` generates and trains side by side. `conventional` generates the data of `steps_per_phase` steps "
        "with frozen weights, trains them, and pushes",
    )
    steps_per_phase: PositiveInt = key(1, "conventional only: optimizer steps per phase")
    eval_every_n_versions: NonNegativeInt = key(
        100,
        "evaluate on the test problems every n weight versions. Each evaluation is on one known version. 0 = not in "
        "between. Also e.g. `20000 samples`, divided by the optimizer batch",
        may_change=True,
    )
    force_restart: bool = key(
        False,
        "delete what the run folder holds and start over. Otherwise the same command resumes",
        may_change=True,
    )
    resume: Literal["streams", "checkpoint"] = key(
        "streams",
        "how a run is resumed: `streams` exactly where it stopped; `checkpoint` from the newest good "
        "checkpoint with new streams, for streams that are damaged. What was not trained is generated again, and the "
        "damaged streams are kept in `lost/`",
        may_change=True,
    )
    dry_run: bool = key(
        False, "print world, commands, memory plan and warnings. Start and write nothing", may_change=True
    )
    trust_remote_code: bool = key(
        False, "let transformers and vLLM run code that comes with the model", may_change=True
    )
    fp32_lm_head: bool = key(True, "output head in float32 in trainer and server")
    deepspeed_config: str = key(
        "deepspeed_stage3_bf16",
        "file of `conf/deepspeed` without `.json`. Or the absolute path of another",
        may_change=True,
    )
    sandbox: str | None = key(
        None,
        "dotted name of a function `(cfg, session)` that returns the sandbox of domains that run code: "
        "`pipelinerl.domains.sandbox.remote.daytona`, `.e2b`, `.modal`, or yours "
        "([verification.md](verification.md#another-sandbox)). Null = SandboxFusion or the embedded one",
        may_change=True,
    )
    sandbox_endpoint: str | None = key(
        None,
        "URL of a SandboxFusion service for domains that run code. Null = `SANDBOX_ENDPOINT` from the environment, "
        "else the embedded sandbox",
        may_change=True,
    )
    sandbox_timeout_s: PositiveFloat = key(
        10, "longest time of one run of a program in SandboxFusion or on a provider's machine", may_change=True
    )
    environments: list[dict[str, Any]] = key(
        [],
        "servers of your own, which the run starts and supervises. An entry has `_target_` (a class with a method "
        "`launch(port)`), `key`, `replicas`, and the arguments of the class. A mapping from keys to entries is the "
        "same. [domains.md](domains.md) has an example",
    )
    environment_key: str | None = key(
        None, "which of `environments` the domain asks. Null = the only one, or the domain's own choice"
    )
    environment: Any = key(
        None, "free for the domain. With `_target_`, and without `environments`, it is the only one of them"
    )
    extra_keys: list[str] = key(
        [],
        "keys of the domain's own anywhere in the configuration, e.g. `[sandbox_timeout, actor.agent_max_loops]`. The "
        "domain finds them in `cfg`. Every other unknown key is refused",
    )
    domain: Any = key(None, "free for the domain")
    dataset_loader: str = key(
        "pipelinerl.domains.math.load_problems",
        "the function `load_problems(dataset_names, **params)`, as a dotted name. It returns a list of dicts",
    )
    dataset_loader_params: dict[str, Any] = key({}, "further arguments of the loader")
    train_dataset_names: list[str] = key(["train"], "what the loader gets for training")
    test_dataset_names: list[str] = key(
        ["test"], "what the loader gets for evaluation. Empty = no evaluation", may_change=True
    )
    domains: list[DomainSection] | None = key(
        None, "several domains in one run, mixed by weight. Null = the one domain above"
    )
    rewards: dict[str, Any] = key(
        {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "unparsable": 0.0, "unfinished": None},
        "rewards by outcome, for domains that use them. Files in `conf/rewards` are chosen by e.g. "
        "`rewards=success_and_format`",
    )
    reward_function: str | list[str] | dict[str, float] | None = key(
        None,
        "dotted name of a function of yours in verl's or TRL's form, for `--config-name=reward_function`. A list: the "
        "sum of several; a mapping: with their weights ([You have a reward function](guides/reward-function.md))",
    )
    reward_function_kind: Literal["auto", "verl", "trl"] = key(
        "auto", "the form of `reward_function`. Auto = the names of its parameters say it"
    )
    reward_function_timeout_s: PositiveFloat = key(
        120,
        "longest time of an async `reward_function`, in which it is called again after errors of networks and busy "
        "services. `verifier.timeout_s` limits the others",
        may_change=True,
    )
    reward_function_max_calls: PositiveInt | None = key(
        None,
        "calls of an async `reward_function` by one rollout worker, repeated ones too, after which the run ends. Null "
        "= no limit",
        may_change=True,
    )
    train_subset: SubsetSection | None = key(
        None,
        "train on the problems from `begin` to before `end` of each domain, as the loader returns them. Null = all",
    )
    llm: LLMSection
    test_llm: EvaluationLLMSection
    actor: ActorSection
    eval: EvalSection
    preprocess: PreprocessSection
    vllm_config: VLLMSection
    weights: WeightsSection
    world: WorldSection
    streams: StreamsSection
    finetune: FinetuneSection
    launcher: LauncherSection
    debug: DebugSection
    verifier: VerifierSection
    archive: ArchiveSection
    tracing: TracingSection
    tracker: TrackerName | list[TrackerName] = key(
        "wandb",
        "where the curves go besides `metrics/`: one of them, or a list. `[]` = nowhere. wandb needs `wandb.mode`; the "
        "others need `pip install 'pipelinerl[trackers]'` and are named as in wandb",
        may_change=True,
    )
    wandb: WandbSection

    @property
    def proximal_steps(self) -> int | None:
        """Optimizer steps that share one proximal policy; None: ratios are taken to the sampler."""
        rl = self.finetune.rl
        known = POLICY_LOSSES.get(rl.policy_loss)
        always = known is not None and known.proximal == "always"
        return self.steps_per_phase if rl.proximal_every is None and always else rl.proximal_every

    @property
    def token_lag_bound(self) -> int | None:
        """Largest lag of a trained token, in optimizer steps. None: single tokens have no bound (docs/pacing.md)."""
        in_the_mean = self.preprocess.lag_drop == "never" and self.schedule == "pipeline" and self.max_lag_steps != 0
        return None if in_the_mean else self.max_lag_steps

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that the run uses."""
        names = (self.tracker,) if isinstance(self.tracker, str) else tuple(dict.fromkeys(self.tracker))
        return tuple(name for name in names if name != "wandb" or self.wandb.mode != "disabled")

    def is_evaluated(self, version: int) -> bool:
        """Whether the held-out loss of a version is computed (`sft.test_datasets`)."""
        if version == 0:
            return self.eval.at_start
        every = self.eval_every_n_versions
        at_end = version == self.finetune.max_train_steps and self.eval.at_end
        return at_end or bool(every and version % every == 0)

    @property
    def batch_size(self) -> int:
        """Rollouts, or texts (`finetune.batch_unit`), per optimizer step over all trainer ranks."""
        return self.finetune.train_batch_size * self.finetune.gradient_accumulation_passes
