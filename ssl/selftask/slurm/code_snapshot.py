"""Copy of the working tree for a job, so that edits do not affect a job that waits in the queue.

Modules of ``import:`` are imported from the copy. selftask itself is not copied; the installed
version runs.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from selftask.errors import UserError

MAX_MB = 200.0  # limit for code; data and runs should be in .gitignore


@dataclass(frozen=True)
class CodeSnapshot:
    """Files of a git repository that git does not ignore, and the folder they are copied to."""

    repository: Path
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> CodeSnapshot:
        """Return a snapshot of the current folder's repository, to be copied to ``folder`` later.

        Raises:
            UserError: If there is no git repository, or git is not installed.
        """
        top = _git("rev-parse", "--show-toplevel").strip()
        return cls(Path(top), folder)

    def path_of_copy(self, path: Path) -> Path:
        """Return the path of the copy of a file in the repository; return other paths unchanged."""
        resolved = path.resolve()
        if not resolved.is_relative_to(self.repository):
            return path
        return self.folder.absolute() / resolved.relative_to(self.repository)

    def copy(self) -> None:
        """Copy tracked files, and untracked ones that are not ignored, as they are now.

        Those of submodules are copied, too. An earlier copy in ``folder`` is removed. A symbolic
        link leads to the copy of its target, or to the target if that is elsewhere.

        Raises:
            UserError: If they take more than ``MAX_MB``.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        files = _files(self.repository)
        megabytes = sum(path.lstat().st_size for path in files) / 1e6
        if megabytes > MAX_MB:
            largest = max(files, key=lambda path: path.lstat().st_size)
            raise UserError(
                f"launch.snapshot: the files of {self.repository} take {megabytes:.0f} MB, "
                f"{largest} the most; at most {MAX_MB:.0f} MB are copied: add data and runs to "
                ".gitignore"
            )
        for path in files:
            copied = self.folder / path.relative_to(self.repository)
            copied.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                copied.symlink_to(self.path_of_copy(path).resolve())
            else:
                shutil.copy2(path, copied)
        # snapshots of other runs do not contain this one
        (self.folder / ".gitignore").write_text("*\n", encoding="utf-8")


def _files(repository: Path) -> list[Path]:
    """Return the existing files that git does not ignore, also those of submodules."""
    listed = _git("-C", str(repository), "ls-files", "-coz", "--exclude-standard")
    paths = [repository / name for name in listed.split("\0") if name and not name.endswith("/")]
    # tracked files may have been deleted
    files = [path for path in paths if path.is_symlink() or path.is_file()]
    submodules = [path for path in paths if (path / ".git").exists() and not path.is_symlink()]
    return [*files, *(file for module in submodules for file in _files(module))]


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # as Python decodes names of files
            check=False,
        )
    except FileNotFoundError:
        raise UserError("launch.snapshot: git is not installed on this machine") from None
    if done.returncode:
        raise UserError(
            f"launch.snapshot: {done.stderr.strip()}; submit from inside a git repository, or set "
            "launch.snapshot=false"
        )
    return done.stdout
