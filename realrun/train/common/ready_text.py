"""Training text as a single file, so that several trainings read the very same tokens and write none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from realrun.train.common.distill import TrainingText
from specsim.io.errors import InputError
from specsim.io.files import replacing


def save_text(text: TrainingText, path: Path) -> None:
    """Write token arrays, their shares and the facts to a .npz file, atomically."""
    arrays: dict[str, Any] = {f"source_{number}": tokens for number, (tokens, _) in enumerate(text.sources)}
    shares = np.array([share for _, share in text.sources])
    content = io.BytesIO()  # written to a file itself, numpy would not say why a write fails
    np.savez(content, shares=shares, held_out=text.held_out, facts=np.array(json.dumps(text.facts)), **arrays)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())


def read_text(path: Path) -> TrainingText:
    """Read what `save_text` wrote; InputError if it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            sources = [(file[f"source_{number}"], float(share)) for number, share in enumerate(file["shares"])]
            return TrainingText(sources, file["held_out"], json.loads(str(file["facts"])))
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--text {path} is no training text ({reason:.200}); give a folder, or make it again"
        ) from None
