"""The trained policy: a causal LM whose head returns the loss instead of logits, with an optional value head.

Parameter names under ``lm.`` are those of transformers. ``checkpoint_names`` says how weight updates and exported
models name them.
"""

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from pipelinerl.config.sections import Config, LoraSection
from pipelinerl.config.servers import max_model_len
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.attention import announce, document_lengths
from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.images import ImageReader, attention_of, embed
from pipelinerl.finetune.longrope import fix_longrope
from pipelinerl.finetune.recomputation import keeping_products
from pipelinerl.finetune.rl.head import LogitMap, OutputHead, head_logprobs, head_loss
from pipelinerl.finetune.rl.objective import LossSettings, PolicyObjective
from pipelinerl.finetune.rl.tokens import SequenceGroup, TokenInputs
from pipelinerl.finetune.router_replay import RouterReplay

log = logging.getLogger(__name__)

LM_PREFIX = "lm."
"""Prefix of the language model's parameters in the policy."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Tokens(NamedTuple):
    """Input of a forward pass without a loss."""

    input_ids: Tensor
    """int64 [B, L]"""
    position_ids: Tensor
    """int64 [B, L]"""
    targets_N: Tensor | None = None
    """int64 [B·L]: tokens to score at temperature 1. None: return hidden states instead."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents of the only row. None: as the positions restart, or each row is one."""
    keys: tuple[int, ...] | None = None
    """As in ``Batch``."""
    key_rows_E: Tensor | None = None


class PolicyOutput(NamedTuple):
    loss: Tensor
    """Scalar: weighted policy, KL, entropy and value terms of this micro-batch."""
    logprobs_K: Tensor
    entropy_K: Tensor
    value_loss: Tensor
    """Scalar: the value term alone, without gradient. 0 without a value head."""
    inputs: TokenInputs
    """The constants that the loss used. With a value head the advantages are reward − V."""


