"""The wheel holds what the tree holds, the generated gRPC code is current, and imports run one way."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPONENTS = (
    "client",
    "cluster",
    "control",
    "decode_worker",
    "engine",
    "gateway",
    "kv_pool",
    "prefill_worker",
    "rank_host",
    "scheduler",
    "simulator",
    "transfer",
)
# What each component may import besides itself and the shared code: imports run one way.
ALLOWED: dict[str, set[str]] = {
    "shared": set(),
    "proto": set(),
    "scheduler": set(),
    "simulator": {"scheduler"},
    "control": {"proto"},
    "client": {"proto"},
    "transfer": {"proto", "scheduler"},
    "kv_pool": {"proto", "scheduler", "transfer", "control"},
    "engine": {"transfer", "scheduler"},
    "rank_host": {"proto", "transfer", "kv_pool", "engine", "control"},
    "prefill_worker": {"proto", "scheduler", "transfer", "kv_pool", "engine", "control", "rank_host"},
    "decode_worker": {"proto", "scheduler", "transfer", "kv_pool", "engine", "control", "rank_host"},
    "gateway": {"proto", "control"},
    "cluster": {"proto", "control", "transfer", "gateway", "scheduler"},
}
# The scheduler's process uses the control plane; the scheduler's decisions do not.
PROCESS_ROOM = "scheduler/process/"
# Which other folders of its component a folder may import; "": the files directly in the component's folder.
ROOMS: dict[str, set[str]] = {
    "scheduler/instance": {"", "cost"},
    "scheduler/core": {"", "cache", "policies", "cost", "instance"},
    "scheduler/cache": set(),
    "scheduler/policies": {"", "cost"},
    "scheduler/colocated": {"", "cost", "instance"},
    "scheduler/cost": {""},
}
LARGEST_FOLDER = 25
TORCH_ROOMS = (
    "engine/",
    "prefill_worker/",
    "decode_worker/",
    "rank_host/",
    "transfer/",
    "cluster/cli/doctor.py",
)
TRANSFORMERS_ROOMS = ("engine/", "gateway/dialects/response_template.py")  # there only for tokenizers that have one
RAY_ROOMS = (
    "cluster/",
    "gateway/serve/",
)
GRPC_ROOMS = (PROCESS_ROOM, "cluster/", "control/", "gateway/", "client/", "proto/", "src/alignedserve/grpc_poller.py")
HEAVY = ("torch", "transformers", "ray")


def sources() -> Iterator[tuple[str, Path]]:
    """`(component, file)` of everything that is installed, except generated code and test helpers."""
    for name in COMPONENTS:
        for file in sorted((ROOT / name).rglob("*.py")):
            yield name, file
    for file in sorted((ROOT / "src/alignedserve").rglob("*.py")):
        if "testing" not in file.parts:
            yield "shared", file


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports(file: Path) -> tuple[tuple[str, bool], ...]:
    """`(module, lazily)` of every import in a file; type-checking blocks count as lazy."""

    def walk(node: ast.AST, lazily: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazily) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file} has a relative import"
                module = child.module or ""
                if module in ("alignedserve", "alignedserve.proto"):
                    yield from ((f"{module}.{alias.name}", lazily) for alias in child.names)
                else:
                    yield module, lazily
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, lazily or inside or guarded)

    return tuple(walk(tree_of(file), False))


def component_of(module: str) -> str | None:
    """The component that a module of ours belongs to; None for other modules."""
    parts = module.split(".")
    if parts[0] != "alignedserve":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*COMPONENTS, "proto", "testing") else "shared"


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_imports_between_components_run_one_way() -> None:
    wrong = []
    for component, file in sources():
        extras = {"control", "proto"} if relative(file).startswith(PROCESS_ROOM) else set()
        allowed = {component, "shared", *ALLOWED[component], *extras}
        for module, lazily in imports(file):
            target = component_of(module)
            lazy_exception = component in ("control", "cluster") and lazily and target != "testing"
            if target is not None and target not in allowed and not lazy_exception:
                wrong.append(f"{relative(file)} imports {module}")
    assert not wrong, "\n".join(wrong)


def room_of(module: str, component: str) -> str:
    """The first folder below the component's own that holds the module; "" for files directly in it."""
    parts = module.split(".")[2:]
    return parts[0] if parts and (ROOT / component / parts[0]).is_dir() else ""


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_run_one_way(room: str) -> None:
    component, _, own = room.partition("/")
    wrong = [
        f"{relative(file)} imports {module}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for module, _ in imports(file)
        if component_of(module) == component and room_of(module, component) not in {own, *ROOMS[room]}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_can_be_read_at_a_glance() -> None:
    folders = {file.parent for component, file in sources() if component != "shared"}
    crowded = {relative(folder): count for folder in folders if (count := len([*folder.glob("*.py")])) > LARGEST_FOLDER}
    assert crowded == {}


@pytest.mark.parametrize(
    ("library", "rooms"),
    [("ray", RAY_ROOMS), ("torch", TORCH_ROOMS), ("transformers", TRANSFORMERS_ROOMS), ("grpc", GRPC_ROOMS)],
)
def test_heavy_libraries_are_imported_in_their_rooms_only(library: str, rooms: tuple[str, ...]) -> None:
    wrong = []
    for _, file in sources():
        place = relative(file)
        if place.startswith(rooms) or (library == "grpc" and place.endswith(("/actor.py", "_service.py"))):
            continue
        wrong += [f"{place} imports {module}" for module, _ in imports(file) if module.split(".")[0] == library]
    assert not wrong, "\n".join(wrong)


def test_what_ray_keeps_to_itself_is_used_in_one_file() -> None:
    private = re.compile(
        r"\bray(\.\w+)*\._\w+|\bfrom ray[\w.]* import .*\b_\w+|\bserve\.\w+\(.*\b_\w+=|serve\.delete,.* _\w+="
        r"|\._actor_id\b|\b_replica_impl\b|\b_global_node\b"
    )
    using = {relative(file) for _, file in sources() if private.search(file.read_text(encoding="utf-8"))}
    assert using == {"gateway/serve/ray_private.py"}


def test_nothing_is_unpickled() -> None:
    """A pickle can run any code of its sender, so no code of ours reads pickles."""
    modules = {"pickle", "cloudpickle", "_pickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
    calls = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}
    wrong = [
        f"{relative(file)} imports {module}"
        for _, file in sources()
        for module, _ in imports(file)
        if modules & set(module.split("."))
    ]
    for _, file in sources():
        for node in ast.walk(tree_of(file)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (module, name) in calls:
                    wrong.append(f"{relative(file)}:{node.lineno} calls {module}.{name}")
                case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                    wrong.append(f"{relative(file)}:{node.lineno} calls {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_but_tests_imports_the_test_helpers() -> None:
    assert not [
        relative(file) for _, file in sources() for module, _ in imports(file) if "testing" in module.split(".")
    ]


def loaded_by(code: str, names: tuple[str, ...]) -> str:
    """Which of the modules a process has imported after running this code."""
    code = f"{code}\nimport sys; print(*[name for name in {names!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    "module",
    [
        "alignedserve.kv_pool.actor",
        "alignedserve.scheduler.process.actor",
        "alignedserve.cluster.node.node_agent",
        "alignedserve.cluster.local",
        "alignedserve.cluster.cli.main",
        "alignedserve.gateway.server",
        "alignedserve.client",
    ],
)
def test_light_processes_come_up_without_heavy_libraries(module: str) -> None:
    assert loaded_by(f"import {module}", HEAVY) == ""


def test_a_scheduler_without_a_cost_model_does_not_load_numpy() -> None:
    code = """
import alignedserve.scheduler.process.actor
from alignedserve.config import Config
from alignedserve.scheduler.cost.prior import cost_model_factory
cost_model_factory(Config())()
"""
    assert loaded_by(code, (*HEAVY, "numpy")) == ""


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in a wheel built from a copy of the tree (a build writes beside its sources)."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file() and not name.startswith(("docs/", "benchmarks/", "tests/")):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(copy),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def expected_names() -> set[str]:
    """The files that a wheel must hold, according to the tree."""
    expected = set()
    for name in COMPONENTS:
        expected |= {f"alignedserve/{name}/{file.relative_to(ROOT / name)}" for file in (ROOT / name).rglob("*.py")}
    expected |= {f"alignedserve/scheduler/cost/data/{file.name}" for file in ROOT.glob("scheduler/cost/data/*.json")}
    static = ROOT / "gateway/live/static"
    page = (file.relative_to(ROOT) for file in static.rglob("*") if file.is_file())
    expected |= {f"alignedserve/{file.as_posix()}" for file in page}
    messages = ROOT / "proto/messages"
    expected |= {f"alignedserve/proto/{file.name}" for file in messages.iterdir() if file.suffix in (".py", ".pyi")}
    shared = ROOT / "src/alignedserve"
    for file in shared.rglob("*"):
        wanted = file.suffix == ".py" or file.name == "py.typed" or "models" in file.relative_to(shared).parts
        if file.is_file() and wanted and "__pycache__" not in file.parts:
            expected.add(f"alignedserve/{file.relative_to(shared)}")
    return expected


def test_the_wheel_holds_exactly_the_tree(wheel_names: set[str]) -> None:
    ours = {name for name in wheel_names if ".dist-info/" not in name}
    assert ours == expected_names()
    assert any(name.startswith("alignedserve/models/tiny/") and name.endswith(".safetensors") for name in ours)


def test_proto_has_no_init_and_the_other_components_have_one() -> None:
    assert not (ROOT / "proto/__init__.py").exists()
    folders = {file.parent for name in COMPONENTS for file in (ROOT / name).rglob("*.py")}
    assert not [relative(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_the_generated_code_is_current() -> None:
    """The committed modules match what the installed generator makes of the .proto files."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    files = sorted((ROOT / "proto").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "all.pb"
        includes = [f"-Ialignedserve/proto={ROOT / 'proto'}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        status = protoc.main(["protoc", *includes, f"--descriptor_set_out={result}", *map(str, files)])
        assert status == 0
        compiled = descriptor_pb2.FileDescriptorSet.FromString(result.read_bytes())
    assert {entry.name for entry in compiled.file} == {f"alignedserve/proto/{file.name}" for file in files}
    for entry in compiled.file:
        stem = Path(entry.name).stem
        module = importlib.import_module(f"alignedserve.proto.{stem}_pb2")
        committed = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(committed)
        assert without_json_names(committed) == without_json_names(entry), f"run tools/protoc.sh: {stem}.proto changed"


def without_json_names(file: object) -> str:
    """As text, without JSON names: the compiler writes them, but a loaded descriptor may omit them."""
    return "\n".join(line for line in str(file).splitlines() if "json_name" not in line)


def test_the_generated_code_needs_no_newer_libraries_than_the_ranges_allow() -> None:
    """The oldest allowed are protobuf 6.30 and grpcio 1.72.2. Code of a newer generator refuses older libraries."""
    messages = ROOT / "proto/messages"
    for file in messages.glob("*_pb2.py"):
        assert "Protobuf Python Version: 6.30" in file.read_text(encoding="utf-8"), file.name
    for file in messages.glob("*_pb2_grpc.py"):
        assert "GRPC_GENERATED_VERSION = '1.72.2'" in file.read_text(encoding="utf-8"), file.name
