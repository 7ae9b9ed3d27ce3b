"""A tiny Phi-3 with longrope on real vLLM: its log-probs are the trainer's on both sides of the limit.

`numerics/test_longrope.py` compares the trainer with vLLM's own module, without a server.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.longrope import fix_longrope
from tests.served import largest_error, sample

TOLERANCE = 1e-4
ORIGINAL, HEAD = 256, 32
CONFIG = {
    **{"vocab_size": 256, "hidden_size": 4 * HEAD, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "eos_token_id": 0},
    **{"max_position_embeddings": 2048, "original_max_position_embeddings": ORIGINAL},
    **{"bos_token_id": None, "pad_token_id": None, "architectures": ["Phi3ForCausalLM"]},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0},
        **{"short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)]},
        **{"long_factor": [1.0 + 0.4 * i**2 for i in range(HEAD // 2)]},
    },
}

pytestmark = pytest.mark.slow


class Served(NamedTuple):
    server: Any
    max_model_len: int
    lm: Any
    """As the trainer computes it."""
    unfixed: Any
    """As transformers computes it."""


@pytest.fixture(scope="module", params=[1024, ORIGINAL])
def served(request: Any, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("longrope")
    torch.manual_seed(0)
    config = AutoConfig.for_model("phi3", **CONFIG)
    unfixed = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    unfixed.save_pretrained(folder / "model")
    serving.save_byte_tokenizer(folder / "model")
    fix_longrope(config, request.param)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    lm.load_state_dict(unfixed.state_dict())
    given = (f"vllm_config.vllm_kwargs.max_model_len={request.param}",)
    with serving.running(folder / "run", folder / "model", overrides=given) as server:
        yield Served(server, request.param, lm, unfixed)


def test_log_probabilities_are_the_trainer_s_below_across_and_beyond_the_limit(served: Served) -> None:
    """transformers alone takes the short factors below the limit, the server the long ones."""
    others = []
    for length in (10, ORIGINAL - 70, ORIGINAL - 20, ORIGINAL + 300):
        if length + 64 > served.max_model_len:
            continue
        prompt = torch.randint(1, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        (completion,) = sample(served.server.job.url, prompt, 64)
        assert largest_error(served.lm, prompt, completion) <= TOLERANCE
        if length + 64 <= ORIGINAL:
            others.append(largest_error(served.unfixed, prompt, completion))
    is_long = served.max_model_len > ORIGINAL
    assert (max(others) > 0.01) == is_long
