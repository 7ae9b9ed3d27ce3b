"""Runs one program several times in isolation: `python -S -E jail.py < specification as JSON`. Standard library only.

Three processes: this one enters the namespaces and waits; the *driver* (process 1 of its own PID namespace, or a
subreaper where there is none) has no privileges left and starts the program once per run; the program has, on top of
that, resource limits and a system-call filter. When the driver ends, everything the program started is dead.

Emits one JSON line per run on the descriptor ``report_fd``; what a report does not say did not happen.
"""

import base64
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

from kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    bind_read_only,
    drop_capabilities,
    landlock,
    mount,
    prctl,
    seccomp_deny,
    unshare,
)

NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK = "/sandbox"
MAX_STDERR = 8_192
MAX_FILES = 16_384
WATCH_S = 0.05


def main() -> None:
    specification = json.load(sys.stdin)
    os.umask(0o022)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if specification["mode"] == "namespaces":
        run_in_namespaces(specification)
    else:
        run_restricted(specification)


# ---- namespaces


def run_in_namespaces(specification: dict) -> None:
    uid = specification["uid"]
    if uid is None:
        enter_user_namespace()
    else:
        unshare(NAMESPACES)
    driver = os.fork()
    if driver == 0:
        build_root(specification)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        drop_capabilities()
        drive(specification, WORK)
        os._exit(0)
    os.waitpid(driver, 0)


def enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(specification: dict) -> None:
    """A root of its own: system and interpreter read-only, an empty /tmp and working directory in memory, no more."""
    root, size_mb = specification["root"], specification["limits"]["disk_mb"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in ("/tmp", WORK):
        os.makedirs(root + path, exist_ok=True)
        options = f"size={size_mb}m,nr_inodes={MAX_FILES},mode=1777"
        mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*SYSTEM_PATHS, *SYSTEM_FILES, *DEVICES, *specification["readable"]):
        place(root, path)
    os.mkdir(root + "/proc")
    with contextlib.suppress(OSError):  # containers with a masked /proc refuse it: the program sees none
        mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chroot(root)
    os.chdir(WORK)


def place(root: str, path: str) -> None:
    """Makes ``path`` of the outside visible at the same place inside, read-only."""
    target = root + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        open(target, "w").close()
    bind_read_only(path, target)


# ---- without namespaces of our own


def become(uid: int | None, work: str) -> None:
    """Where the caller is root: a user of its own, owner of the working directory."""
    if uid is not None:
        os.chown(work, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        drop_capabilities()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_restricted(specification: dict) -> None:
    """A subreaper for what the program leaves behind; Landlock, where asked for, is put on the program."""
    work = WORK if specification["mode"] == "bwrap" else specification["root"]
    os.chdir(work)
    become(specification["uid"], work)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    drive(specification, work)


# ---- the driver


def drive(specification: dict, work: str) -> None:
    """Writes the program's files, then one run after the other; ends early where a run did not end by itself."""
    prctl(PR_SET_DUMPABLE, 0)
    report = os.fdopen(specification["report_fd"], "w")
    for name, content in specification["files"].items():
        with open(os.path.join(work, name), "w") as file:
            file.write(content)
    deadline = time.monotonic() + specification["limits"]["total_s"]
    for stdin in specification["stdins"]:
        outcome = run_once(specification, stdin, deadline)
        kill_remains()
        report.write(json.dumps(outcome) + "\n")
        report.flush()
        if outcome["ended"] != "exited" or (outcome["exit_code"] and specification["stop_on_failure"]):
            break
    report.close()


def run_once(specification: dict, stdin: str, deadline: float) -> dict:
    """One run. ``ended``: exited, signal, time, memory, disk or output."""
    limits = specification["limits"]
    started = time.monotonic()
    inbox = os.memfd_create("stdin")
    write_all(inbox, stdin.encode())
    os.lseek(inbox, 0, os.SEEK_SET)
    process = subprocess.Popen(
        specification["command"],
        stdin=inbox,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specification["env"],
        start_new_session=True,
        preexec_fn=lambda: restrict_program(specification),
    )
    os.close(inbox)
    stdout, stderr, ended = watch(process, limits, min(deadline, started + limits["wall_s"]))
    if ended:
        process.kill()
    code = process.wait()
    if not ended:
        ended = "exited" if code >= 0 else "time" if code == -signal.SIGXCPU else "signal"
    return {
        "ended": ended,
        "exit_code": code,
        "seconds": time.monotonic() - started,
        "stdout": base64.b64encode(stdout).decode(),
        "stderr": base64.b64encode(stderr).decode(),
    }


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def restrict_program(specification: dict) -> None:
    """In the program's process, before it is executed."""
    limits, isolated = specification["limits"], specification["mode"] != "landlock"
    memory, disk = limits["memory_mb"] << 20, limits["disk_mb"] << 20
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, limits["processes"] + (0 if isolated else num_processes_of_user())),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if not isolated:
        readable = [*SYSTEM_PATHS, *SYSTEM_FILES, *specification["readable"]]
        landlock(readable, [os.getcwd(), *DEVICES])
    seccomp_deny(signals=specification["mode"] == "namespaces")


