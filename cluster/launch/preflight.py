"""Checks before any process is started, so that an error is reported at once, not after a minute of loading."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.records import read_records
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, check_gpus
from alignedserve.config import Config, GatewayConfig, SchedulerConfig
from alignedserve.control.tls import tls_files
from alignedserve.errors import ConfigError, ResourceError, UnsupportedModelError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.dialects.model_dialects import check_names
from alignedserve.geometry import require_degree
from alignedserve.memory import available_memory_bytes, describe_bytes
from alignedserve.model import SHIPPED_MODELS, resolve_model, unserved_generation_keys
from alignedserve.model_check import check_if_here, check_model_files, is_here
from alignedserve.ranks.plans import OWN_PLANS, require_packing
from alignedserve.scheduler.systems import unread
from alignedserve.sizing import GIB
from alignedserve.transformers_source import has_tensor_plan
from alignedserve.weights.files import read_json
from alignedserve.weights.shapes import expert_count, head_counts, layer_count, model_types


def check_model(config: Config) -> Path:
    """The model's folder, downloaded for a name on a hub. Raises ModelError if the model cannot be served."""
    folder = resolve_model(config.model.path, config.model.trust_remote_code)
    check_model_files(folder, config.model.trust_remote_code)
    template = config.model.chat_template
    if template and not Path(template).expanduser().is_file():
        raise ConfigError(f"model.chat_template: file {template} does not exist")
    check_names(config.model.tool_parser, config.model.reasoning_parser)
    check_ranks(config, folder)
    return folder


def check_ranks(config: Config, folder: Path) -> None:
    """Raises ConfigError, UnsupportedModelError if it cannot be shared out. Instances check what is unknown here."""
    degrees = [config.degrees(role) for role in MODEL_ROLES]
    if all(each.ranks == 1 for each in degrees):
        return
    shape = read_json(folder / "config.json")
    kinds = model_types(shape)
    planned = "auto_map" in shape or any(kind in OWN_PLANS or has_tensor_plan(kind) for kind in kinds)
    heads, layers, experts = head_counts(shape), layer_count(shape), expert_count(shape)
    for role, each in zip(MODEL_ROLES, degrees, strict=True):
        if each.tensor > 1 and not planned:
            raise UnsupportedModelError(
                f"model_type {shape.get('model_type')!r} has no plan for tensor parallel ranks; "
                "share it by layers instead: --prefill-pp, --decode-pp"
            )
        if each.tensor > 1:
            require_packing(shape.get("model_type", ""), shape.get("multi_query"))
        try:
            each.require_kind()
            if experts is not None:
                each.require_experts(config.served_model_name, experts)
            if heads is not None:
                require_degree(config.served_model_name, *heads, each.tensor)
            if layers is not None:
                each.require_layers(config.served_model_name, layers)
        except ConfigError as error:
            raise ConfigError(f"{role} instances: {error.message}") from None


def check_model_if_here(config: Config) -> None:
    """Like `check_model`, if this machine has the model folder. Only the nodes of the instances must have it.

    Raises ModelError, and ConfigError for ranks that cannot share it.
    """
    for role in MODEL_ROLES:
        config.degrees(role).require_kind()
    if config.model.path in SHIPPED_MODELS:
        check_ranks(config, resolve_model(config.model.path))
    folder = Path(os.path.expanduser(config.model.path))
    if folder.is_absolute():  # otherwise it is a name, or relative to an instance's folder
        check_if_here(folder, config.model.trust_remote_code)
        if is_here(folder / "config.json"):
            check_ranks(config, folder)


def check_cost_model(config: Config) -> None:
    """Raises ConfigError if a cost model is configured and cannot be read."""
    if config.scheduler.cost_model:
        from alignedserve.scheduler.cost.load import configured_cost  # imports numpy, which is not needed otherwise

        configured_cost(config.scheduler)


def cost_model_note(config: Config) -> str:
    """A note if the cost model was measured with other degrees than the instances have; "" if not."""
    if not config.scheduler.cost_model:
        return ""
    from alignedserve.scheduler.cost.load import shared_cost

    cost = shared_cost(config.scheduler)
    source: Any = {} if cost is None else cost.describe().get("source", {})
    measured: Any = source.get("degrees")
    if not isinstance(measured, dict):
        return ""
    here = {role: config.degrees(role) for role in MODEL_ROLES}
    other = [role for role, degrees in here.items() if measured.get(role) != asdict(degrees)]
    if not other:
        return ""
    return (
        f"note: the cost model was measured with other ranks in {' and '.join(other)} instances than this cluster has: "
        "give `alignedserve profile` the same flags (--decode-tp …)"
    )


