"""Models and devices by name: shapes from config.json files, figures from vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from alignedserve.scheduler.cost.parts import ModelShape

GIB = 1 << 30

# By the last part of the model's name, lower case: layers, heads, KV heads, head width.
KNOWN_SHAPES: dict[str, ModelShape] = {
    "llama-2-7b": ModelShape(32, 32, 32, 128, vocab=32000),
    "llama-2-13b": ModelShape(40, 40, 40, 128, vocab=32000),
    "llama-2-70b": ModelShape(80, 64, 8, 128, vocab=32000),
    "llama-3-8b": ModelShape(32, 32, 8, 128, vocab=128256),
    "llama-3-70b": ModelShape(80, 64, 8, 128, vocab=128256),
    "llama-3.1-8b": ModelShape(32, 32, 8, 128, vocab=128256),
    "llama-3.1-70b": ModelShape(80, 64, 8, 128, vocab=128256),
    "llama-3.1-405b": ModelShape(126, 128, 8, 128, vocab=128256),
    "llama-3.2-1b": ModelShape(16, 32, 8, 64, vocab=128256),
    "llama-3.2-3b": ModelShape(28, 24, 8, 128, vocab=128256),
    "llama-3.3-70b": ModelShape(80, 64, 8, 128, vocab=128256),
    "mistral-7b": ModelShape(32, 32, 8, 128, vocab=32768),
    "qwen2.5-7b": ModelShape(28, 28, 4, 128, vocab=152064),
    "qwen2.5-14b": ModelShape(48, 40, 8, 128, vocab=152064),
    "qwen2.5-32b": ModelShape(64, 40, 8, 128, vocab=152064),
    "qwen2.5-72b": ModelShape(80, 64, 8, 128, vocab=152064),
    "qwen3-0.6b": ModelShape(28, 16, 8, 128, hidden=1024, vocab=151936),
    "qwen3-1.7b": ModelShape(28, 16, 8, 128, vocab=151936),
    "qwen3-4b": ModelShape(36, 32, 8, 128, hidden=2560, vocab=151936),
    "qwen3-8b": ModelShape(36, 32, 8, 128, vocab=151936),
    "qwen3-14b": ModelShape(40, 40, 8, 128, vocab=151936),
    "qwen3-32b": ModelShape(64, 64, 8, 128, hidden=5120, vocab=151936),
    "qwen3-30b-a3b": ModelShape(48, 32, 4, 128, hidden=2048, vocab=151936),
    "qwen3-235b-a22b": ModelShape(94, 64, 4, 128, hidden=4096, vocab=151936),
    "opt-1.3b": ModelShape(24, 32, 32, 64, vocab=50272),
    "opt-2.7b": ModelShape(32, 32, 32, 80, vocab=50272),
    "opt-6.7b": ModelShape(32, 32, 32, 128, vocab=50272),
    "opt-13b": ModelShape(40, 40, 40, 128, vocab=50272),
    "opt-30b": ModelShape(48, 56, 56, 128, vocab=50272),
    "opt-66b": ModelShape(64, 72, 72, 128, vocab=50272),
    "opt-175b": ModelShape(96, 96, 96, 128, vocab=50272),
}
_VARIANTS = re.compile(r"(-(instruct|chat|base|hf|it|v\d+(\.\d+)*|\d{4}))+$")  # suffixes of names with the same shape
_MEMORY = re.compile(r"(?<!\d)(\d+) ?gb\b")
_BILLIONS = re.compile(r"(?<![a-z0-9.])(\d+(\.\d+)?)b(?![a-z0-9])")
_MIXTURE = re.compile(r"moe|mixtral|(?<![a-z0-9])\d+x\d+b|-a\d+(\.\d+)?b(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Device:
    """`sms`: streaming multiprocessors. `link`: bytes/s to a peer, in each direction (NVLink, else PCIe)."""

    sms: int
    memory_gib: int
    link: float


# By a part of the device's name; the first match counts.
KNOWN_DEVICES: dict[str, Device] = {
    "rtx pro 6000": Device(188, 96, 64e9),
    "b200": Device(148, 180, 900e9),
    "h100": Device(132, 80, 450e9),
    "h200": Device(132, 141, 450e9),
    "a100": Device(108, 80, 300e9),
    "l40s": Device(142, 48, 32e9),
    "l40": Device(142, 48, 32e9),
    "l4": Device(58, 24, 32e9),
    "rtx 5090": Device(170, 32, 64e9),
    "rtx 4090": Device(128, 24, 32e9),
    "rtx 3090": Device(82, 24, 32e9),
    "a6000": Device(84, 48, 32e9),
    "a40": Device(84, 48, 32e9),
    "a30": Device(56, 24, 32e9),
    "a10": Device(72, 24, 32e9),
    "v100": Device(80, 32, 150e9),
}


def known_shape(model: str) -> ModelShape | None:
    """The shape of `ORGANISATION/NAME` in any variant; None if it is not known."""
    name = model.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    return KNOWN_SHAPES.get(_VARIANTS.sub("", name))


def known_device(device: str) -> Device | None:
    """The device of that name, with the memory that the name tells (`A100-SXM4-40GB`); None if it is not known."""
    lower = device.lower()
    known = next((known for name, known in KNOWN_DEVICES.items() if name in lower), None)
    told = _MEMORY.search(lower)
    if known is None or told is None:
        return known
    return replace(known, memory_gib=min(known.memory_gib, int(told[1])))  # `GH200 480GB` tells the host's memory


def is_mixture(model: str, architecture: str = "") -> bool:
    """Whether the names tell a mixture of experts: `qwen3_moe`, `Qwen3-30B-A3B`, `Mixtral-8x7B`."""
    return bool(_MIXTURE.search(model.rsplit("/", 1)[-1].lower()) or _MIXTURE.search(architecture.lower()))


def weight_bytes(model: str, itemsize: int = 2) -> int:
    """Bytes of a model's weights by the billions in its name (`-30b-a3b`: 30); 0 if it names none."""
    found = _BILLIONS.search(model.rsplit("/", 1)[-1].lower())
    return int(float(found[1]) * 1e9) * itemsize if found else 0
