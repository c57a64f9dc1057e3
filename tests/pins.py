"""Print the exact versions of everything that passtune, its extras and their requirements installed here, for constraints.txt."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEAD = """\
# The versions that `make check` passed with, written by `make pins`: passtune, its extras demo and dev, and all that these require.
# torch 2.13.0 is the CPU build where this is developed; the Makefile tells how to get that build elsewhere."""


def closure(root: str, extras: frozenset[str]) -> set[str]:
    """Canonical names of the distributions that `root[extras]` requires in this environment, itself left out."""
    visited: dict[str, frozenset[str]] = {}
    waiting = [(root, extras)]
    while waiting:
        name, wanted = waiting.pop()
        key = canonicalize_name(name)
        known = visited.get(key)
        if known is not None and wanted <= known:
            continue
        visited[key] = wanted | (known or frozenset())
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in wanted | {""}):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return set(visited) - {canonicalize_name(root)}


def pin(name: str) -> str:
    """`name==version` without the local part: `2.13.0+cpu` and `2.13.0` are the same release."""
    return f"{name}=={metadata.version(name).partition('+')[0]}"


if __name__ == "__main__":
    print(HEAD)
    for distribution in sorted(closure("passtune", frozenset({"demo", "dev"}))):
        print(pin(distribution))