def policy_note(config: Config) -> str:
    """A note for each setting that the policy lacks to work well, or does not read; "" if there is none."""
    settings, defaults = config.scheduler, SchedulerConfig()
    notes = []
    for name, reader in unread(settings).items():
        key = name.removeprefix("scheduler.")
        if getattr(settings, key) != getattr(defaults, key):
            notes.append(f"note: {name} has no effect with policy {settings.policy}: {reader}")
    if settings.policy != "aligned-cost":
        return "\n".join(notes)
    if not settings.cost_model:
        notes.append(
            "note: policy aligned-cost without --cost-model uses a linear model that it learns while serving: it knows "
            "how many bytes a batch reads, but not the cost of unequal prefix lengths (`alignedserve profile` measures "
            "it)"
        )
    if not settings.tpot_objective_s:
        notes.append(
            "note: policy aligned-cost without --tpot-objective: tokens of single requests may come much later than "
            "with aligned (docs/policies.md)"
        )
    return "\n".join(notes)


def model_note(folder: Path) -> str:
    """A note about settings of the model's generation_config.json that are not applied; "" if there are none."""
    try:
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    keys = unserved_generation_keys(generation) if isinstance(generation, dict) else []
    return f"note: generation_config.json sets {', '.join(keys)}, which is not applied here" if keys else ""


def check_api_keys(config: Config) -> None:
    """Raises ConfigError if a file of API keys is configured and cannot be used."""
    ApiKeys(config.gateway.api_key_file)


def check_request_log(config: Config) -> None:
    """Raises ConfigError if a request log is configured and cannot be appended to."""
    if config.gateway.request_log:
        from alignedserve.gateway.request_log import open_log

        os.close(open_log(Path(config.gateway.request_log).expanduser()))


def check_batches(config: Config) -> None:
    """Raises ConfigError if a folder for batches is configured and cannot be used."""
    if config.batches.folder:
        from alignedserve.gateway.batches.database import Database

        Database(config.batches.folder, shared=config.batches.shared).close()


def check_pinned_prompts(config: Config) -> None:
    """Raises ConfigError if a file of prompts to pin is configured and cannot be used."""
    if config.kv_pool.pinned_prompts:
        from alignedserve.gateway.pinning.keeper import read_beginnings

        read_beginnings(config.kv_pool.pinned_prompts)


def open_door_note(gateway: GatewayConfig) -> str:
    """A warning if other machines can use this server without an API key; "" otherwise."""
    if gateway.api_key_file or _is_loopback(gateway.host):
        return ""
    return (
        f"warning: {gateway.host or 'every address'} is reachable from other machines, and there is no --api-key-file: "
        f"anyone who can reach port {gateway.port} or {gateway.grpc_port} may use this server"
    )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def check_machine(config: Config) -> None:
    """Check memory, GPUs and folders of this machine. Raises ResourceError or ConfigError."""
    check_gpus(config, count_gpus())
    available = available_memory_bytes()
    wanted = int(config.kv_pool.size_gib * GIB)
    if wanted > available:
        raise ResourceError(
            f"kv_pool.size_gib is {describe_bytes(wanted)}, but only {describe_bytes(available)} of memory is "
            "available; lower it"
        )
    if config.log.dir:
        try:
            Path(config.log.dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"log.dir: {config.log.dir} cannot be created: {error.strerror}") from error
        if not os.access(config.log.dir, os.W_OK):
            raise ConfigError(f"log.dir: {config.log.dir} cannot be written to")


def check_tls() -> None:
    """Raises ConfigError if traffic between processes must be encrypted, and the TLS files cannot be used."""
    tls_files()


def check_channel(config: Config) -> str:
    """A warning if a pair must use a slower channel than configured, as allowed; "" otherwise. Raises ResourceError."""
    if config.cluster.channel == "auto":
        return ""
    from alignedserve.cluster.cli.doctor_channels import check_pairs  # imports numpy, which is not needed otherwise

    return check_pairs(config)


def check_ports(config: Config) -> None:
    """Raises ResourceError, which names every port in use and this user's cluster that uses it."""
    gateway = config.gateway
    if gateway.port == gateway.grpc_port:
        raise ConfigError(f"gateway.port and gateway.grpc_port must differ, both are {gateway.port}")
    ports = {"HTTP port (--port)": gateway.port, "gRPC port (--grpc-port)": gateway.grpc_port}
    taken = [f"{what} {port}" for what, port in ports.items() if _is_taken(what, gateway.host, port)]
    if not taken:
        return
    verb, other = ("is", "another") if len(taken) == 1 else ("are", "others")
    whose = ""
    if own := next((record.url for record in read_records() if urlsplit(record.url).port == gateway.port), None):
        whose = f", by a cluster of yours (`alignedserve stop --url {own}` ends it)"
    raise ResourceError(f"{' and '.join(taken)} on {gateway.host} {verb} in use{whose}; choose {other}")


def _is_taken(what: str, host: str, port: int) -> bool:
    """Whether the port is in use. Raises ConfigError if it cannot be used for another reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"gateway.host: {host!r} is not an address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a listening port is still detected
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise ConfigError(f"{what} {port} on {host} cannot be used: {error.strerror}") from error
    return False
