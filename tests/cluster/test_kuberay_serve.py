"""The Serve configurations inside the RayServices serve on Ray, deployed as KubeRay's operator deploys them."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.model import resolve_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support import kuberay, namespaces, rayservice
from support.requirements import needs

pytestmark = [
    pytest.mark.cluster,
    needs(namespaces.why_not()),
    pytest.mark.timeout(420),
]

LENGTHS = (20, 1, 40, 300)
NEW_TOKENS = 24
VOCABULARY = 2048
KEY = "sk-of-a-test"


def probed_paths(variant: str) -> tuple[str, ...]:
    """`:PORT/PATH` of every probe of the Ray pods."""
    found = set()
    for pods in kuberay.ray_pods(variant):
        ports = {port["name"]: port["containerPort"] for port in pods.container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            get = pods.container[probe]["httpGet"]
            found.add(f":{ports[get['port']]}{get['path']}")
    return tuple(sorted(found))


@pytest.mark.slow
@pytest.mark.parametrize("variant", kuberay.VARIANTS)
def test_the_configuration_of_a_ray_service_serves_exact_tokens(variant: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    workers = [pods for pods in kuberay.ray_pods(variant) if not pods.is_head]
    config = kuberay.on_this_machine(variant, keys)
    (application,) = config["applications"]
    prompts = random_prompts(LENGTHS, VOCABULARY, seed=31)

    seen = rayservice.deploy(
        rayservice.Deployment(
            serve_config=config,
            environment=kuberay.environment_here(variant),
            resources={name: amount for pods in workers for name, amount in pods.resources.items() if name != "GPU"},
            prompts=prompts,
            new_tokens=NEW_TOKENS,
            model=application["args"]["model"].get("served_name", "tiny"),
            api_key=KEY,
            paths=probed_paths(variant),
        ),
        timeout_s=400.0,
    )

    reference = load_reference(resolve_model("tiny"))
    expected = [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
    assert seen.tokens == expected
    assert seen.grpc_tokens == expected[0]
    assert seen.applications == {application["name"]: "RUNNING"}
    assert seen.refused == 401
    assert set(seen.statuses) == set(probed_paths(variant))
    assert set(seen.statuses.values()) == {200}
    assert seen.idle == "http://127.0.0.1:8000: no request is open\n"
    if variant == "cpu":
        assert seen.resident_mib * (1 << 20) < workers[0].memory_bytes
