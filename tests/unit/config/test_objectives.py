"""How the arguments of a loss are read from its source."""

import sys
from pathlib import Path

import pytest

from pipelinerl.config.objectives import Signature, loss_signature
from pipelinerl.errors import ConfigError
from tests.says import says


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of losses that no code may run."""
    folder = tmp_path / "sealed_losses"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .inner.losses import mine as exported\nraise OSError\n")
    (folder / "inner" / "__init__.py").write_text("from ..plain import loss as up\nraise OSError\n")
    (folder / "inner" / "losses.py").write_text(
        "from sealed_losses.plain import loss as mine\nfrom ..plain import loss\nfrom .circle import around\n"
    )
    (folder / "inner" / "circle.py").write_text("from sealed_losses.inner.losses import around\n")
    (folder / "plain.py").write_text(
        "import functools\n"
        "def loss(logprobs_K, tokens, entropy, *, values, needed, at=1): ...\n"
        "other = loss\n"
        "def changed(logprobs_K, tokens, lag): ...\n"
        "changed = functools.partial(loss, at=2)\n"
        "class Losses:\n    def __call__(self, logprobs_K, tokens): ...\n"
        "instance = Losses()\n"
        "raise OSError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loss_signature.cache_clear()
    return folder


FOUND = Signature(figures=frozenset({"entropy", "values"}), required=("needed",), optional=("at",))


@pytest.mark.parametrize(
    "name",
    ["plain.loss", "plain.other", "inner.losses.mine", "inner.losses.loss", "inner.up", "exported"],
)
def test_signature_is_that_of_the_def_to_which_imports_and_names_lead(package: Path, name: str) -> None:
    assert loss_signature(f"sealed_losses.{name}") == FOUND
    assert not [module for module in sys.modules if module.startswith("sealed_losses")]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("plain.changed", "plain.py"),
        ("plain.instance", "plain.py"),
        ("plain.missing", "plain.py"),
        ("inner.losses.around", "inner/losses.py"),
    ],
)
def test_name_without_a_def_says_where_it_was_looked_for(package: Path, name: str, place: str) -> None:
    assert loss_signature(f"sealed_losses.{name}") == Signature(no_def_in=package / place)


def test_function_with_the_name_of_its_module_is_found_in_the_package(package: Path) -> None:
    (package.parent / "named_alike").mkdir()
    (package.parent / "named_alike" / "__init__.py").write_text("from .loss import loss\n")
    (package.parent / "named_alike" / "loss.py").write_text("from sealed_losses.plain import loss\n")
    assert loss_signature("named_alike.loss") == loss_signature("named_alike.loss.loss") == FOUND


def test_loss_below_folders_without_init_is_found(package: Path) -> None:
    (package.parent / "bare" / "inner").mkdir(parents=True)
    (package.parent / "bare" / "inner" / "losses.py").write_text("from .other import mine\n")
    (package.parent / "bare" / "inner" / "other.py").write_text("from sealed_losses.plain import loss as mine\n")
    assert loss_signature("bare.inner.losses.mine") == FOUND


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe9\n"])
def test_source_is_read_in_its_own_encoding(package: Path, start: bytes) -> None:
    (package / "encoded.py").write_bytes(start + b"def loss(logprobs_K, tokens, *, lag): ...\n")
    assert loss_signature("sealed_losses.encoded.loss") == Signature(figures=frozenset({"lag"}))


@pytest.mark.parametrize("source", [b"x = 1\ndef loss(", b"\xe9", b"x = 1\0"])
def test_source_that_is_no_python_is_refused_with_its_file(package: Path, source: bytes) -> None:
    (package / "broken.py").write_bytes(source)
    with pytest.raises(ConfigError, match=says("finetune.rl.policy_loss", str(package / "broken.py"))):
        loss_signature("sealed_losses.broken.loss")


@pytest.mark.parametrize("name", ["nowhere.loss", "math.sin", "loss"])
def test_module_that_is_not_found_has_an_empty_signature(name: str) -> None:
    assert loss_signature(name) == Signature()


@pytest.mark.parametrize(
    ("name", "keys"),
    [("reinforce", ("ratio_clamp",)), ("decoupled_ppo", ("epsilon_low", "epsilon_high", "dual_clip"))],
)
def test_builtin_losses_have_their_keys(name: str, keys: tuple[str, ...]) -> None:
    assert loss_signature(name) == Signature(required=keys)
