"""Runs the containers of rendered Kubernetes documents on this machine, each with nothing but what is rendered.

A pod is a process with exactly the rendered variables and command, in a network namespace and a file system of its own.
The machine's folders are its image, but /tmp is empty, a volume is there only if it is mounted, and
/etc/hosts knows the pods' names, as the cluster's DNS would.
"""

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN = ("tmp", "results", "mnt")
"""Folders of this machine that no image has."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cluster gives a pod."""

    network: str
    """Name of its network namespace."""
    hosts: Mapping[str, str]
    """Address of every pod, by name."""
    claims: Mapping[str, Path]
    """The folder of each persistent volume claim."""
    secrets: Mapping[str, str]
    """Values of the run's Secret."""
    fields: Mapping[str, str]
    """The pod's own fields that the downward API knows, by path."""


def variables(container: Mapping[str, Any], machine: Machine) -> dict[str, str]:
    """The container's environment. A source that Kubernetes does not have is an error."""
    env: dict[str, str] = {}
    for item in container["env"]:
        if "value" in item:
            env[item["name"]] = item["value"]
            continue
        source = item["valueFrom"]
        if "secretKeyRef" in source:
            env[item["name"]] = machine.secrets[source["secretKeyRef"]["key"]]
        else:
            env[item["name"]] = machine.fields[source["fieldRef"]["fieldPath"]]
    return env


def command(container: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """The command, with `$(NAME)` replaced as the kubelet does."""
    words = list(container["command"])
    for name, value in env.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def start_pod(pod: Mapping[str, Any], machine: Machine, log: Path) -> "subprocess.Popen[bytes]":
    """Start the only container of a pod's specification. Its signals reach the container's process."""
    (container,) = pod["containers"]
    env = variables(container, machine)
    root, hosts = log.with_suffix(".root"), log.with_suffix(".hosts")
    root.mkdir()
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in machine.hosts.items()))
    assignments = [f"{name}={value}" for name, value in env.items()]
    start = f"cd {shlex.quote(container['workingDir'])} && exec {shlex.join(command(container, env))}"
    steps = [
        *_image(shlex.quote(str(root))),
        f"mount --bind {shlex.quote(str(hosts))} etc/hosts",
        *(step for volume in pod["volumes"] for step in _volume(volume, container, machine)),
        f"exec chroot . {shlex.join(['env', '-i', *assignments, 'sh', '-c', start])}",
    ]
    isolated = ["ip", "netns", "exec", machine.network, "unshare", "--mount", "sh", "-ec", "\n".join(steps)]
    with open(log, "wb") as output:
        return subprocess.Popen(isolated, stdout=output, stderr=subprocess.STDOUT)


def _image(root: str) -> list[str]:
    """Shell commands that make this folder a file system like the machine's, without its hidden folders."""
    return [
        f"mount -t tmpfs none {root}",
        f"cd {root}",
        "for entry in /*; do",
        f'  case "${{entry#/}}" in {"|".join(HIDDEN)}) mkdir ".$entry"; continue;; esac',
        '  if [ -L "$entry" ]; then cp -P "$entry" .; continue; fi',
        '  if [ -d "$entry" ]; then mkdir ".$entry" && mount --rbind "$entry" ".$entry"; fi',
        "done",
    ]


def _volume(volume: Mapping[str, Any], container: Mapping[str, Any], machine: Machine) -> list[str]:
    (path,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    target = shlex.quote(f".{path}")
    if "emptyDir" in volume:
        return [f"mkdir -p {target}", f"mount -t tmpfs none {target}"]
    folder = machine.claims[volume["persistentVolumeClaim"]["claimName"]]
    return [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(folder))} {target}"]