class Policy(nn.Module):
    """Causal LM with chunked head and optional value head. ``forward(batch, settings)`` computes the loss."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk: int = 512,
        fp32_head: bool = True,
        value_loss_coef: float | None = None,
        lora_scaling: float = 0.0,
        sequence: SequenceGroup | None = None,
        logit_map: LogitMap | None = None,
        routing: RouterReplay | None = None,
        images: ImageReader | None = None,
    ):
        """Replace the head of ``lm``, and add a value head if needed.

        Args:
            temperature: of the trained log-probs.
            chunk: tokens whose logits the head computes at a time.
            fp32_head: whether the products of a bfloat16 head keep float32 precision.
            value_loss_coef: factor of the value loss. None: no value head.
            lora_scaling: factor of the adapters, α/r.
            sequence: ranks that share each micro-batch. The model must then attend with ``attention.PACKED``.
            logit_map: how the model changes its head's products, as ``architecture`` measures it.
            routing: replays the servers' choice of experts. None: the model chooses.
            images: makes the vision tower's inputs. None: every batch is text.
        """
        super().__init__()
        head = lm.get_output_embeddings()
        if not isinstance(head, OutputHead):
            lm.set_output_embeddings(OutputHead.wrap(head, logit_map))
        self.lm: PreTrainedModel = lm
        self.names = CheckpointNames(lm)
        self.temperature, self.chunk, self.fp32_head = temperature, chunk, fp32_head
        self.value_loss_coef, self.lora_scaling, self.sequence = value_loss_coef, lora_scaling, sequence
        self.routing, self.images = routing, images
        self.loss_scale = 1.0  # by which an engine multiplies the loss before its backward pass
        self.value_head = None
        if value_loss_coef is not None:
            self.value_head = nn.Linear(
                head.in_features, 1, dtype=torch.promote_types(head.weight.dtype, torch.float32)
            )
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def hidden_states(self, batch: Batch | Tokens) -> Tensor:
        """[B, L, H] final states. Passes no mask and no cache: with either, packed documents would see each other."""
        if self.images is not None:
            images = batch.images if isinstance(batch, Batch) else None
            states = embed(self.lm, batch.input_ids, images, self.images.blank)
            return self.lm.get_decoder()(inputs_embeds=states, position_ids=batch.position_ids, use_cache=False)[0]
        backbone = self.lm.base_model if self.lm.base_model is not self.lm else self.lm.model
        return backbone(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)[0]

    def forward(self, batch: Batch | Tokens, settings: LossSettings | None = None) -> PolicyOutput | Tensor:
        """Compute the loss of a micro-batch, or log-probs or hidden states alone.

        A ``Batch`` with settings gives a ``PolicyOutput``, without settings the log-probs [K] of its trained tokens at
        the training temperature. ``Tokens`` give the log-probs [B·L] of their targets at temperature 1, or without
        targets hidden states [B, L, H]. Engines gather sharded parameters only inside this method.
        """
        self._announce_layout(batch)
        hidden_BLH = self.hidden_states(batch)
        if isinstance(batch, Tokens):
            return (
                hidden_BLH if batch.targets_N is None else self._score(hidden_BLH.flatten(0, 1), batch.targets_N, 1.0)
            )
        hidden_KH = hidden_BLH.flatten(0, 1)[batch.predictors_K]
        if settings is None:
            return self._score(hidden_KH, batch.targets_K, self.temperature)
        inputs, value_term, values_K = batch.inputs, None, None
        if self.value_head is not None:
            values_K = self._values(hidden_KH)
            inputs, value_term = self._with_values(values_K, inputs)
            if settings.names("values"):
                inputs = replace(inputs, bootstrap_S=self._bootstrap(hidden_BLH, batch))
            else:
                values_K = None
        loss, logprobs_K, entropy_K = head_loss(
            self.lm.get_output_embeddings(),
            hidden_KH,
            batch.targets_K,
            PolicyObjective(inputs, settings),
            temperature=self.temperature,
            chunk=self.chunk,
            fp32=self.fp32_head,
            loss_scale=self.loss_scale,
            values_K=values_K,
            support_KJ=inputs.teacher_top_ids_KJ if settings.teacher_top_k else None,
        )
        if value_term is None:
            return PolicyOutput(loss, logprobs_K, entropy_K, loss.new_zeros(()), inputs)
        return PolicyOutput(loss + value_term, logprobs_K, entropy_K, value_term.detach(), inputs)

    def _announce_layout(self, batch: Batch | Tokens) -> None:
        """Give attention the lengths of the documents, which are known on the host, and routers the experts."""
        documents = batch.documents
        if isinstance(batch, Tokens) and documents is None:
            documents = document_lengths(batch.position_ids)
        if self.routing is not None:
            self.routing.announce(None if isinstance(batch, Tokens) else batch.routed_experts_NR)
        cut = documents is not None and sum(documents) > batch.input_ids.shape[1]
        announce(documents, batch.input_ids.device, self.sequence if cut else None, batch.keys, batch.key_rows_E)

    def _score(self, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        head = self.lm.get_output_embeddings()
        return head_logprobs(
            head, hidden_NH, targets_N, temperature=temperature, chunk=self.chunk, fp32=self.fp32_head
        )[0]

    def _values(self, hidden_NH: Tensor) -> Tensor:
        """[N] V of the states, differentiable."""
        assert self.value_head is not None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return self.value_head(hidden_NH.to(self.value_head.weight.dtype))[:, 0]

    def _with_values(self, values_K: Tensor, inputs: TokenInputs) -> tuple[TokenInputs, Tensor]:
        """The inputs with advantages r − sg(V(s_t)), and the value loss Σ weight · coef · ½(V − r)²."""
        assert self.value_loss_coef is not None
        rewards_K, constant_K = inputs.advantages_K, values_K.detach()
        loss = self.value_loss_coef * 0.5 * (inputs.weights_K * (values_K - rewards_K).square()).sum()
        return replace(inputs, advantages_K=rewards_K - constant_K, values_K=constant_K), loss

    def _bootstrap(self, hidden_BLH: Tensor, batch: Batch) -> Tensor | None:
        """[S] V of the state in which each cut answer ended, 0 for the others, without gradient."""
        if batch.ends_S is None or batch.cut_S is None:
            return None
        values_S = self._values(hidden_BLH.flatten(0, 1)[batch.ends_S]).detach()
        return torch.where(batch.cut_S, values_S, 0.0)


def decoder_layers(lm: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks of the language model, as opposed to its experts or the layers of a vision tower.

    Raises:
        ConfigError: the model has no list of layers.
    """
    within = (lm.get_decoder(), lm)  # what a model calls its decoder may be its head
    found = ([part for part in whole.modules() if isinstance(part, nn.ModuleList)] for whole in within)
    lists = next(filter(None, found), [])
    if not lists:
        raise ConfigError(f"model_path: {type(lm).__name__} has no list of layers to shard; use finetune.engine=ddp")
    wanted = lm.config.get_text_config().num_hidden_layers
    fitting = [x for x in lists if len(x) == wanted] or lists
    return max(fitting, key=lambda layers: (len(layers), sum(p.numel() for p in layers.parameters())))


