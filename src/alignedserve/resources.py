"""Ray's resources as configuration keys name them: "prefill_node=1,memory=4e9"."""

from __future__ import annotations

from alignedserve.errors import ConfigError


def parse_resources(text: str, key: str) -> dict[str, float]:
    """Amounts by name; none for an empty text. Raises ConfigError, naming the key, where it cannot be read."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, amount = (word.strip() for word in part.partition("="))
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if not name or not separator or not 0.0 < value < float("inf"):
            raise ConfigError(f"{key}: {part!r} is not NAME=AMOUNT with an amount over 0, as in prefill_node=1,x=0.5")
        if name == "GPU":
            raise ConfigError(f"{key}: instances ask for GPUs by themselves (cluster.device, cluster.share_gpu)")
        if name in found:
            raise ConfigError(f"{key}: {name} is there twice")
        if value > 1.0 and not value.is_integer():
            raise ConfigError(f"{key}: Ray knows no fractions of resources over 1; got {part}")
        found[name] = value
    return found
