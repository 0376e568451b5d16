"""Tensors in safetensors files, written whole or not at all.

The header lists the tensors, so that a reader can tell a lost tensor from one that was left out on purpose: a drafter
without a head uses the target's.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file

from specsim.io.errors import InputError
from specsim.io.files import replacing, scratch_folder
from specsim.io.json import parse_json

NAMES = "tensors"  # in the header: a JSON list of their names

# What torch, safetensors and transformers raise for files and configurations of others, beside InputError.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError, struct.error, UnpicklingError, SafetensorError, StrictDataclassError,
)  # fmt: skip
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in what safetensors says of a disk


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, from any device, and text for the header; a full disk is an OSError as elsewhere."""
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with (
        replacing(path) as temporary,
        # safetensors writes to a temporary file of its own, which a kill would leave beside the file for good
        scratch_folder(temporary.with_name(path.name)) as folder,
    ):
        written = folder / path.name
        try:
            save_file(whole, written, metadata={**metadata, NAMES: json.dumps(sorted(whole))})
        except SafetensorError as error:
            if number := OS_ERROR.search(str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
            raise
        written.chmod(stat.S_IMODE(temporary.stat().st_mode))  # safetensors' files are the owner's alone
        os.replace(written, temporary)


def check_names(path: Path, metadata: Mapping[str, str], names: Collection[str], advice: str) -> None:
    """Raise InputError if a file does not hold the tensors that its header lists; older files list none."""
    if NAMES not in metadata:
        return
    listed = parse_json(metadata[NAMES], f"{path}: its list of tensors", list[str], invalid=advice)
    lacks, has = sorted({*listed} - {*names}), sorted({*names} - {*listed})
    if lacks or has:
        faults = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(has)} too"] * bool(has)
        raise InputError(f"{path} {' and '.join(faults)}; {advice}")
