"""Adds the addresses of the repository to the package's metadata when it is built.

Hatchling runs this (see `pyproject.toml`). The addresses come from the remote `origin` of
the clone, so a fork names itself. Without such a remote there are none. A wheel that is
built from an sdist has the sdist's.
"""

import re
import subprocess
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Such as `https://host/owner/name.git`, `git@host:owner/name.git`, `ssh://git@host/name`.
# The name or token of a user, and the port of SSH, must not get into the metadata.
_REMOTE = re.compile(
    r"(?:https://(?:[^@/]*@)?(?P<web>[\w.:-]+)/"
    r"|(?:ssh://)?[\w.-]+@(?P<ssh>[\w.-]+)(?::\d+(?=/))?[:/])"
    r"/?(?P<path>[\w.~/-]+?)(?:\.git)?/?"
)


class ProjectUrls(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        home = address(Path(self.root))
        if home is not None:
            metadata["urls"] = {"Source": home, "Issues": f"{home}/issues"}


def address(root: Path) -> str | None:
    """The address, for a browser, of the repository of which `root` is a clone."""
    if not (root / ".git").exists():  # `root` may lie within another repository
        return None
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # Git is not installed
        return None
    found = _REMOTE.fullmatch(done.stdout.strip())
    return found and f"https://{found['web'] or found['ssh']}/{found['path']}"
