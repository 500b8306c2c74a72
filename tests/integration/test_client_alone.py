"""The distribution `alignedserve-client` in an environment with nothing else, and what the documents say of the client:
their examples run there, word by word, against a cluster.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import alignedserve
from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from support.gateway_process import GatewayProcess

ROOT = Path(__file__).parents[2]
NEEDED = ("grpcio", "protobuf", "typing-extensions")
PAGES = ("README.md", "docs/client.md", "docs/quickstart.md", "distributions/client/README.md")
# Runs each example of its input in a namespace of its own, and says what they printed, and what is imported by then.
RUNNER = """
import contextlib, io, json, sys
printed = []
for name, code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    printed.append(out.getvalue())
print(json.dumps({"printed": printed, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment; its Python hears nothing of this one."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *words: str, given: str | None = None) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ALIGNEDSERVE"))}
        done = subprocess.run(
            [self.python, *words],
            input=given,
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def add(self, distribution: str) -> None:
        """Have what this process has of it: no index is asked."""
        files = importlib.metadata.files(distribution)
        assert files is not None
        for file in files:
            if ".." not in file.parts:
                target = self.packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)

    def pip(self, *words: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *words]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def build(source: Path, folder: Path) -> Path:
    """A wheel of the distribution at `source`."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an index would offer it; from a copy, since a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("client")
    for name in ("client", "distributions/client", "proto/messages", "src/alignedserve"):
        ignored = shutil.ignore_patterns("__pycache__", "models", "testing", "path", "build", "*.egg-info")
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=ignored)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    source = folder / "tree/distributions/client"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "sdist", filter="data")
    direct = build(source, folder / "direct")
    (unpacked,) = (folder / "sdist").iterdir()
    wheel = build(unpacked, folder / "from-sdist")
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(direct).namelist()
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With grpcio, protobuf, what these need, and the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    environment = Environment(folder)
    for name in NEEDED:
        environment.add(name)
    environment.pip("install", "-q", "--no-index", str(wheel))
    return environment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses() -> AsyncIterator[dict[str, str]]:
    """Those of the documents, and those that stand for them here: a cluster with two gateways."""
    config = from_tree({"cluster": {"device": "cpu", "threads": 1}, "kv_pool": {"size_gib": 0.1}})
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with GatewayProcess(cluster, "gateway-0") as first, GatewayProcess(cluster, "gateway-1") as second:
            yield {"127.0.0.1:9000": first.grpc_address, "127.0.0.1:9001": second.grpc_address}


@dataclass(frozen=True)
class Example:
    """A Python block of a page; `printed` is the text block right under it, None where there is none."""

    name: str
    code: str
    printed: str | None


def examples() -> Iterator[Example]:
    """Those that import our client."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in re.finditer(
            r"^( *)```python\n(.*?)^\1```\n(?:\n```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE
        ):
            if "alignedserve.client" in match[2]:
                line = text.count("\n", 0, match.start()) + 1
                yield Example(f"{page}:{line}", textwrap.dedent(match[2]), match[3])


def run_examples(environment: Environment, chosen: list[Example], addresses: dict[str, str]) -> list[str]:
    """Run them in one process; returns the names of the packages that it has imported."""
    orders = []
    for example in chosen:
        code = example.code
        for written, real in addresses.items():
            code = code.replace(written, real)
        orders.append((example.name, code))
    answer: dict[str, Any] = json.loads(environment.run("-c", RUNNER, given=json.dumps(orders)))
    printed = dict(zip(chosen, answer["printed"], strict=True))
    wrong = {each.name: text for each, text in printed.items() if each.printed not in (None, text)}
    assert not wrong, wrong
    assert [each.name for each, text in printed.items() if not text and "print" in each.code] == []
    modules: list[str] = answer["modules"]
    return modules


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
async def test_what_is_documented_runs_with_grpcio_and_protobuf_alone(
    environment: Environment, addresses: dict[str, str]
) -> None:
    written = list(examples())
    assert {example.name.rpartition(":")[0] for example in written} == set(PAGES)
    assert sum(example.printed is not None for example in written) >= 6
    with_bar = [example for example in written if "progress=True" in example.code]
    assert with_bar
    modules = run_examples(environment, [example for example in written if example not in with_bar], addresses)
    assert "alignedserve" in modules
    heavy = {"ray", "torch", "transformers", "tokenizers", "numpy", "yaml", "tqdm", "alignedserve_client"}
    assert not heavy & set(modules)
    environment.add("tqdm")
    assert "tqdm" in run_examples(environment, with_bar, addresses)


