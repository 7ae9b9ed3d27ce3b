"""What a resumed run may change is what the declarations say."""

import pytest

from pipelinerl.config.resume import differing_keys, may_change


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("seed", False),
        ("finetune.learning_rate", False),
        ("llm.parameters.temperature", False),
        ("world.replicas", False),
        ("streams.backend", False),
        ("actor.rollout_policy", False),
        ("tiny_model.seed", False),
        ("tiny_model", False),
        ("nobody.knows", False),
        ("rewards.correct", False),
        ("world.cpu_slots", True),
        ("finetune.max_train_steps", True),
        ("actor.rollout_timeout_s", True),
        ("launcher.max_restarts", True),
        ("test_llm.parameters.temperature", True),
        ("vllm_config.vllm_kwargs.max-num-seqs", True),
        ("output_dir", True),
    ],
)
def test_may_change_separates_how_from_what(key: str, allowed: bool) -> None:
    assert may_change(key) is allowed


def test_differing_keys_names_only_what_makes_another_experiment() -> None:
    old = {"seed": 1, "world": {"cpu_slots": 2, "replicas": 1}, "environment": {"turns": 3}, "gone": 1}
    new = {"seed": 2, "world": {"cpu_slots": 4, "replicas": 1}, "environment": {}}
    assert differing_keys(old, new) == [
        ("environment", "absent", {}),
        ("environment.turns", 3, "absent"),
        ("gone", 1, "absent"),
        ("seed", 1, 2),
    ]


def test_where_a_secret_comes_from_makes_no_other_experiment_and_is_not_shown() -> None:
    def given(key: object, turns: int) -> dict[str, object]:
        return {"dataset_loader_params": {"api_key": key, "max_turns": turns}}

    assert differing_keys(given("sk-literal", 1), given({"env": "KEY"}, 1)) == []
    assert differing_keys(given({"env": "ONE"}, 1), given({"env": "OTHER"}, 1)) == []
    assert differing_keys(given("sk-literal", 1), given(None, 2)) == [
        ("dataset_loader_params.api_key", "***", None),
        ("dataset_loader_params.max_turns", 1, 2),
    ]
