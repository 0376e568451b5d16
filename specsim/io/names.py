"""Names of models, GPUs, drafters, engines and formats as people write them.

Capitals and separators do not matter, and makers' words are left out; what else people write stands in `ALIASES`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from specsim.io.errors import InputError

Kind = Literal["model", "GPU", "drafter", "engine", "weight format"]

MAKERS = re.compile(r"\b(nvidia|geforce|amd|instinct|apple)\b")
# By plain name: the name that tables have.
ALIASES: dict[Kind, dict[str, str]] = {
    "model": {
        "llama4scout17b16e": "llama-4-scout",
        "llama4maverick17b128e": "llama-4-maverick",
    },
    "GPU": {
        # as nvidia-smi prints them
        "a100sxm480gb": "a100", "a100sxm440gb": "a100-40gb", "a800sxm480gb": "a800", "h10080gbhbm3": "h100",
        "rtxa6000": "a6000", "rtxpro6000blackwellworkstationedition": "rtx-pro-6000",
        "a10080gbpcie": "a100-pcie", "a100pcie80gb": "a100-pcie", "teslat4": "t4",
        "rtx6000adageneration": "rtx-6000-ada", "rtxpro6000blackwellserveredition": "rtx-pro-6000-server",
        # as people shorten them
        "a10040": "a100-40gb", "rtxpro6000serveredition": "rtx-pro-6000-server", "a100pcie40": "a100-pcie-40gb",
        "a10080gb": "a100", "a100sxm": "a100", "a100sxm4": "a100", "a100sxm40gb": "a100-40gb", "a100sxm80gb": "a100",
        "h10080gb": "h100", "h100sxm": "h100", "h100sxm5": "h100", "h100sxm80gb": "h100", "h100sxm580gb": "h100",
        "h100pcie80gb": "h100-pcie", "h10080gbpcie": "h100-pcie", "h200sxm": "h200", "h200141gb": "h200",
        "h2096gb": "h20", "h20sxm": "h20", "b200sxm": "b200", "b300sxm": "b300", "gb200nvl72": "gb200",
        "gb300nvl72": "gb300", "3090": "rtx-3090", "4090": "rtx-4090", "5090": "rtx-5090",
        "rtxpro6000blackwell": "rtx-pro-6000", "rtx6000pro": "rtx-pro-6000", "pro6000": "rtx-pro-6000",
        "dgxspark": "gb10", "gh200480gb": "gh200", "gh20096gb": "gh200",
        "gh200gracehoppersuperchip": "gh200", "teslav100": "v100", "v10032gb": "v100", "teslav100sxm232gb": "v100",
        "b60": "arc-pro-b60", "b70": "arc-pro-b70", "intelarcprob60": "arc-pro-b60", "intelarcprob70": "arc-pro-b70",
        "intelrarctmprob60graphics": "arc-pro-b60", "intelrarctmprob70graphics": "arc-pro-b70",
        "ascend910b2": "ascend-910b", "910b": "ascend-910b", "910b2": "ascend-910b",
        "huaweiascend910b": "ascend-910b", "910c": "ascend-910c", "huaweiascend910c": "ascend-910c",
        "ryzenaimax395": "strix-halo", "radeon8060s": "strix-halo",
    },
    "drafter": {
        "ngram": "prompt-lookup", "lookup": "prompt-lookup", "promptlookupdecoding": "prompt-lookup",
        "nextn": "mtp", "draftmtp": "mtp", "drafteagle3": "eagle3", "eagle1": "eagle", "eagle2": "eagle",
    },
    "engine": {
        "llamaserver": "llamacpp", "trtllm": "tensorrt-llm",
        "trt": "tensorrt-llm", "tensorrt": "tensorrt-llm", "hf": "transformers", "huggingface": "transformers",
        "onnxruntime": "onnxruntime-genai", "mlxlm": "mlx", "openvinogenai": "openvino",
    },
    "weight format": {
        "fp8": "float8", "f8": "float8", "e4m3": "float8", "fp8e4m3": "float8", "bf16": "bfloat16", "fp16": "float16",
        "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32", "awq": "int4", "gptq": "int4",
        "w4a16": "int4", "4bit": "int4", "nf4": "int4", "w8a16": "int8", "w8a8": "int8", "8bit": "int8",
        "q4k": "q4_k_m", "q3k": "q3_k_m", "q5k": "q5_k_m",
        "fp8e5m2": "float8", "e5m2": "float8", "udq4kxl": "q4_k_xl", "udq2kxl": "q2_k_xl", "udq3kxl": "q3_k_xl",
    },
}  # fmt: skip
FEW, NEAREST = 7, 3  # most known names that an error lists whole, and how many of more


def plain(name: str) -> str:
    """Write a name in lower case, without separators and makers.

    >>> plain("NVIDIA GeForce RTX 4090") == plain("rtx4090")
    True
    """
    return re.sub(r"[^a-z0-9]", "", MAKERS.sub("", name.casefold()))


def find_name(kind: Kind, name: str, known: Iterable[str]) -> str | None:
    """The known name that a person means by `name`; None for another.

    >>> find_name("engine", "TensorRT_LLM", ["vllm", "tensorrt-llm"])
    'tensorrt-llm'
    """
    by_plain = {plain(each): each for each in known}
    written = plain(name)
    return by_plain.get(written) or by_plain.get(plain(ALIASES[kind].get(written, "")))


def nearest_names(name: str, known: Sequence[str]) -> str:
    """What an error says of the known names: all of a few, else the nearest ones."""
    if len(known) <= FEW:
        return f"choose one of {', '.join(known)}"

    def likeness(each: str) -> float:
        return difflib.SequenceMatcher(None, plain(name), plain(each)).ratio()

    return f"nearest: {', '.join(sorted(known, key=likeness, reverse=True)[:NEAREST])}"


def known_name(kind: Kind, name: str, known: Sequence[str], *, where: str = "", other: str = "") -> str:
    """The known name that a person means; InputError with the nearest ones for another.

    where : what a name is for, such as "for costs on a GPU"
    other : what to do with a name that is right but not known
    """
    found = find_name(kind, name, known)
    if found is None:
        what = " ".join(filter(None, (f"unknown {kind} {name!r}", where)))
        of_owner = re.sub(r"^.*/(?=.)", "", name)  # of a hub id, the model's name alone
        raise InputError("; ".join(filter(None, (what, nearest_names(of_owner, known), other))))
    return found
