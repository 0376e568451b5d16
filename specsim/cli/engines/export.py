"""`specsim export`: settings for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specsim.cli.command import Answer
from specsim.cli.console import check_new, parse_settings
from specsim.cli.options import OVERWRITE_FILE_HELP, SET_HELP
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Settings):
    """Settings of the engine's flags, as `export_flags` takes them."""

    engine: str = argument("vllm, sglang, llamacpp, llamacpp-2025 (older option names), tensorrt-llm or transformers.")
    k: int | None = setting(None, "Draft tokens per round; 0: no speculation.", low=0, high=255)
    schedule: str | None = setting(None, "K by batch size instead of --k, such as 1:5,4:3,16:0.", metavar="BATCH:K,...")
    policy: str | None = setting(None, "In place of --k: fixed_k, llama_cpp (llamacpp) or a tree of eagle2 (sglang).")
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")
    largest_batch: int = setting(512, "Largest batch size of a schedule (vLLM).", low=1, high=4096)
    p_min: float | None = setting(
        None, "With --k: end drafts before a less probable token (llamacpp, transformers).", low=0, high=1
    )
    min_ngram: int | None = setting(None, "With --k: use prompt lookup, by n-grams of at least N tokens (vllm).", low=1)
    max_ngram: int | None = setting(
        None,
        "With --k: the longest n-grams to look up (vllm, transformers). Default: the engine's.",
        low=1,
    )
    acceptance: Path | None = setting(
        None,
        "With --k: make the engine accept as often as this source, without a trained drafter. A file written by "
        "`specsim import` (vllm, sglang, llamacpp, tensorrt-llm).",
    )


@dataclass(frozen=True, kw_only=True)
class ExportFile(Settings):
    """Where the engine's file is written."""

    out: Path | None = setting(None, "Where to write the engine's config file.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def export(options: EngineOptions, file: ExportFile) -> Answer:
    """Print engine flags, write its config file.

    Example: specsim export vllm --schedule 1:5,4:3,16:0
    """
    from specsim.engines.export import export_flags
    from specsim.io.files import write_text
    from specsim.policy.registry import make_policy

    if file.out is not None:
        check_new(file.out, overwrite=file.overwrite)
    given = dict(vars(options))
    settings = parse_settings(given.pop("set_"))
    if options.policy is not None:
        given["policy"] = make_policy(options.policy, settings)
    elif settings:
        raise InputError("--set belongs to --policy; give both")
    exported = export_flags(**given, path=None if file.out is None else str(file.out))
    if file.out is not None:
        if exported.file is None:
            raise InputError(f"{options.engine} needs no file for {exported.flags}; leave --out out")
        write_text(file.out, exported.file + "\n")

    def show() -> None:
        print(exported.flags)
        if exported.file is not None and file.out is None:
            print(f"{exported.path}: {exported.file}")

    return Answer({"engine": options.engine, "flags": exported.flags, "file": exported.file}, show)