def auto_class(config: Any) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class of transformers that builds the model of ``config``, with its vision tower if it has one."""
    kind = type(config)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_config(source: str | Path, cfg: Config) -> PreTrainedConfig:
    """The model's configuration, with longrope as the run's servers compute it."""
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=cfg.trust_remote_code)
    fix_longrope(config, max_model_len(cfg), has_reference=cfg.world.preprocessor_fraction > 0)
    return config


def load_lm(source: str | Path, cfg: Config, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the causal LM at ``source`` in ``dtype`` and set it up for training with implementation ``attention``.

    Raises:
        ConfigError: the files lack a parameter. transformers would fill it with random values, others on every rank.
    """
    config = load_config(source, cfg)
    lm, found = auto_class(config).from_pretrained(
        str(source),
        config=config,
        dtype=dtype,
        attn_implementation=attention_of(config, attention),
        trust_remote_code=cfg.trust_remote_code,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"model_path: the files of {source} lack {len(missing)} of the model's tensors, among them {missing[:3]}; "
            "get the model again, or save it with all its tensors"
        )
    return _prepared(lm, cfg)


def empty_lm(source: str | Path, cfg: Config, attention: str) -> nn.Module:
    """As ``load_lm``, but with parameters on the meta device. An engine allocates its share of them."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config = load_config(source, cfg)
    with no_init_weights(), init_empty_weights(include_buffers=False):
        lm = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_of(config, attention),
            trust_remote_code=cfg.trust_remote_code,
        )
    lm.tie_weights()
    with contextlib.suppress(OSError):  # the model folder has none
        lm.generation_config = GenerationConfig.from_pretrained(str(source))
    return _prepared(lm, cfg)


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Allocate the parameters on the meta device, without values, and move the rest to ``device``.

    Tied parameters stay tied. ``dtype`` None keeps the dtype of each parameter.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():  # noqa: SLF001 — sets a parameter without registering it again
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                memory = torch.empty_like(parameter, device=device, dtype=dtype or parameter.dtype)
                made[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
            part._parameters[key] = made[id(parameter)]  # noqa: SLF001 — sets a parameter without registering it again
    module.to(device)


def is_empty(module: nn.Module) -> bool:
    """Whether any parameter is on the meta device, without memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def _prepared(lm: PreTrainedModel, cfg: Config) -> PreTrainedModel:
    """Set ``lm`` up for training: dropout off, gradient checkpointing, adapters, no cache."""
    turn_dropout_off(lm)
    if recomputed := cfg.finetune.gradient_checkpointing:
        selecting = {"context_fn": keeping_products} if recomputed == "selective" else {}
        lm.gradient_checkpointing_enable({"use_reentrant": False} | selecting)
        if not isinstance(recomputed, bool | str):
            for layer in decoder_layers(lm)[recomputed:]:
                layer.gradient_checkpointing = False
    if cfg.finetune.lora.enabled:
        lm = add_adapters(lm, cfg.finetune.lora, cfg.seed)
    lm.config.use_cache = False
    lm.train()
    return lm


