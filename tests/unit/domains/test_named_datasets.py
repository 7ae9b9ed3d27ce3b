"""PipelineRL's data sets: hand-written rows in the columns that each was published with, and its filters."""

import json
from typing import Any

import pytest

from pipelinerl.domains.coding import load_problems as load_coding
from pipelinerl.domains.coding.rollouts import NAMED as NAMED_CODING
from pipelinerl.domains.math import load_problems
from pipelinerl.domains.math.dataset import NAMED
from pipelinerl.errors import DomainError
from tests.says import says

WORKED = "There are 2 and 3.\n2 + 3 = <<2+3=5>>5\n#### 5"
EURUS = [
    {"role": "system", "content": "Think."},
    {"role": "user", "content": "2 + 3?\n\nPresent the answer in LaTex format: \\boxed{Your answer}"},
]
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "HuggingFaceH4/MATH-500": [
        {"problem": "2 + 3?", "solution": "It is \\boxed{5}.", "answer": "5", "subject": "Algebra", "level": 1}
    ],
    "openai/gsm8k": [{"question": "2 + 3?", "answer": WORKED}],
    "agentica-org/DeepScaleR-Preview-Dataset": [{"problem": "2 + 3?", "answer": "5", "solution": "…"}],
    "AI-MO/aimo-validation-aime": [
        {"id": 0, "problem": "2 + 2?", "answer": "4", "url": "https://example.org/2023_AIME_I_Problems"},
        {"id": 1, "problem": "2 + 3?", "answer": "5", "url": "https://example.org/2024_AIME_I_Problems"},
    ],
    "MathArena/aime_2025": [{"problem_idx": 1, "problem": "2 + 3?", "answer": 5}],
    "open-r1/OpenR1-Math-220k": [
        {"problem": "2 + 2?", "answer": "4", "correctness_math_verify": [False, False]},
        {"problem": "2 + 3?", "answer": "5", "correctness_math_verify": [False, True]},
    ],
    "PRIME-RL/Eurus-2-RL-Data": [
        {"ability": "code", "prompt": [], "reward_model": {}},
        {"ability": "math", "prompt": EURUS, "reward_model": {"ground_truth": 5}},
    ],
    "json": [{"0": {"from": "human", "value": "2 + 3?"}, "1": {"ground_truth": {"value": "5"}}}],
}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The Hub with the rows above; what was asked of it."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool, **options: str) -> list[Any]:
        asked.append((path, config, split, options.get("data_files")))
        return PUBLISHED[path]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "path", "config", "split"),
    [
        ("math_500", "HuggingFaceH4/MATH-500", None, "test"),
        ("test", "HuggingFaceH4/MATH-500", None, "test"),
        ("gsm8k_train", "openai/gsm8k", "main", "train"),
        ("gsm8k_test", "openai/gsm8k", "main", "test"),
        ("deepscaler", "agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
        ("aime_2024_original", "AI-MO/aimo-validation-aime", None, "train"),
        ("aime_2025_original", "MathArena/aime_2025", None, "train"),
        ("open_r1_math_220k", "open-r1/OpenR1-Math-220k", None, "default"),
        ("eurus_validation", "PRIME-RL/Eurus-2-RL-Data", None, "validation"),
        ("open_reasoner_zero_57k", "json", None, "train"),
    ],
)
def test_every_layout_gives_question_and_answer(
    name: str, path: str, config: str | None, split: str, hub: list[tuple[Any, ...]]
) -> None:
    assert load_problems([name]) == [{"dataset": name, "task": "2 + 3?", "answer": "5", "id": 0}]
    assert [asked[:3] for asked in hub] == [(path, config, split)]


def test_competitions_are_evaluated_sixteen_times() -> None:
    problems = load_problems(["aime_2024"])
    assert [(p["task"], p["answer"]) for p in problems] == [("2 + 3?", "5")] * 16
    assert [p["id"] for p in problems] == list(range(16))


def test_file_on_the_web_is_read_as_json(hub: list[tuple[Any, ...]]) -> None:
    load_problems(["open_reasoner_zero_57k"])
    assert hub[0][3].endswith("orz_math_57k_collected.json")


def test_row_that_lost_its_columns_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [{"problem": "2 + 3?", "answer": "5"}])
    with pytest.raises(DomainError, match=says("'aime_2024'", "row 0", "KeyError: 'url'")):
        load_problems(["aime_2024"])


def test_every_name_of_pipelinerls_loader_is_known() -> None:
    for years, name in ((range(2022, 2026), "aime"), (range(2022, 2024), "amc")):
        assert all({f"{name}_{year}", f"{name}_{year}_original"} <= NAMED.keys() for year in years)
    assert {"math_train", "math_test", "limo", "gpqa_main", "gpqa_diamond", "omni_math_500"} <= NAMED.keys()


def test_coding_sets_have_their_tests_in_the_published_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {"inputs": ["1\n"], "outputs": ["1\n"]}
    rows = {
        "BAAI/TACO": [{"question": "Square.", "input_output": json.dumps(tests), "difficulty": "EASY"}],
        "PrimeIntellect/INTELLECT-3-RL": [
            {"question": "Cube.", "info": json.dumps({"source": "other", "tests": json.dumps(tests)})},
            {"question": "Square.", "info": json.dumps({"source": "lcbv5", "tests": json.dumps(tests)})},
        ],
    }
    monkeypatch.setattr("datasets.load_dataset", lambda path, *_, **__: rows[path])
    for name in ("taco", "intellect3_lcbv5"):
        assert [(p["task"], p["tests"]) for p in load_coding([name])] == [("Square.", tests)]
    assert len(load_coding(["intellect3_code"])) == 2
    assert "livecodebench_v5" not in NAMED_CODING, "PipelineRL's is another data set"
