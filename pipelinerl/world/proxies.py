"""The site's proxies (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`) carry requests to foreign addresses, and no others.

Clients of the run's own servers ignore these variables (`own_client`; aiohttp does so by itself). All other clients in
a run's processes obey them and find the run's hosts in `NO_PROXY` (`bypass`).
"""

import os
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pipelinerl.errors import ConfigError
from pipelinerl.world.tls import LOCAL_NAMES, client_context

if TYPE_CHECKING:
    import aiohttp

BYPASS_VARIABLES = ("NO_PROXY", "no_proxy")
"""Programs read one or the other."""


def bypass(env: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Adds loopback and ``hosts`` to both spellings of `NO_PROXY` in ``env``. `*` stays alone."""
    added = (*LOCAL_NAMES, *filter(None, hosts))
    given = {name: env[name] for name in BYPASS_VARIABLES if env.get(name)}
    for name in BYPASS_VARIABLES:
        listed = [part.strip() for part in given.get(name, "".join(given.values())).split(",") if part.strip()]
        if "*" not in listed:
            env[name] = ",".join(dict.fromkeys((*listed, *added)))


def own_client() -> dict[str, Any]:
    """Returns arguments of an HTTPX client of the run's own servers: the authorities that it trusts, and no proxy."""
    import httpx

    context = client_context()
    # Without `trust_env` HTTPX ignores `SSL_CERT_FILE`, so the context is made here.
    return {"verify": httpx.create_ssl_context() if context is True else context, "trust_env": False}


def open_session(**options: Any) -> "aiohttp.ClientSession":
    """Opens the session that rollout functions get. Foreign addresses are reached through the site's proxy."""
    import aiohttp

    bypass(os.environ)
    found = getproxies()
    for scheme in {"http", "https"} - found.keys():  # aiohttp does not read `ALL_PROXY`
        if carries_http(found.get("all", "")):
            os.environ[f"{scheme}_proxy"] = found["all"]
    # With `trust_env` every request looks for a proxy in a thread.
    return aiohttp.ClientSession(trust_env=bool({"http", "https", "all"} & found.keys()), **options)


def check_proxy(key: str, url: str) -> None:
    """Refuses a proxy that cannot carry the requests of `open_session` to ``url``, the value of ``key``.

    Raises:
        ConfigError: it is no HTTP proxy, the only kind that aiohttp supports.
    """
    scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    variable = scheme if scheme in getproxies() else "all"
    proxy = getproxies().get(variable, "")
    if proxy and not carries_http(proxy) and not proxy_bypass(host):
        raise ConfigError(
            f"`{key}` is {url!r}, and {variable.upper()}_PROXY names a proxy that is not http:// with a host and port: "
            f"these requests cannot go through SOCKS or TLS; name another in {scheme.upper()}_PROXY, or add {host} to "
            "NO_PROXY"
        )


def carries_http(proxy: str) -> bool:
    """Whether aiohttp can use this proxy: `http://HOST:PORT`, with or without a name and a password."""
    try:
        parts = urlsplit(proxy.strip())
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
