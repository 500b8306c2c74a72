"""What can be found out before anything is started: it is said in one line then, not after a minute of loading."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.records import read_records
from alignedserve.cluster.supervisor.plan import check_gpus
from alignedserve.config import Config, GatewayConfig
from alignedserve.control.tls import tls_files
from alignedserve.errors import ConfigError, ResourceError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.memory import available_memory_bytes, describe_bytes
from alignedserve.model import resolve_model, unserved_generation_keys
from alignedserve.model_check import check_if_here, check_model_files
from alignedserve.sizing import GIB


def check_model(config: Config) -> Path:
    """The model's folder (fetched, for a name on a hub). Raises ModelError where it cannot be served."""
    folder = resolve_model(config.model.path, config.model.trust_remote_code)
    check_model_files(folder, config.model.trust_remote_code)
    template = config.model.chat_template
    if template and not Path(template).expanduser().is_file():
        raise ConfigError(f"model.chat_template: there is no file {template}")
    return folder


def check_model_if_here(config: Config) -> None:
    """What `check_model` finds of a folder that is on this machine, too; the instances' may have it alone.

    Raises ModelError.
    """
    folder = Path(os.path.expanduser(config.model.path))
    if folder.is_absolute():  # else it is a name, or begins where an instance runs
        check_if_here(folder, config.model.trust_remote_code)


def check_cost_model(config: Config) -> None:
    """Raises ConfigError where there is to be a measured cost, and it cannot be read."""
    if config.scheduler.cost_model:
        from alignedserve.scheduler.cost.load import configured_cost  # and numpy, which a start without does not need

        configured_cost(config.scheduler)


def policy_note(config: Config) -> str:
    """What the policy would need to do better, a line each; "" where it has all."""
    settings = config.scheduler
    if settings.policy != "aligned-cost":
        return ""
    notes = []
    if not settings.cost_model:
        notes.append(
            "note: policy aligned-cost without --cost-model goes by a linear model that is learnt as it serves: it "
            "knows how many bytes a batch reads, but not what unequal lengths cost (`alignedserve profile` measures "
            "that)"
        )
    if not settings.tpot_objective_s:
        notes.append(
            "note: policy aligned-cost without --tpot-objective serves a backlog for throughput alone: tokens of "
            "single requests may come much later than with aligned (docs/policies.md)"
        )
    return "\n".join(notes)


def model_note(folder: Path) -> str:
    """What of the model's own wishes is not followed; "" where all are."""
    try:
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    keys = unserved_generation_keys(generation) if isinstance(generation, dict) else []
    return f"note: generation_config.json sets {', '.join(keys)}, which is not applied here" if keys else ""


def check_api_keys(config: Config) -> None:
    """Raises ConfigError where there is to be a file of API keys, and it cannot be used."""
    ApiKeys(config.gateway.api_key_file)


def check_request_log(config: Config) -> None:
    """Raises ConfigError where there is to be a request log, and it cannot be appended to."""
    if config.gateway.request_log:
        from alignedserve.gateway.request_log import open_log

        os.close(open_log(Path(config.gateway.request_log).expanduser()))


def open_door_note(gateway: GatewayConfig) -> str:
    """That anybody may use this server, where that is so; "" otherwise."""
    if gateway.api_key_file or _is_loopback(gateway.host):
        return ""
    return (
        f"warning: {gateway.host or 'every address'} is open to others, and there is no --api-key-file: anybody who "
        f"reaches port {gateway.port} or {gateway.grpc_port} may use this server"
    )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def check_machine(config: Config) -> None:
    """Memory, GPUs and folders of this machine. Raises ResourceError or ConfigError."""
    check_gpus(config, count_gpus())
    available = available_memory_bytes()
    wanted = int(config.kv_pool.size_gib * GIB)
    if wanted > available:
        raise ResourceError(
            f"kv_pool.size_gib asks for {describe_bytes(wanted)}, but only {describe_bytes(available)} of memory are "
            "available; ask for less"
        )
    if config.log.dir:
        try:
            Path(config.log.dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"log.dir: {config.log.dir} cannot be made: {error.strerror}") from error
        if not os.access(config.log.dir, os.W_OK):
            raise ConfigError(f"log.dir: {config.log.dir} cannot be written to")


def check_tls() -> None:
    """Raises ConfigError where traffic between processes is to be encrypted, and cannot be."""
    tls_files()


def check_channel(config: Config) -> str:
    """A line for a pair that gets the next best channel, as was allowed; "" else. Raises ResourceError."""
    if config.cluster.channel == "auto":
        return ""
    from alignedserve.cluster.cli.doctor_channels import check_pairs  # and numpy, which a start without does not need

    return check_pairs(config)


def check_ports(config: Config) -> None:
    """Raises ResourceError that names every port that is taken, and the cluster of this user that has them."""
    gateway = config.gateway
    if gateway.port == gateway.grpc_port:
        raise ConfigError(f"gateway.port and gateway.grpc_port are both {gateway.port}")
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
    """Raises ConfigError where the port cannot be used for another reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"gateway.host: {host!r} is no address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a listener still shows
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise ConfigError(f"{what} {port} on {host} cannot be used: {error.strerror}") from error
    return False
