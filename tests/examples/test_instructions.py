import json

import aiohttp
import httpx
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from examples.instructions.domain import generate_rollout, load_problems
from examples.instructions.judge import judge
from pipelinerl.config.load import compose, parse
from pipelinerl.domains.verifier_client import IN_PROCESS, client_of
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.launcher.doctor.play import verifier
from pipelinerl.testing import run_rollout
from tests.says import says

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"check": "length", "unit": "words", "at_least": 2, "at_most": 3}, "one, two three.", "one"),
        ({"check": "length", "unit": "sentences", "at_most": 2}, "One. Two!", "One. Two! Three?"),
        ({"check": "length", "unit": "paragraphs", "at_least": 2}, "a\n\nb", "a\nb"),
        ({"check": "length", "unit": "lines", "at_least": 2, "at_most": 2}, "a\n\nb", "a"),
        ({"check": "length", "unit": "characters", "at_most": 3}, " abc ", "abcd"),
        ({"check": "keyword", "word": "sea"}, "The Sea.", "seaside"),
        ({"check": "keyword", "word": "a b", "at_least": 2}, "a b, A B", "a b"),
        ({"check": "keyword", "word": "c++", "at_most": 1}, "c++ is", "c++ c++"),
        ({"check": "forbidden", "word": "sea"}, "seaside", "the sea"),
        ({"check": "starts_with", "prefix": "Dear"}, " Dear you", "My dear"),
        ({"check": "ends_with", "suffix": "end."}, "the end.\n", "the end"),
        ({"check": "case", "want": "lower"}, "abc 1", "Abc"),
        ({"check": "case", "want": "upper"}, "ABC 1", "ABc"),
        ({"check": "bullets", "at_least": 2, "at_most": 2}, "- a\n * b", "- a\n-b"),
        ({"check": "quoted"}, ' "x" ', '"x'),
        ({"check": "no_commas"}, "a b", "a, b"),
        ({"check": "json"}, '{"a": [1, null]}', "{'a': 1}"),
        ({"check": "json", "type": "array"}, "[1]", "{}"),
        ({"check": "json", "type": "object", "keys": ["a"]}, '```json\n{"a": 1}\n```', '{"b": 1}'),
        ({"check": "json"}, "1", "NaN"),
    ],
)
def test_check_holds_for_the_good_and_not_for_the_bad_answer(constraint, good, bad):
    assert judge(good, [constraint], {}).status == "correct"
    assert judge(bad, [constraint], {}).status == "wrong"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "9" * 100_000 + "0" * 10, "\\u0000" * 9, "1e999999"])
def test_hostile_json_is_judged_not_raised(text):
    assert judge(text, [{"check": "json"}], {}).status in ("wrong", "correct")


def test_score_is_the_share_of_constraints_that_hold():
    gold = [{"check": "no_commas"}, {"check": "quoted"}, {"check": "case", "want": "lower"}, {"check": "json"}]
    verdict = judge("plain text", gold, {})
    assert (verdict.status, verdict.score) == ("wrong", 0.5)
    assert "quoted" in verdict.detail


@pytest.mark.parametrize(
    "gold", [[], [{"check": "rhymes"}], [{"check": "length", "unit": "yards"}], [{"check": "case"}]]
)
def test_broken_constraint_is_a_verifier_error_not_a_reward(gold):
    assert judge("text", gold, {}).status == "error"


def test_generated_problems_state_every_constraint_and_can_be_checked():
    for problem in load_problems(["train", "test"], num_train_problems=50, num_test_problems=20):
        assert problem["constraints"]
        assert judge("some text", problem["constraints"], {}).status in ("correct", "wrong")
        for constraint in problem["constraints"]:
            for value in (v for k, v in constraint.items() if k in ("word", "suffix", "at_least")):
                assert str(value) in problem["task"]


async def test_rollout_gives_partial_credit():
    problem = {"task": "…", "constraints": [{"check": "no_commas"}, {"check": "quoted"}]}
    result = await run_rollout(generate_rollout, problem, ["plain"], {"rewards": REWARDS})
    assert result.metrics.reward == 0.5
    assert result.metrics.success is False


async def test_broken_problem_ends_the_rollout_with_a_verifier_error():
    with pytest.raises(VerifierError, match="rhymes"):
        await run_rollout(
            generate_rollout, {"task": "…", "constraints": [{"check": "rhymes"}]}, ["x"], {"rewards": REWARDS}
        )


def test_constraints_of_a_parquet_file_keep_only_their_own_arguments(tmp_path):
    constraints = [{"check": "json"}, {"check": "keyword", "word": "sea"}]
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "?", "constraints": constraints}]), path)
    assert load_problems([str(path)]) == [{"dataset": str(path), "task": "?", "constraints": constraints}]


@pytest.mark.parametrize("constraints", [[], 3, {"check": "json"}, "no JSON", [{"check": "poetry"}], ["json"]])
def test_constraints_that_cannot_be_checked_are_named(tmp_path, constraints):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"task": "?", "constraints": constraints}))
    with pytest.raises(DomainError, match=says("x.jsonl", "row 0", constraints, "`check`")):
        load_problems([str(path)])


async def test_verifier_asks_the_judge_of_its_dotted_name_once_the_configuration_lists_it() -> None:
    own = "examples.instructions.judge.judge"
    job = {"kind": "verifier", "url": IN_PROCESS}
    async with aiohttp.ClientSession() as session:
        listed = client_of(OmegaConf.create({"jobs": [job], "verifier": {"judges": [own]}}))
        assert (await listed.check(session, own, "one two", [{"check": "no_commas"}])).status == "correct"
        assert (await listed.check(session, "math", "\\boxed{1}", "1")).status == "correct"
        unlisted = client_of(OmegaConf.create({"jobs": [job], "verifier": {"judges": []}}))
        with pytest.raises(VerifierError, match=r"name your judge in `verifier\.judges`"):
            await unlisted.check(session, own, "one two", [{"check": "no_commas"}])


def test_verifier_of_the_doctor_has_the_judges_of_the_configuration() -> None:
    own = "examples.instructions.judge.judge"
    listed = ["world.verifier_replicas=1", "verifier.workers=1", f"verifier.judges=[{own}]"]
    with verifier(parse(compose("instructions", listed))) as (job, _):
        check = {"kind": own, "prediction": "one two", "gold": [{"check": "no_commas"}]}
        assert httpx.post(job["url"], json=check, timeout=60).json()["status"] == "correct"
