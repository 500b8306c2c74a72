"""Builds the client's distribution (metadata is in pyproject.toml).

In a checkout it copies the client's files into alignedserve_client/path, which is not under version control. An sdist
already contains them.
"""

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
PATH = HERE / "alignedserve_client/path"
SHARED = ("__init__.py", "cancellation.py", "errors.py", "grpc_poller.py", "py.typed")
MESSAGES = ("common_pb2", "inference_pb2", "inference_pb2_grpc")


def collect() -> None:
    """Copy the client and its dependencies from the tree."""
    shutil.rmtree(PATH, ignore_errors=True)
    package = PATH / "alignedserve"
    shutil.copytree(TREE / "client", package / "client", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHARED:
        shutil.copy(TREE / "src/alignedserve" / name, package / name)
    (package / "proto").mkdir()
    for file in sorted((TREE / "proto/messages").iterdir()):
        if file.stem in (*MESSAGES, "__init__") and file.suffix in (".py", ".pyi"):
            shutil.copy(file, package / "proto" / file.name)


def version() -> str:
    """`__version__` of the package, parsed without importing it."""
    tree = ast.parse((PATH / "alignedserve/__init__.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__version__"
    )
    return ast.literal_eval(value)


class BuildWithPath(build_py):
    """Adds the .pth file beside the package. It holds the folder's path relative to itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / "alignedserve-client.pth").write_text(
                "alignedserve_client/path\n", encoding="utf-8"
            )


if (TREE / "client/__init__.py").is_file() and (TREE / "src/alignedserve").is_dir():
    collect()
elif not (PATH / "alignedserve/client").is_dir():
    raise SystemExit(f"the client's files are neither in {TREE} nor in {PATH}: build from a checkout or an sdist")

setup(
    version=version(),
    packages=["alignedserve_client"],
    package_data={"alignedserve_client": ["path/**/*.py", "path/**/*.pyi", "path/**/py.typed"]},
    cmdclass={"build_py": BuildWithPath},
)
