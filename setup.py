"""Maps the top-level component folders to subpackages of `alignedserve` (metadata is in pyproject.toml)."""

import sys

from setuptools import find_packages, setup

if not sys.platform.startswith("linux"):
    sys.exit(
        f"AlignedServe runs on Linux only (this is {sys.platform!r}): it needs memfd_create, pidfd and SCM_RIGHTS. "
        "Use a Linux machine, a container or WSL 2."
    )

COMPONENTS = {
    "client": "client",
    "cluster": "cluster",
    "control": "control",
    "decode_worker": "decode_worker",
    "engine": "engine",
    "gateway": "gateway",
    "kv_pool": "kv_pool",
    "prefill_worker": "prefill_worker",
    "proto": "proto/messages",
    "rank_host": "rank_host",
    "scheduler": "scheduler",
    "simulator": "simulator",
    "transfer": "transfer",
}


def component_packages() -> list[str]:
    """Every package that is installed from a component folder."""
    packages = []
    for name, folder in COMPONENTS.items():
        packages.append(f"alignedserve.{name}")
        packages += [f"alignedserve.{name}.{sub}" for sub in find_packages(folder)]
    return packages


def own_packages() -> list[str]:
    """`alignedserve` and the packages below src/alignedserve."""
    return ["alignedserve", *(f"alignedserve.{sub}" for sub in find_packages("src/alignedserve"))]


setup(
    packages=[*own_packages(), *component_packages()],
    package_dir={
        "alignedserve": "src/alignedserve",
        **{f"alignedserve.{name}": folder for name, folder in COMPONENTS.items()},
    },
    package_data={
        "alignedserve": ["py.typed", "models/*/*"],
        "alignedserve.proto": ["*.pyi"],
        "alignedserve.gateway.live": ["static/*", "static/vendor/*"],
        "alignedserve.scheduler.cost": ["data/*.json"],
    },
)
