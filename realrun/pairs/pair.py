"""Load a target and its draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from realrun.drafters.acceptance_predictor import FILE, Predictor, load_predictor
from realrun.drafters.lookup import MAX_NGRAM
from realrun.lm.skipped_layers import NOTHING, SkippedSublayers
from realrun.pairs.drafter_files import load_drafter, weights_digest
from specsim.errors import InputError

LAB = "lab"
LAB_WEIGHTS = Path(__file__).parents[1] / "lab" / "weights"
LAB_PREDICTOR = LAB_WEIGHTS / "predictor" / FILE
LAB_DRAFTERS = ("eesd", "medusa-1", "medusa-2", "self-sd", "edd", "eagle", "space")
LOOKUP = "prompt-lookup"  # any target has it
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, the tokenizer they share, and perhaps a predictor of acceptance trained on them.

    draft : of kind "model" an independent model, of "eesd" the early exit as a model
        (`drafters.eesd.as_model`), of "medusa" its `MedusaHeads`, of "self-sd" the target itself, of "edd" the
        decoder as a model, of "eagle" its `Eagle`, of "space" `Masks`, beside a target that has a mask token; of
        "lookup", which has no model, the target itself
    split : of kind "eesd", the target's layers that it shares; of "edd" and "eagle", those below the states it reads
    skips : of kind "self-sd", what it passes over
    """

    target: PreTrainedModel
    draft: Any
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    draft_name: str
    eos_token_ids: tuple[int, ...]
    predictor: Predictor | None = None
    kind: str = "model"
    split: int = 0
    skips: SkippedSublayers = NOTHING

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def deepest(self) -> int | None:
        """Tokens that the drafter can draft in a round, None for no limit."""
        return len(self.draft) if self.kind in ("medusa", "space") else None

    @property
    def trees(self) -> bool:
        """Whether the drafter can draft trees."""
        return self.kind not in ("lookup", "space")

    @property
    def drafter_facts(self) -> dict[str, Any]:
        """What a drafter inside the target is made of; nothing of an independent model."""
        if self.kind == "eesd":
            return {"layers": self.split, "exit_layers": int(self.draft.config.num_hidden_layers) - self.split}
        if self.kind == "medusa":
            return {"heads": len(self.draft)}
        if self.kind == "space":
            return {"masks": len(self.draft)}
        if self.kind == "edd":
            return {"states_after": self.split}
        if self.kind == "lookup":
            return {"longest_ngram": MAX_NGRAM}
        return self.skips.in_order if self.kind == "self-sd" else {}

    @cached_property
    def fingerprint(self) -> str:
        """A short hash that tells this pair's weights from others: of a few rows of each model."""
        facts = [str(self.drafter_facts)] if self.drafter_facts else []
        return weights_digest(self.target, self.draft, *facts)


def load_pair(
    target: str = LAB,
    draft: str = LAB,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    predictor: str | None = "auto",
    drafter: str = "model",
    beside: Pair | None = None,
) -> Pair:
    """Load two models by local folder or hub id; "lab" names the embedded pair.

    drafter : "model" for the independent draft model, "prompt-lookup", the name of one of the lab's
    drafters inside its target (`LAB_DRAFTERS`), or a folder made by `realrun train`; then draft is ignored.
    predictor : a file made by `realrun train predictor` or its folder, "lab" for the embedded
    pair's, None or "none" for none, or "auto": the lab's, or what lies in the drafter's folder, where
    it was trained on this very pair.
    beside : a pair of the same target, device and type, to share the target with; so many drafters fit
    beside one target.

    No remote code is run. Raises InputError when a model cannot be loaded, the device or
    dtype is unknown, the tokenizers differ, or drafter or predictor belongs to another target.
    """
    if drafter != "model":
        return _load_inside(target, drafter, device, dtype, threads, predictor, beside)
    number_type = find_dtype(dtype)
    find_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    paths = [_resolve(target, "target"), _resolve(draft, "draft")]
    tokenizers = [_load(AutoTokenizer, path) for path in paths]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise InputError(f"target {target} and draft {draft} have different tokenizers; choose a pair that shares one")
    try:
        wanted = paths if beside is None else paths[1:]
        models = [_load(AutoModelForCausalLM, path, dtype=number_type).to(device).eval() for path in wanted]
        models = models if beside is None else [beside.target, *models]
    except (RuntimeError, AssertionError) as error:  # no such device, or its memory is full
        raise InputError(f"cannot put the models on {device}: {str(error).splitlines()[0]}") from None
    pair = Pair(
        target=models[0],
        draft=models[1],
        tokenizer=tokenizers[0],
        target_name=_public_name(target, "target"),
        draft_name=_public_name(draft, "draft"),
        eos_token_ids=_eos_token_ids(models[0]),
    )
    if predictor == "auto":  # only the embedded pair has one of its own; another number type may be another pair
        return _with_predictor(pair, LAB_PREDICTOR, strict=False) if target == draft == LAB else pair
    if predictor is None or predictor == "none":
        return pair
    return _with_predictor(pair, LAB_PREDICTOR if predictor == LAB else Path(predictor), strict=True)


