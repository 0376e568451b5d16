"""What `specsim export` writes, taken by the engines that run here; SGLang's parser has a test in test_export.py."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from realrun.engines.engine import save_models
from realrun.engines.gguf_file import write_gguf
from realrun.engines.vllm import VllmEngine
from specsim.engines.flags import VLLM_METHODS
from specsim.serving.draft_length import ScheduledK
from tests.realrun.engines.test_engines import needs_llamacpp
from tests.support import ROOT
from tests.support.commands import Result, call, json_of
from tests.support.tiny import tiny_model, tiny_pair

VLLM_PYTHON = str(ROOT / VllmEngine().python)  # of an environment with vLLM
needs_vllm = pytest.mark.skipif(
    not Path(VLLM_PYTHON).is_file(), reason="no vLLM here: `nox -s vllm` makes its environment"
)
COUNTS = {"drafted": [1000] * 4, "accepted": [800, 500, 200, 50]}
SCHEDULE = "1:4,3:2,8:0"
# The options of `specsim export` that make a setting another one, each with a value.
OPTIONS: dict[str, tuple[str, ...]] = {
    "k": ("--k", "4"),
    "schedule": ("--schedule", SCHEDULE),
    "p_min": ("--p-min", "0.3"),
    "min_ngram": ("--min-ngram", "2"),
    "max_ngram": ("--max-ngram", "3"),
    "acceptance": ("--acceptance", "counters.json"),
}
WRITTEN = {  # by the options that are given together; whatever else is asked for is refused
    "vllm": ["k", "schedule", "k min_ngram", "k min_ngram max_ngram", "k acceptance"],
    "llamacpp": ["k", "k p_min", "k acceptance"],
    "transformers": ["k", "k p_min", "k max_ngram"],
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`specsim export` with these options, in a folder with what they name."""
    monkeypatch.chdir(tmp_path)
    Path("counters.json").write_text(json.dumps(COUNTS))

    def export(engine: str, options: str, *more: str) -> Result:
        words = [word for name in options.split() for word in OPTIONS[name]]
        return call("specsim", "export", engine, *words, *more)

    return export


def flags_of(asked: Any, engine: str, options: str) -> str:
    return str(json_of(asked(engine, options, "--json"))["flags"]).split(" (also")[0]


@pytest.mark.parametrize("engine", WRITTEN)
def test_the_settings_below_are_all_that_can_be_written(asked: Any, engine: str) -> None:
    """A draft length or a schedule with one option more, but for n-grams' two bounds, which belong together.

    What makes no difference is no other setting; that no other two options go together, `test_export.py` shows.
    """
    written: dict[str, str] = {}
    more = [(), *((name,) for name in OPTIONS if name not in ("k", "schedule")), ("min_ngram", "max_ngram")]
    for base, others in product(("k", "schedule"), more):
        named = [base, *others]
        done = asked(engine, " ".join(named), "--json")
        assert done.code in (0, 2), done
        if done.code == 0:
            written.setdefault(json.loads(done.out)["flags"], " ".join(named))
    assert sorted(written.values()) == sorted(WRITTEN[engine])


def as_schedule() -> list[int]:
    rule = ScheduledK({int(batch): int(k) for batch, k in (part.split(":") for part in SCHEDULE.split(","))})
    return [rule.at(batch) for batch in range(1, 33)]


