"""Values from the environment: `{env: NAME}` in the configuration stands for the value of the variable NAME.

Files, records, trackers and documents hold the reference. A role replaces it in its own memory, where it uses the
value. A key whose name is that of a secret takes a reference only.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipelinerl.config.environment import HIDDEN, JUDGE_KEY_VARIABLE, REFERRED
from pipelinerl.errors import ConfigError

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SECTIONS = re.compile(
    r"|(domains\..+\.)?dataset_loader_params|environment|environments(\.[^.]+)?|domain|streams\.options"
    r"|vllm_config\.env"
)
"""Mappings whose values may be references. None is a reference itself: `dataset_loader_params: {env: maze}`."""
SECRETS = (
    *("authorization", "apikey", "password", "passwd", "passphrase", "secret", "secretkey", "accesskey", "privatekey"),
    *("accesstoken", "apitoken", "authtoken", "bearertoken", "hftoken"),
)
"""Ends of names, in small letters without `-` and `_`, whose values are secrets anywhere."""
SERVER_SECRETS = (*SECRETS, "token", "cookie")
"""The same in headers, variables and arguments of servers. Elsewhere `eos_token` and the like are no secrets."""
OPTION = re.compile(r"(-*)([\w-]+)(?:\s*[:=]\s*(\S.*))?", re.DOTALL)
"""`--api-key`, `--api-key=…`, `Authorization: …`."""
LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")
PARAMETER = re.compile(r"[?&]([\w-]+)=[^&\s]")
"""What an address may hold: `https://name:password@host/path?api_key=…`."""


def is_reference(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and list(value) == ["env"]
        and isinstance(value["env"], str)
        and NAME.fullmatch(value["env"]) is not None
    )


def references(container: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key → name of the variable, of every reference of a configuration. No log shows their values then."""
    found: dict[str, str] = {}

    def note(key: str, value: Any) -> None:
        if is_reference(value):
            found[key] = value["env"]

    _mapped(container, "", note)
    REFERRED.update(found.values())
    return found


def variables_of(container: Mapping[str, Any]) -> list[str]:
    """Names of the variables that roles on other machines need: of references, and the key of judges elsewhere."""
    judges = [JUDGE_KEY_VARIABLE for judge in container.get("judges") or () if judge.get("url")]
    return sorted({*references(container).values(), *judges})


def with_values(section: Any, env: Mapping[str, str], key: str = "") -> Any:
    """Returns a part of a configuration with values in the place of its references. They are never logged.

    Args:
        section: plain nested mappings and lists.
        key: its dotted key.

    Raises:
        ConfigError: a variable is not set, or empty.
    """

    def value_of(key: str, value: Any) -> Any:
        if not is_reference(value):
            return value
        REFERRED.add(name := value["env"])
        if not env.get(name):
            raise ConfigError(
                f"`{key}` is {{env: {name}}}, but the environment has no {name}: set it where the launcher and its "
                "roles start"
            )
        return env[name]

    return _mapped(section, key, value_of)


def without_secrets(container: Mapping[str, Any]) -> Any:
    """Returns the configuration with `***` in place of references, and of literal secrets of an older run."""
    literal = set(_literal_secrets(container, ""))
    return _mapped(container, "", lambda key, value: HIDDEN if is_reference(value) or key in literal else value)


def _mapped(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    """The same with every reference, and every value that is no mapping or list, changed by its key."""
    if isinstance(value, Mapping) and not (is_reference(value) and not SECTIONS.fullmatch(key)):
        return {name: _mapped(item, _under(key, name), change) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, _under(key, place), change) for place, item in enumerate(value)]
    return change(key, value)


def check_secrets(container: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for a literal secret, and for a reference where none is read. Shows no value."""
    own = tuple(container.get("extra_keys") or ())
    check_literals(container, own)
    for key, name in references(container).items():
        if not _takes_references(key, own):
            raise ConfigError(
                f"`{key}` is {{env: {name}}}: only values inside dataset_loader_params, environments, environment, "
                "domain, streams.options, vllm_config.env and extra_keys may be references"
            )


def check_literals(container: Mapping[str, Any], own: Sequence[str] = ()) -> None:
    """Raises ``ConfigError`` for a literal secret. ``own``: keys of the domain's own."""
    for key in _literal_secrets(container, ""):
        fix = "put {env: NAME} in its place" if _takes_references(key, own) else "leave it out"
        raise ConfigError(
            f"`{key}` holds a secret, which would stand in files and logs: set an environment variable to it and {fix}"
        )


def _takes_references(key: str, own: Sequence[str]) -> bool:
    """Whether a key lies in one of ``SECTIONS``, or is one of the domain's ``own`` or lies in it."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(map(SECTIONS.fullmatch, above)) or not {*above, key}.isdisjoint(own)


def _literal_secrets(value: Any, key: str, of_server: bool = False, is_secret: bool = False) -> Iterator[str]:
    """Dotted keys of literal secrets.

    Args:
        of_server: the value lies in headers or variables of a server.
        is_secret: it lies under the name of a secret.
    """
    if is_reference(value) and not SECTIONS.fullmatch(key):
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            below, word = _under(key, name), _word(str(name))
            if isinstance(item, list) and word.endswith(("args", "command", "headers", "env")):
                yield from (_under(below, place) for place in _secret_options(item))
            inside = of_server or word.endswith(("headers", "env"))
            yield from _literal_secrets(item, below, inside, is_secret or _names_secret(word, of_server))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _literal_secrets(item, _under(key, place), of_server, is_secret)
    elif value in (None, "") or isinstance(value, bool) or key == "weights.store":
        return
    elif is_secret or _opens(str(value)):
        yield key


def _opens(text: str) -> bool:
    """Whether a text is an address with a password or a secret parameter."""
    named = any(_names_secret(_word(name), True) for name in PARAMETER.findall(text))
    return "://" in text and (named or LOGIN.search(text) is not None)


def _secret_options(items: Sequence[Any]) -> Iterator[int]:
    """Places of secrets in a list such as `[--header, "Authorization: …", --api-key, …]`."""
    for place, item in enumerate(items):
        option = OPTION.match(item) if isinstance(item, str) else None
        if option and option[1] and option[3] and not _names_secret(_word(option[2]), True):
            option = OPTION.match(option[3])  # `--header=Authorization: …`
        if option is None or not _names_secret(_word(option[2]), True):
            continue
        if option[3] and not option[3].startswith("$"):  # `Authorization:$AUTH` is filled in by the program
            yield place
        elif option[3] is None and option[1] and place + 1 < len(items) and not is_reference(items[place + 1]):
            yield place + 1


def _names_secret(word: str, of_server: bool) -> bool:
    return word.endswith(SERVER_SECRETS if of_server else SECRETS) or word.removesuffix("s").endswith(SECRETS)


def _word(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _under(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)