def load_target(target: str = LAB, *, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> Pair:
    """Load a target alone; it stands as its own drafter, of kind "self-sd", which skips nothing.

    Raises InputError as `load_pair` does.
    """
    number_type = find_dtype(dtype)
    find_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    folder = _resolve(target, "target")
    try:
        model = _load(AutoModelForCausalLM, folder, dtype=number_type).to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"cannot put the models on {device}: {str(error).splitlines()[0]}") from None
    name = _public_name(target, "target")
    return Pair(model, model, _load(AutoTokenizer, folder), name, name, _eos_token_ids(model), kind="self-sd")


def _load_inside(
    target: str,
    drafter: str,
    device: str,
    dtype: str,
    threads: int | None,
    predictor: str | None,
    beside: Pair | None,
) -> Pair:
    """`load_pair` of a drafter that lives in the target."""
    if drafter == LOOKUP:
        if predictor not in (None, "none", "auto"):
            raise InputError(
                f"drafter {LOOKUP} has no states that a predictor reads; leave --predictor {predictor} out"
            )
        alone = load_target(target, device=device, dtype=dtype, threads=threads) if beside is None else beside
        return replace(alone, draft=alone.target, draft_name=LOOKUP, kind="lookup")
    if drafter not in LAB_DRAFTERS and not Path(drafter).exists():
        raise InputError(
            f"drafter {drafter} is neither model, {LOOKUP} nor one of the lab's ({', '.join(LAB_DRAFTERS)}) nor a "
            "folder; make one with `realrun train`"
        )
    path = LAB_WEIGHTS / drafter if drafter in LAB_DRAFTERS else Path(drafter)
    if not path.exists():
        raise InputError(f"the lab has no drafter {drafter}; make one with `realrun train` and give its folder")
    alone = load_target(target, device=device, dtype=dtype, threads=threads) if beside is None else beside
    loaded = load_drafter(path, alone.target)
    home = (path if path.is_dir() else path.parent).resolve()
    pair = replace(
        alone,
        target=loaded.target,
        draft=loaded.draft,
        draft_name=f"{LAB}/{drafter}" if drafter in LAB_DRAFTERS else home.name,
        kind=loaded.kind,
        split=loaded.split,
        skips=loaded.skips,
    )
    if predictor is None or predictor == "none":
        return pair
    its_own = predictor in ("auto", LAB)
    return _with_predictor(pair, home / FILE if its_own else Path(predictor), strict=predictor != "auto")


def _with_predictor(pair: Pair, path: Path, *, strict: bool) -> Pair:
    """The pair with this predictor; if it does not fit, InputError where strict, else the pair as it is."""
    try:
        predictor = load_predictor(path)
        predictor.check(pair.target, pair.draft, pair.fingerprint)
    except InputError:
        if strict:
            raise
        return pair
    return replace(pair, predictor=predictor)


def find_dtype(name: str) -> torch.dtype:
    """The number type of that name; InputError names the known ones."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name; InputError where it does not exist or is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is unknown; give for example cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name} is not available here; use --device cpu")
    return device


def _resolve(name: str, role: str) -> str:
    return str(LAB_WEIGHTS / role) if name == LAB else name


def _public_name(name: str, role: str) -> str:
    """A model's name for result files: never an absolute path."""
    if name == LAB:
        return f"{LAB}/{role}"
    return Path(name).name if Path(name).is_absolute() else name


def _load(kind: type, path: str, **options: object):  # type: ignore[no-untyped-def]
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **options)  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load {path}: {first_line} Give a local folder or a hub id.") from None


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos: int | Sequence[int] | None = None
    if model.generation_config is not None:
        eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
