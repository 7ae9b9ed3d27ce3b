"""A server that computes long documents in another way than the trainer: the first batches show it, and `why` names it.

Nothing at the start compares the two beyond a threshold of the model.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.longrope import fix_longrope
from pipelinerl.inspect.why.__main__ import main
from pipelinerl.streams import set_streams_backend
from tests.run_folder import Story, make_run

STEPS, ORIGINAL, LONGEST, HEAD = 4, 64, 96, 32
CONFIG = {
    **{"vocab_size": 256, "hidden_size": 4 * HEAD, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "eos_token_id": 0},
    **{"max_position_embeddings": 512, "original_max_position_embeddings": ORIGINAL},
    **{"bos_token_id": None, "pad_token_id": None},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0},
        **{"short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)]},
        **{"long_factor": [1.0 + 0.4 * i**2 for i in range(HEAD // 2)]},
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny operations: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(max_model_len: int) -> torch.nn.Module:
    """A tiny Phi-3 as servers with this `max_model_len` compute it."""
    config = AutoConfig.for_model("phi3", **copy.deepcopy(CONFIG))
    fix_longrope(config, max_model_len)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def largest_differences(server: torch.nn.Module, trainer: torch.nn.Module) -> list[float]:
    """max |log ρ| of each of `STEPS` batches of four documents that the server samples beyond the limit."""
    found = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        ids = torch.randint(1, 256, (4, ORIGINAL))
        while ids.shape[1] < LONGEST:
            chances = server(ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
        ours, theirs = (
            lm(ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, ORIGINAL:]
            for lm in (trainer, server)
        )
        found.append((ours - theirs).abs().max().item())
    return found


@pytest.mark.parametrize(("served_with", "code"), [(LONGEST, 1), (ORIGINAL, 0)])
def test_other_factors_of_rope_are_named_first(
    served_with: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer takes the short factors. The server takes the long ones, or the same."""
    set_streams_backend("files")
    differences = largest_differences(model(served_with), model(ORIGINAL))
    run = make_run(tmp_path / "run", Story(steps=STEPS, finetune={"logratio_abs_max_lag0": differences}))
    assert main([str(run)]) == code
    said = capsys.readouterr().out
    assert said.startswith("1. stale server since step 1: " if code else "nothing looks wrong")
