"""Parses Ray resources in configuration keys: "prefill_node=1,memory=4e9"."""

from __future__ import annotations

from alignedserve.errors import ConfigError


def parse_resources(text: str, key: str) -> dict[str, float]:
    """Amounts by resource name; empty for an empty text. Raises ConfigError, which names the key, if it is invalid."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, amount = (word.strip() for word in part.partition("="))
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if not name or not separator or not 0.0 < value < float("inf"):
            raise ConfigError(f"{key}: {part!r} must be NAME=AMOUNT with an amount over 0, as in prefill_node=1,x=0.5")
        if name == "GPU":
            raise ConfigError(
                f"{key}: GPU is not allowed here, instances get GPUs by cluster.device and cluster.share_gpu"
            )
        if name in found:
            raise ConfigError(f"{key}: {name} is given twice")
        if value > 1.0 and not value.is_integer():
            raise ConfigError(f"{key}: Ray allows no fractional amounts over 1; got {part}")
        found[name] = value
    return found