def num_processes_of_user() -> int:
    """Tasks that the kernel already counts against this user's limit."""
    uid, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def watch(process: subprocess.Popen, limits: dict, deadline: float) -> tuple[bytes, bytes, str]:
    """Reads the output until both pipes close or a limit is passed; returns it and the limit ('' = none)."""
    out, err = (pipe.fileno() for pipe in (process.stdout, process.stderr) if pipe is not None)
    collected = {out: bytearray(), err: bytearray()}
    open_pipes = {out, err}
    exited_at = None
    while open_pipes:
        ready, _, _ = select.select(list(open_pipes), [], [], WATCH_S)
        for descriptor in ready:
            chunk = os.read(descriptor, 65536)
            if not chunk:
                open_pipes.discard(descriptor)
            collected[descriptor] += chunk
        del collected[err][:-MAX_STDERR]
        if len(collected[out]) > limits["output_kb"] * 1024:
            return bytes(collected[out][: limits["output_kb"] * 1024]), bytes(collected[err]), "output"
        now = time.monotonic()
        if now > deadline:
            return bytes(collected[out]), bytes(collected[err]), "time"
        if passed := passed_limit(limits):
            return bytes(collected[out]), bytes(collected[err]), passed
        if process.poll() is not None and not ready:
            # The program is gone; whoever holds the pipes now is a process it left behind.
            exited_at = exited_at or now
            if now - exited_at > 2 * WATCH_S:
                break
    return wait_after_output(process, collected[out], collected[err], deadline, limits)


def wait_after_output(
    process: subprocess.Popen, out: bytearray, err: bytearray, deadline: float, limits: dict
) -> tuple[bytes, bytes, str]:
    """The program closed its output: it may still run on."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return bytes(out), bytes(err), "time"
        if passed := passed_limit(limits):
            return bytes(out), bytes(err), passed
        time.sleep(WATCH_S / 5)
    return bytes(out), bytes(err), ""


def passed_limit(limits: dict) -> str:
    """Which of the limits on everything together is passed: memory, disk, or none ('')."""
    if sum(resident_pages(pid) for pid in descendants()) * resource.getpagesize() > limits["memory_mb"] << 20:
        return "memory"
    return "disk" if disk_usage(".") > limits["disk_mb"] << 20 else ""


def disk_usage(folder: str) -> int:
    """Bytes of everything below a folder, however deep; what is out of a path's reach aside."""
    total, folders = 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


def descendants() -> list[int]:
    """Every process below this one."""
    parents: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            parents.setdefault(parent, []).append(int(name))
    found, queue = [], [os.getpid()]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def resident_pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def kill_remains() -> None:
    """Ends and reaps every process the run left behind, however it detached itself."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in descendants():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signum)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