def starts(python: str, script: str, job: dict[str, Any], folder: Path) -> list[Any]:
    """What a script of tests/support says of a job, in a process of that interpreter."""
    given, result = folder / "job.json", folder / "result.json"
    given.write_text(json.dumps(job))
    command = [python, str(ROOT / "tests/support" / script), str(given), str(result)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(result.read_text())
    assert isinstance(answers, list)
    return answers


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_takes_every_setting_and_refuses_wrong_ones(asked: Any, tmp_path: Path) -> None:
    """By its own parser, and by a server that is started with them and drafts accordingly."""
    for name, layers in (("target", 2), ("draft", 1)):
        write_gguf(tiny_model(layers, seed=1, dtype=torch.float32), [0], tmp_path / f"{name}.gguf")
    models = ["-m", "target.gguf", "--spec-draft-model", "draft.gguf", "--spec-type", "draft-simple"]
    beside = [*models, "-t", "1", "-c", "256", "-np", "1", "--port", "0"]
    right = [shlex.split(flags_of(asked, "llamacpp", options)) for options in WRITTEN["llamacpp"]]
    before = ["--draft-max", "4", "--draft-p-min", "0.3"]  # options that were renamed
    rising = ["--spec-draft-n-max", "2", "--spec-synth-rates", "0.1,0.9"]
    few = ["--spec-draft-n-max", "3", "--spec-synth-rates", "0.9,0.1"]
    silent = [*(flags for flags in beside if flags not in ("--spec-type", "draft-simple")), *right[0]]
    job = {"starts": [*([*beside, *flags] for flags in (*right, before, rising, few)), silent], "prompt": [5, 6, 7]}
    plain, p_min, scripted, *wrong, alone = starts(sys.executable, "llamacpp_arguments.py", job, tmp_path)
    assert wrong == [None] * 3
    assert alone["drafted"] == 0  # which is why a --spec-type is said to stand beside
    assert plain["n_max"] == p_min["n_max"] == scripted["n_max"] == 4
    assert plain["p_min"] == 0 and p_min["p_min"] == pytest.approx(0.3)
    assert plain["drafted"] > p_min["drafted"] and plain["drafted"] > 4
    assert scripted["synth_rates"] == pytest.approx([0.8, 0.5, 0.2, 0.05]) and not plain["synth_rates"]


@pytest.mark.slow
@needs_vllm
def test_vllm_takes_every_setting_and_refuses_wrong_ones(asked: Any, tmp_path: Path) -> None:
    """By its own parser, its configuration of an engine, and its scheduler's lookup of a K per batch."""
    save_models(tiny_pair(), tmp_path)
    common = ["--model", "target", "--max-num-seqs", "32", "--max-model-len", "128", "--dtype", "float32"]

    def arguments(flags: str, **changes: Any) -> list[str]:
        flag, config = shlex.split(flags)
        beside = {} if "ngram" in config else {"method": "draft_model", "model": "draft"}
        return [*common, flag, json.dumps({**json.loads(config), **beside, **changes})]

    flags = [flags_of(asked, "vllm", options) for options in WRITTEN["vllm"]]
    wrong = {
        "num_speculative_tokens": arguments(flags[0], num_speculative_tokens=0),
        "must start at 1": arguments(flags[1], num_speculative_tokens_per_batch_size=[[2, 4, 3]]),
        "prompt_lookup_min=4 must be <= prompt_lookup_max=3": arguments(flags[3], prompt_lookup_min=4),
        "must be non-increasing": arguments(flags[4], synthetic_acceptance_rates=[0.1, 0.5, 0.6, 0.7]),
        "speculative_token_tree": arguments(flags[0], speculative_token_tree="[]"),
    }
    job = {"starts": [*map(arguments, flags), *wrong.values()]}
    *configs, methods = starts(VLLM_PYTHON, "vllm_arguments.py", job, tmp_path)
    plain, schedule, longest, ngram, scripted, *refused = configs
    assert {*VLLM_METHODS.values()} <= {*methods}  # which advise prints
    for says, config in zip(wrong, refused, strict=True):
        assert says in config["refused"]
    assert [config["num_speculative_tokens"] for config in (plain, schedule, ngram, scripted)] == [4] * 4
    assert plain["method"] == schedule["method"] == scripted["method"] == "draft_model"
    assert schedule["lookup"] == as_schedule()
    for config, most in ((longest, 5), (ngram, 3)):
        assert (config["method"], config["prompt_lookup_min"], config["prompt_lookup_max"]) == ("ngram", 2, most)
    assert scripted["rejection_sample_method"] == "synthetic" and plain["rejection_sample_method"] == "standard"
    assert scripted["synthetic_acceptance_rates"] == pytest.approx([0.8, 0.5, 0.2, 0.05])


def library_config(asked: Any, options: str, folder: Path) -> GenerationConfig:
    """The exported file as transformers reads it from a model's folder."""
    done = asked("transformers", options, "--out", folder / "generation_config.json")
    assert done.code == 0, done
    config = GenerationConfig.from_pretrained(folder)
    config.validate(strict=True)
    return config


class Drafted:
    """Tokens that every round of a model's assisted generation drafts."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch):
        self.tokens: list[int] = []
        self.generators: list[Any] = []
        make = model._get_candidate_generator

        def watch(**given: Any) -> Any:
            generator = make(**given)
            propose = generator.get_candidates

            def get_candidates(input_ids: Any, **rest: Any) -> Any:
                candidates = propose(input_ids, **rest)
                self.tokens.append(candidates[0].shape[1] - input_ids.shape[1])
                return candidates

            self.generators.append(generator)
            monkeypatch.setattr(generator, "get_candidates", get_candidates)
            return generator

        monkeypatch.setattr(model, "_get_candidate_generator", watch)


def generate(model: Any, **how: Any) -> None:
    ids = torch.arange(3, 23)[None] % 7 + 3  # with n-grams that occur again
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **how)


@pytest.mark.parametrize(("options", "lengths"), [("k", [4, 4, 4]), ("k p_min", [1])])
def test_transformers_drafts_by_the_exported_file(
    asked: Any, options: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K tokens in every round, whatever the draft model thinks of them, or up to one that it is not sure of.

    Untrained, it is sure of none; the library moves its threshold from the second round on.
    """
    target, draft = tiny_model(2, seed=1), tiny_model(1, seed=2)
    draft.generation_config = library_config(asked, options, tmp_path)
    drafted = Drafted(target, monkeypatch)
    generate(target, assistant_model=draft)
    assert drafted.tokens[: len(lengths)] == lengths


def test_transformers_looks_up_by_the_exported_file(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config = tiny_model(2, seed=1), library_config(asked, "k max_ngram", tmp_path)
    drafted = Drafted(target, monkeypatch)
    fields = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
    generate(target, **{name: getattr(config, name) for name in fields})
    (generator,) = drafted.generators
    assert type(generator).__name__ == "PromptLookupCandidateGenerator"
    assert (generator.num_output_tokens, generator.max_matching_ngram_size) == (4, 3)
    assert max(drafted.tokens) == 4
