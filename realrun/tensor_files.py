"""Tensors in safetensors files, written whole or not at all."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specsim.io.files import replacing, scratch_folder

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
            save_file(whole, written, metadata=dict(metadata))
        except SafetensorError as error:
            if number := OS_ERROR.search(str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
            raise
        written.chmod(stat.S_IMODE(temporary.stat().st_mode))  # safetensors' files are the owner's alone
        os.replace(written, temporary)
