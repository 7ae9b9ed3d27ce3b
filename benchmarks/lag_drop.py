"""What `preprocess.lag_drop` does to the gradient: `python -m benchmarks.lag_drop --json benchmarks/lag_drop.json`.

Rollouts of heavy-tailed lengths are sampled while the weights change; tokens older than the bound are dropped with
their rollout, or alone. Long rollouts are right more often. Reported: the share of the sampled tokens that is trained,
by length of the rollout, how many rollouts train a token at each tenth of their length, and the mean reward of what is
trained. No model: the selection alone is measured.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from pipelinerl.plan.lengths import Lengths

MEAN, LONGEST, BOUND, STEPS_PER_TOKEN, QUEUED, ATTEMPTS, GROUPS = 600, 8192, 8, 1 / 300, 2, 8, 4000
PARTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = Lengths.lognormal(MEAN, LONGEST).sample(rng, GROUPS * ATTEMPTS).reshape(GROUPS, ATTEMPTS)
    rewards = (rng.random(lengths.shape) < np.clip(lengths / 1500, 0.1, 0.9)).astype(float)
    oldest_lag = np.ceil(lengths.max(1) * STEPS_PER_TOKEN)[:, None] + QUEUED
    first_kept = np.clip(np.ceil((oldest_lag - BOUND) / STEPS_PER_TOKEN), 0, lengths)
    kept = {"rollout": (oldest_lag <= BOUND) * lengths, "token": lengths - first_kept}
    decile = np.argsort(np.argsort(lengths.ravel(), kind="stable")) * PARTS // lengths.size
    result: dict[str, object] = {"bound": BOUND, "rollouts": int(lengths.size)}
    for mode, tokens in kept.items():
        members = [decile == d for d in range(PARTS)]
        by_length = [float(tokens.ravel()[m].sum() / lengths.ravel()[m].sum()) for m in members]
        places = (np.arange(PARTS) + 0.5) / PARTS
        starts = np.where(tokens > 0, lengths - tokens, lengths)
        by_place = [float((place * lengths >= starts).mean()) for place in places]
        result[mode] = {
            "tokens_kept": float(tokens.sum() / lengths.sum()),
            "kept_by_length_decile": [round(x, 3) for x in by_length],
            "rollouts_with_a_token_at_this_tenth": [round(x, 3) for x in by_place],
            "reward_sampled": float(rewards.mean()),
            "reward_trained": float((rewards * (tokens > 0)).sum() / (tokens > 0).sum()),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
