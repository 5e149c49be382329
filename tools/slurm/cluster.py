"""A SLURM cluster on this machine: ``python tools/slurm/cluster.py up | status | down``.

For tests. It uses Debian's slurm-wlm and munge, one slurmctld and a slurmd for each of several
virtual nodes (n1, n2, ...), without systemd, as root. There are two partitions: ``main``, and
``urgent``, whose jobs requeue those of ``main`` when they need the node. All files are in one
folder. Other programs find the cluster by ``export SLURM_CONF=FOLDER/slurm.conf`` (the last line
that ``up`` prints).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("/tmp/selftask-slurm")
HOSTS = Path("/etc/hosts")
MARK = "# selftask-slurm"
PACKAGES = ("slurm-wlm", "munge")
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """\
ClusterName=selftask
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credential of its last start has expired: 2 minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,preempt_youngest_first
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
NodeName=n[1-{nodes}] NodeHostName={host} NodeAddr=127.0.0.1 Port=[17001-{last_port}] CPUs=4 \
RealMemory=2000
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


class ClusterError(Exception):
    """Raised with the reason if the cluster cannot be used, as a message for the user."""


def up(folder: Path = FOLDER, nodes: int = 2) -> Path:
    """Install, configure and start what is missing; return the path of slurm.conf.

    Does nothing if the cluster is already running. Raises ClusterError with the reason.
    """
    install()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in ("state", *(f"spool-n{number}" for number in range(1, nodes + 1))):
        (folder / name).mkdir(exist_ok=True)
    config = folder / "slurm.conf"
    text = CONFIG.format(
        host=socket.gethostname(), folder=folder, nodes=nodes, last_port=17000 + nodes
    )
    if config.exists() and config.read_text() != text:
        down(folder)
    config.write_text(text)
    make_names_resolve([socket.gethostname(), *node_names(nodes)])
    start_munged(folder)
    start(folder, "slurmctld", ["slurmctld", "-f", str(config)])
    for name in node_names(nodes):
        start_node(name, folder)
    wait_for(lambda: idle(config) == nodes, 30, f"{nodes} idle nodes; see the logs in {folder}")
    return config


def down(folder: Path = FOLDER) -> None:
    """Cancel all jobs, stop every daemon by its pid file, and remove the host names."""
    config = folder / "slurm.conf"
    if is_up(folder / "slurmctld.pid"):
        slurm(config, "scancel", "--user=root", "--quiet")
        deadline = time.monotonic() + 20
        while slurm(config, "squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.2)
    for pid_file in [*sorted(folder.glob("slurmd-*.pid")), folder / "slurmctld.pid"]:
        stop(pid_file)
    stop(folder / "munged.pid")
    forget_names()


def status(folder: Path = FOLDER) -> str:
    """Return one line per daemon, and the output of ``sinfo``."""
    pid_files = [folder / "munged.pid", folder / "slurmctld.pid"]
    pid_files += [folder / f"slurmd-{name}.pid" for name in known_nodes(folder)]
    lines = [f"{path.stem:<12}{'up' if is_up(path) else 'down'}" for path in pid_files]
    if is_up(folder / "slurmctld.pid"):
        lines.append(slurm(folder / "slurm.conf", "sinfo").stdout.rstrip())
    return "\n".join(lines)


def install() -> None:
    """Install Debian's packages, unless the programs are installed."""
    if all(shutil.which(name) for name in DAEMONS):
        return
    if os.geteuid() != 0:
        raise ClusterError(f"{', '.join(PACKAGES)} are not installed, and only root may do it")
    if shutil.which("apt-get") is None:
        raise ClusterError("this machine has no apt-get: install SLURM and munge by hand")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-qq", *words], env=quiet, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"apt-get {words[0]} failed: {done.stderr.strip()[-500:]}")


def make_names_resolve(names: list[str]) -> None:
    """Add unresolvable names to /etc/hosts, since ranks connect by the name of their first node."""
    missing = []
    for name in names:
        try:
            socket.gethostbyname(name)
        except OSError:
            missing.append(name)
    if missing:
        try:
            with HOSTS.open("a", encoding="utf-8") as file:
                file.writelines(f"127.0.0.1 {name} {MARK}\n" for name in missing)
        except OSError as error:
            raise ClusterError(f"{', '.join(missing)} do not resolve: {error}") from error


def forget_names() -> None:
    """Remove our lines from /etc/hosts, in place, since containers mount that file."""
    lines = HOSTS.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith(f" {MARK}\n")]
    if len(kept) < len(lines):
        HOSTS.write_text("".join(kept), encoding="utf-8")


def start_munged(folder: Path) -> None:
    """Start munged with its own key, socket and files; another munged is not affected."""
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    words = [f"--{option}={folder / name}" for option, name in files.items()]
    start(folder, "munged", ["munged", "--force", *words])


def start_node(name: str, folder: Path = FOLDER) -> None:
    """Start one virtual node, also after it was killed."""
    start(folder, f"slurmd-{name}", ["slurmd", "-f", str(folder / "slurm.conf"), "-N", name])


def start(folder: Path, name: str, words: list[str]) -> None:
    """Run a daemon that forks itself into the background, and wait for its pid file."""
    pid_file = folder / f"{name}.pid"
    if is_up(pid_file):
        return
    pid_file.unlink(missing_ok=True)
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise ClusterError(f"{name} does not start: {(done.stderr or done.stdout).strip()[-500:]}")
    wait_for(lambda: is_up(pid_file), 10, f"{name}; see {folder}/{name}.log")


def stop(pid_file: Path, *, patience_s: float = 10.0) -> None:
    """Send SIGTERM, then SIGKILL if the process does not end."""
    if not is_up(pid_file):
        pid_file.unlink(missing_ok=True)
        return
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while is_up(pid_file) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_up(pid_file):
        os.kill(pid, signal.SIGKILL)
    pid_file.unlink(missing_ok=True)


def is_up(pid_file: Path) -> bool:
    """Return True if the process of a pid file is running and has the name of the file."""
    try:
        pid = int(pid_file.read_text())
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return False
    name, state = stat.split("(", 1)[1].rsplit(")", 1)
    return name == pid_file.stem.split("-")[0] and state.split()[0] != "Z"


def idle(config: Path) -> int:
    """Return the number of nodes that could take a job now, or have one."""
    listed = slurm(config, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%t")
    good = ("idle", "mix", "alloc", "comp")
    return sum(line.strip() in good for line in listed.stdout.splitlines())


def slurm(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands with this cluster."""
    return subprocess.run(
        words,
        env={**os.environ, "SLURM_CONF": str(config)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def node_names(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def known_nodes(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("spool-") for path in folder.glob("spool-*"))


def wait_for(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until ``true`` returns True; raise ClusterError with ``what`` after the time limit."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["up", "down", "status"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "up":
            print(f"export SLURM_CONF={up(arguments.folder, arguments.nodes)}")
        elif arguments.command == "down":
            down(arguments.folder)
        else:
            print(status(arguments.folder))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