def test_the_wheel_holds_the_trees_files_of_the_client_and_no_others(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    inside = "alignedserve_client/path/alignedserve/"
    held = {name.removeprefix(inside): archive.read(name) for name in archive.namelist() if name.startswith(inside)}
    shared = ROOT / "src/alignedserve"
    names = ("__init__.py", "cancellation.py", "errors.py", "grpc_poller.py", "py.typed")
    wanted = {name: (shared / name).read_bytes() for name in names}
    wanted |= {f"client/{file.name}": file.read_bytes() for file in (ROOT / "client").glob("*.py")}
    messages = ("__init__.py", "common_pb2.py", "common_pb2.pyi", "inference_pb2.py", "inference_pb2.pyi")
    for name in (*messages, "inference_pb2_grpc.py"):
        wanted[f"proto/{name}"] = (ROOT / "proto/messages" / name).read_bytes()
    assert held == wanted
    assert wheel.name.startswith(f"alignedserve_client-{alignedserve.__version__}-")
    others = {name for name in archive.namelist() if not name.startswith(inside) and ".dist-info/" not in name}
    assert others == {"alignedserve-client.pth", "alignedserve_client/__init__.py"}, "no file of the whole project's"


def test_a_whole_installation_goes_before_the_thin_one(environment: Environment) -> None:
    where = "import alignedserve.client; print(alignedserve.client.__file__)"
    thin = environment.run("-c", where).strip()
    assert thin == str(environment.packages / "alignedserve_client/path/alignedserve/client/__init__.py")
    whole = environment.packages / "alignedserve"
    try:
        shutil.copytree(environment.packages / "alignedserve_client/path/alignedserve", whole)
        assert environment.run("-c", where).strip() == str(whole / "client/__init__.py")
    finally:
        shutil.rmtree(whole)
    assert environment.run("-c", where).strip() == thin


def test_where_no_pth_file_is_read_one_import_is_enough(environment: Environment, wheel: Path, tmp_path: Path) -> None:
    environment.pip("install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path), str(wheel))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import alignedserve_client, alignedserve.client as client"
    )
    found = environment.run(
        "-S", "-c", f"import sys; sys.path.append({str(environment.packages)!r}); {code}; print(client)"
    )
    assert str(tmp_path) in found


def test_a_users_program_passes_strict_type_checks(environment: Environment, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    command = ["-m", "mypy", "--strict", "--no-incremental", "--python-executable", environment.python, program]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    program.write_text(TYPED.replace("max_tokens=8", 'max_tokens="8"').replace("answer.text", "answer.txt"))
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    for wrong in ('Argument "max_tokens"', '"Completion" has no attribute "txt"'):
        assert wrong in done.stdout, done.stdout


TYPED = """
from typing import assert_type

from alignedserve.client import AlignedServeError, AsyncClient, BatchItem, Client, Completion
from alignedserve.client import OverloadedError, Request, Timings


def ask(client: Client) -> str:
    answer = client.generate("go", max_tokens=8, stop=["a"], logit_bias={3: 1.0})
    assert_type(answer.timings, Timings | None)
    return answer.text


def many(client: Client) -> None:
    prompts: list[BatchItem] = ["a", [1, 2], Request(prompt="b", max_tokens=3)]
    assert_type(client.generate_many(prompts, progress=True), list[Completion])
    either = client.chat_many([[{"role": "user", "content": "a"}]], return_exceptions=True)
    assert_type(either, list[Completion | AlignedServeError])


async def follow(client: AsyncClient) -> float | None:
    try:
        async with client.stream("go") as stream:
            async for chunk in stream:
                print(chunk.text, chunk.usage.total_tokens if chunk.usage else 0)
            assert_type(await stream.completion(), Completion)
    except OverloadedError as error:
        return error.retry_after_s
    return stream.client_timings.ttft_s
"""