def narrow_frozen(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the layers' frozen matrices in ``dtype``, to which autocast and FSDP would round them for every product."""
    for part in decoder_layers(lm).modules():
        for parameter in part.parameters(recurse=False):
            is_factor = parameter.dim() == 3 or (isinstance(part, nn.Linear) and parameter.dim() == 2)
            if is_factor and not parameter.requires_grad and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)


def turn_dropout_off(lm: nn.Module) -> None:
    """Set all dropout to 0. Servers sample without it, and log-probs of the trained policy must be reproducible."""
    for module in lm.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def add_adapters(lm: PreTrainedModel, lora: LoraSection, seed: int) -> PreTrainedModel:
    """Freeze ``lm`` and insert LoRA adapters into its linear layers (arXiv:2106.09685). B starts at 0.

    They have memory also where ``lm`` is empty. ``seed``: of A's random values.

    Raises:
        ConfigError: peft is not installed, or the output head would get an adapter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "finetune.lora.enabled needs peft, which is not installed: pip install 'pipelinerl[lora]'"
        ) from error
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.target_modules, bias="none"
    )
    inject_adapter_in_model(config, lm)
    head = lm.get_output_embeddings()
    if any("lora_" in name for name, _ in head.named_parameters()):
        raise ConfigError(
            f"`finetune.lora.target_modules` is {lora.target_modules!r}: it covers the output head, whose loss is "
            "computed without logits and would leave the adapter out; name the other modules, or use all-linear"
        )
    names = {name for name, _ in lm.named_parameters()}
    if odd := [name for name in sorted(names) if "lora_" in name and not _adapts_linear_layer(name, names)]:
        raise ConfigError(
            f"`finetune.lora.target_modules` is {lora.target_modules!r}: it covers a module that is no linear layer "
            f"({odd[0]}), whose adapter cannot be merged for servers; name linear layers only"
        )
    _start_adapters(lm, seed)
    return lm


def _adapts_linear_layer(name: str, names: Collection[str]) -> bool:
    """Whether an adapter's parameter belongs to a linear layer, not to an embedding or to all experts of a layer."""
    module, _, kind = name.partition(".lora_")
    return kind.partition(".")[0] in ("A", "B") and f"{module}.base_layer.weight" in names


def _start_adapters(lm: nn.Module, seed: int) -> None:
    """Fill A with the uniform values of ``nn.Linear`` and B with 0, in the memory of the CPU if they have none."""
    generator = torch.Generator().manual_seed(seed)
    for module in lm.modules():
        for kind, adapters in ((kind, getattr(module, kind, None)) for kind in ("lora_A", "lora_B")):
            if not isinstance(adapters, nn.ModuleDict):
                continue
            for linear in adapters.values():
                bound = linear.in_features**-0.5 if kind == "lora_A" else 0.0
                values = torch.empty(linear.weight.shape).uniform_(-bound, bound, generator=generator)
                device = "cpu" if linear.weight.is_meta else linear.weight.device
                made = nn.Parameter(values.to(device, linear.weight.dtype), linear.weight.requires_grad)
                linear.register_parameter("weight", made)


def isolation_error(
    forward: Callable[[Tokens], Tensor], vocab_size: int, device: torch.device, length: int = 8
) -> float:
    """Relative change of a packed document's hidden states when the document before it changes. 0 if they are isolated.

    Args:
        forward: returns the hidden states of ``Tokens``.
        vocab_size: token ids stay below it.
        length: tokens of each of the two documents.
    """
    ids = torch.arange(2 * length, device=device).remainder(vocab_size)[None]
    changed = torch.cat([ids[:, :length].add(length).remainder(vocab_size), ids[:, length:]], 1)
    positions = torch.arange(length, device=device).repeat(2)[None]
    first, second = (forward(Tokens(x, positions))[:, length:].float() for x in (ids, changed))
    return ((first - second).abs().max() / first.abs().max()).item()
