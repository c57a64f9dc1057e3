"""Build the sdist and from it the wheel, install the wheel beside decoys, and use it; then install the pass of CONTRIBUTING.md and check that.

Run as a program by `make wheel`. The libraries are those of the interpreter that runs this: nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("benchmarks", "passes", "search_spaces")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Output of a command that must succeed; ends the program with its words when it doesn't."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        sys.exit(f"wheel smoke test: {' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def must(holds: bool, message: str) -> None:
    """End the program with `message` unless it holds (an assert would go with `python -O`)."""
    if not holds:
        sys.exit(f"wheel smoke test: {message}")


def left_out(folder: str, names: list[str]) -> set[str]:
    """What a clean clone doesn't have: caches, earlier builds, virtual environments, what `make demo` left."""
    environments = {name for name in names if (Path(folder) / name / "pyvenv.cfg").exists()}
    return set(LEFT_OUT(folder, names)) | environments | ({"demo"} if Path(folder) == ROOT else set())


def build(scratch: Path) -> Path:
    """Build from a copy of the tree, links kept, so that neither leftovers in `build/` nor an old egg-info get in; give back the wheel."""
    shutil.copytree(ROOT, scratch / "tree", symlinks=True, ignore=left_out)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch / "dist"], scratch / "tree")
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """One top-level package, every Python file of the four folders once and as a regular file, the marker for type checkers."""
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
        recorded = [line.split(",")[0] for line in archive.read(record).decode().splitlines()]
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    must(tops == {"autotune"}, f"the wheel must hold the one package autotune; got {sorted(tops)}")
    must(len(names) == len(set(names)), "the wheel holds a file twice")
    must(sorted(recorded) == sorted(names), "RECORD must list the files that are there")
    must(not [m.filename for m in members if (m.external_attr >> 16) & 0o170000 == 0o120000], "the wheel must hold no links")
    tables = [path for folder in ("providers", "session_options") for path in (ROOT / "autotune" / folder).glob("*.toml")]
    expected = {"autotune/py.typed", *(path.relative_to(ROOT).as_posix() for path in tables)}
    for folder, package in [("autotune", "autotune"), *((name, f"autotune/{name}") for name in MAPPED)]:
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if not any(parent.is_symlink() for parent in path.parents) and (path.parent / "__init__.py").is_file():
                expected.add(f"{package}/{relative.as_posix()}")
    packaged = {name for name in names if name.startswith("autotune/")}
    must(packaged == expected, f"missing from the wheel: {sorted(expected - packaged)}; too much: {sorted(packaged - expected)}")
    must(any(name.endswith("licenses/LICENSE") for name in names), "the wheel must carry its licence")


def install(wheel: Path, scratch: Path) -> Path:
    """Install the wheel into a fresh environment that sees this one's libraries (not this one's autotune); give back its `bin`."""
    environment = scratch / "environment"
    venv.create(environment, with_pip=True)
    bin_folder = environment / "bin"
    run([bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], scratch)
    site = Path(run([bin_folder / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], scratch).strip())
    # A folder named by a .pth file comes last on the path, and .pth files inside it (our editable install) are not read.
    (site / "libraries.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))))
    return bin_folder


def decoys(scratch: Path) -> Path:
    """A user's folder with packages of his own under our folders' names."""
    folder = scratch / "users_project"
    for name in MAPPED:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("DECOY = True\n")
    return folder


IMPORTS = """
import pathlib, sys
import autotune, autotune.benchmarks, autotune.passes.base, autotune.passes.registry, autotune.search_spaces.space
import benchmarks, passes, search_spaces
home = pathlib.Path(sys.prefix).resolve()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "autotune":
        assert home in pathlib.Path(module.__file__).resolve().parents, f"{name} comes from {module.__file__}"
for module in (benchmarks, passes, search_spaces):
    assert module.DECOY, f"{module.__name__} comes from {module.__file__}"
for name in autotune.passes.registry.BUILT_IN:
    autotune.passes.registry.get_pass(name)
print(autotune.__version__)
"""


def check_use(bin_folder: Path, users_folder: Path) -> None:
    """Import beside the decoys: ours are ours, theirs are theirs; then the command line."""
    version = run([bin_folder / "python", "-c", IMPORTS], users_folder).strip()
    must(version == re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1], f"__version__ is {version}")  # type: ignore[index] # it has a version
    must(version in run([bin_folder / "autotune", "--version"], users_folder), "autotune --version must print the version")
    listed = run([bin_folder / "autotune", "passes", "list"], users_folder)
    must("OnnxQuantization" in listed, f"autotune passes list must name the passes; got {listed}")
    run([bin_folder / "autotune", "doctor"], users_folder)  # starts a child process and a session in it


BLOCK = re.compile(r"^```\w+\n# file: (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def check_contributing(bin_folder: Path, scratch: Path) -> None:
    """Write the files that CONTRIBUTING.md shows, install them as the distribution they are, and run its own test."""
    folder = scratch / "own_distribution"
    blocks = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    must(len(blocks) >= 3, "CONTRIBUTING.md must show a pass, its pyproject.toml and its test")
    for name, text in blocks:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation"], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    run([bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], scratch)
    (tests,) = (name for name, _ in blocks if Path(name).name.startswith("test_"))
    (scratch / "own_tests").mkdir()  # away from the sources: the installed pass is meant
    shutil.copy(folder / tests, scratch / "own_tests")
    run([bin_folder / "python", "-m", "pytest", "-q", tests], scratch / "own_tests")
    (entry,) = re.findall(r'entry-points\."autotune\.passes"\]\n(\w+) =', "\n".join(text for _, text in blocks))
    must(entry in run([bin_folder / "autotune", "passes", "list"], scratch), f"autotune passes list must name {entry}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="autotune-wheel-") as name:
        work = Path(name)
        wheel = build(work)
        check_contents(wheel)
        bin_folder = install(wheel, work)
        check_use(bin_folder, decoys(work))
        check_contributing(bin_folder, work)
    print(f"wheel smoke test: {wheel.name} holds autotune alone, works beside decoys, and takes the pass of CONTRIBUTING.md")
