"""Draft lengths, schedules and scripted acceptance in engines' own forms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specsim.engines.export import PER_BATCH, acceptance_by_depth, draft_length, export_flags, lookup, scripted
from specsim.engines.export import schedule_setting as schedule
from specsim.engines.flags import FLAGS, SGLANG_ALGORITHMS, draft_length_flags
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.p_min import LlamaCpp
from specsim.policy.tree.eagle2 import Eagle2
from specsim.serving.draft_length import ScheduledK
from tests.specsim.engines.test_import import FIXTURES, read
from tests.specsim.policy.test_tree_policies import Drafter, grow
from tests.support import sglang_arguments
from tests.support.commands import assert_refused, call, json_of

SGLANG: dict[str, Any] = json.loads(sglang_arguments.FIXTURE.read_text())["settings"]
RULE = ScheduledK({16: 0, 1: 5, 4: 3})


def vllm_config(flags: str) -> Any:
    return json.loads(re.findall(r"'(.*)'", flags)[0])


def test_a_schedule_means_the_same_in_every_form() -> None:
    """At every batch, the K that the rule itself chooses."""
    config = vllm_config(schedule("vllm", RULE, 64).flags)
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1 and ranges[-1][1] == 64 and config["num_speculative_tokens"] == 5
    assert [end + 1 for _, end, _ in ranges[:-1]] == [start for start, _, _ in ranges[1:]]
    sglang = schedule("sglang", RULE, 64)
    assert sglang.file is not None and "--speculative-num-steps 5 --speculative-eagle-topk 1" in sglang.flags
    steps = {int(batch): step["candidate_steps"] for batch, step in json.loads(sglang.file).items()}
    inner = re.findall(r"draft_len_schedule: \{(.*?)\}", schedule("tensorrt-llm", RULE, 64).flags)[0]
    lengths = {int(batch): int(k) for batch, k in (part.split(": ") for part in inner.split(", "))}
    for batch in range(1, 65):
        k = RULE.at(batch)
        assert [length for start, end, length in ranges if start <= batch <= end] == [k]
        assert steps[max(start for start in steps if start <= batch)] == [k]
        # TensorRT-LLM's keys end a range, and no draft is made beyond the last: {4: 4, 8: 2} is 4 tokens up to batch 4.
        assert lengths.get(min((end for end in lengths if batch <= end), default=0), 0) == k


def test_one_draft_length_is_that_of_advice() -> None:
    for engine in FLAGS:
        assert draft_length(engine, 4).flags == draft_length_flags(engine, 4)
    assert draft_length("llamacpp", 4).flags == "--spec-draft-n-max 4 (also pass --spec-type and --spec-draft-model)"


def test_a_draft_that_ends_where_the_draft_model_is_not_sure() -> None:
    also = "(also pass --spec-type and --spec-draft-model)"
    assert draft_length("llamacpp", 4, p_min=0.5).flags == f"--spec-draft-n-max 4 --spec-draft-p-min 0.5 {also}"
    fields = {
        "num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.5,
    }  # fmt: skip
    assert json.loads(draft_length("transformers", 4, p_min=0.5).file or "") == fields
    assert "without scikit-learn" in draft_length("transformers", 4, p_min=0.5).flags  # findings/ shows it
    assert "scikit-learn" not in draft_length("transformers", 4).flags  # a threshold of 0 is never adjusted
    # At the library's own threshold of 0.4, drafts of K tokens would not all be of K tokens.
    assert json.loads(draft_length("transformers", 4).file or "") == {**fields, "assistant_confidence_threshold": 0.0}
    assert "assistant_confidence_threshold=0.0" in draft_length_flags("transformers", 4)
    with pytest.raises(InputError, match="vllm has no rule for --p-min; choose one of llamacpp"):
        draft_length("vllm", 4, p_min=0.5)


def test_prompt_lookup_by_an_engines_own_rule() -> None:
    """N-grams of 5 tokens in vLLM unless told, of 1 to 2 in transformers, which has no lower bound to set."""
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert vllm_config(lookup("vllm", 4, min_ngram=2, max_ngram=3).flags) == config
    assert vllm_config(lookup("vllm", 4, min_ngram=2, max_ngram=None).flags) == {**config, "prompt_lookup_max": 5}
    exported = lookup("transformers", 4, min_ngram=None, max_ngram=3)
    assert json.loads(exported.file or "") == {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    assert exported.flags.startswith("prompt_lookup_num_tokens=4, max_matching_ngram_size=3 in the target's")
    with pytest.raises(InputError, match="n-grams of 5 to 3 tokens"):
        lookup("vllm", 4, min_ngram=None, max_ngram=3)
    with pytest.raises(InputError, match="also looks up n-grams of 1 token; leave --min-ngram out"):
        lookup("transformers", 4, min_ngram=2, max_ngram=3)
    with pytest.raises(InputError, match="llamacpp has no known flags for prompt lookup; choose one of vllm"):
        lookup("llamacpp", 4, min_ngram=None, max_ngram=3)


def test_flags_name_the_drafter_and_its_model() -> None:
    """As vLLM's SpeculativeConfig and SGLang's server arguments have them."""
    config = vllm_config(export_flags("vllm", schedule="1:3,8:0", drafter="eagle3", model="own/head").flags)
    assert (config["method"], config["model"]) == ("eagle3", "own/head")
    assert vllm_config(export_flags("vllm", 2, drafter="medusa", model="own/heads").flags) == {
        "method": "medusa", "model": "own/heads", "num_speculative_tokens": 2,
    }  # fmt: skip
    sglang = export_flags("sglang", 2, drafter="eagle3", model="own/head").flags
    assert sglang.startswith("--speculative-draft-model-path own/head --speculative-algorithm EAGLE3 ")
    with pytest.raises(InputError, match="leave out --policy"):
        export_flags("sglang", policy="fixed_k", drafter="eagle3")


def test_what_an_engine_does_not_have_is_refused() -> None:
    with pytest.raises(
        InputError, match=f"has no draft length by batch size, only --k; choose one of {', '.join(PER_BATCH)}"
    ):
        schedule("llamacpp", RULE, 64)
    with pytest.raises(InputError, match="its longest draft at batch 1, where this schedule has 1 of 3"):
        schedule("tensorrt-llm", ScheduledK({1: 1, 4: 3}), 64)
    with pytest.raises(InputError, match="exceeds 8; give a larger"):
        schedule("vllm", RULE, 8)
    with pytest.raises(InputError, match="has no known flags for scripted acceptance"):
        scripted("transformers", [0.5])


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_own_parser_takes_what_is_exported(name: str) -> None:
    """The fixture has the flags that SGLang 0.5.23 parsed, and what they set there."""
    case, setting = SGLANG[name], dict(sglang_arguments.settings())[name]
    assert setting.flags == case["flags"]
    k, chain = 4, {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
    kind = name.removeprefix("drafter ")
    expected: dict[str, Any] = {
        "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 13},
        "schedule": {**chain, "speculative_adaptive": True, "speculative_adaptive_config": "adaptive.json"},
        "scripted acceptance": {**chain, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
        "draft length": chain,
    }
    assert case["set"] == expected.get(name, {**chain, "speculative_algorithm": SGLANG_ALGORITHMS.get(kind)})
    if name == "schedule":
        rule = ScheduledK({1: k, 3: 2, 8: 0})
        assert case["steps"] == [rule.at(batch) for batch in range(1, 33)]
    if name == "scripted acceptance":
        method = {"SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
        assert case["environment"] == {"SGLANG_SIMULATE_ACC_LEN": 1 + 0.8 + 0.5 + 0.2, **method}


@pytest.mark.parametrize("case", json.loads((FIXTURES / "sglang_trees.json").read_text())["trees"])
def test_a_tree_is_the_one_that_sglang_verifies(case: dict[str, Any]) -> None:
    """Grown by SGLang's own functions under these flags (tests/support/sglang_trees.py)."""
    tree = Eagle2(nodes=case["draft_tokens"] - 1, depth=case["steps"], top_k=case["top_k"])
    assert grow(tree, Drafter(case["seed"])).kept == {(), *map(tuple, case["verified"])}
    flags = export_flags("sglang", policy=tree).flags
    assert [int(value) for value in flags.split()[1::2]] == [case["steps"], case["top_k"], case["draft_tokens"]]


def test_policies_as_flags() -> None:
    assert export_flags("sglang", policy=FixedK(k=3)) == export_flags("sglang", 3)
    assert export_flags("llamacpp", policy=LlamaCpp(p_min=0.5, max_draft_tokens=4)) == export_flags(
        "llamacpp", 4, p_min=0.5
    )
    with pytest.raises(InputError, match="transformers does not stop drafts as llama_cpp does; choose one of llamacpp"):
        export_flags("transformers", policy="llama_cpp")
    larger = export_flags("sglang", policy=Eagle2(nodes=60, depth=2, top_k=3))  # than the 12 that are drafted
    assert larger.flags.endswith("--speculative-num-draft-tokens 13")
    with pytest.raises(InputError, match="vllm has no flags for trees; choose one of sglang"):
        export_flags("vllm", policy=Eagle2())
    with pytest.raises(InputError, match="verifies all 5 tokens of a chain, not 3; give depth=3"):
        export_flags("sglang", policy=Eagle2(nodes=3, depth=5, top_k=1))
    with pytest.raises(InputError, match="no engine has flags for policy adaedl; give fixed_k, llama_cpp or eagle2"):
        export_flags("vllm", policy="adaedl")


def test_scripted_acceptance_is_the_sources() -> None:
    """Of the counters of llama.cpp at K = 3, where 308, 207 and 144 of 475 rounds accepted so far."""
    source = read("llamacpp-log", "llamacpp_log_k3.txt").source
    shares = acceptance_by_depth(source, 3)
    assert shares == pytest.approx([308 / 475, 207 / 475, 207 / 475 * 144 / 203])
    assert vllm_config(scripted("vllm", shares).flags)["synthetic_acceptance_rates"] == pytest.approx(shares, abs=1e-6)
    listed = ",".join(f"{share:.6f}" for share in shares)
    also = "(also pass --spec-type and --spec-draft-model)"
    assert scripted("llamacpp", shares).flags == f"--spec-draft-n-max 3 --spec-synth-rates {listed} {also}"
    forced = f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={sum(shares):.4f} in the environment, with "
    assert scripted("tensorrt-llm", shares).flags == forced + draft_length_flags("tensorrt-llm", 3)
    assert f"SGLANG_SIMULATE_ACC_LEN={1 + sum(shares):.4f} " in scripted("sglang", shares).flags
    with pytest.raises(InputError, match="acceptance is known for 3 draft tokens, not for 4"):
        acceptance_by_depth(source, 4)


def test_the_command(tmp_path: Path) -> None:
    ranges = "[[1, 3, 5], [4, 15, 3], [16, 512, 0]]"
    assert ranges in call("specsim", "export", "vllm", "--schedule", "1:5,4:3,16:0").out
    text = call("specsim", "export", "sglang", "--schedule", "1:5,4:3").out
    assert 'adaptive.json: {"1": {"candidate_steps": [5]}' in text
    counted = tmp_path / "counters.json"
    call("specsim", "import", "prometheus", FIXTURES / "llamacpp_metrics_k3.prom", "--out", counted)
    document = json_of(call("specsim", "export", "llamacpp", "--k", 2, "--acceptance", counted, "--json"))
    rates = f"{308 / 475:.6f},{207 / 472:.6f}"  # 472 drafted a second token, as the import says
    assert document["flags"].startswith(f"--spec-draft-n-max 2 --spec-synth-rates {rates} (also ")
    assert document["file"] is None
    out = tmp_path / "adaptive.json"
    shown = call("specsim", "export", "sglang", "--schedule", "1:5,4:3", "--out", out).out
    assert f"--speculative-adaptive-config {out}" in shown and '{"1": {"candidate_steps": [5]}' in out.read_text()
    assert_refused(call("specsim", "export", "vllm", "--k", 2, "--out", tmp_path / "none"), "needs no file")
    assert not (tmp_path / "none").exists()
    config = tmp_path / "trt.yaml"  # which `advise` lets trtllm-serve read
    asked = ("export", "tensorrt-llm", "--k", 3, "--out", config)
    shown = call("specsim", *asked, "--drafter", "eagle3", "--model", "nvidia/gpt-oss-120b-Eagle3").out
    assert shown.replace("\n", "") == f"--config {config}"
    of_drafter = "{decoding_type: Eagle3, max_draft_len: 3, speculative_model: nvidia/gpt-oss-120b-Eagle3}"
    assert config.read_text() == f"speculative_config: {of_drafter}\n"
    assert_refused(call("specsim", *asked, "--overwrite"), "needs no file")  # its kind is to be filled in
    tree = ("--policy", "eagle2", "--set", "nodes=7", "--set", "depth=5", "--set", "top_k=4")
    assert (
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8" in call("specsim", "export", "sglang", *tree).out
    )
    assert_refused(call("specsim", "export", "sglang", "--k", 2, "--set", "nodes=7"), "--set belongs to --policy")
    assert_refused(call("specsim", "export", "vllm"), "--k, --schedule or --policy")
    assert_refused(call("specsim", "export", "vllm", "--k", 2, "--schedule", "1:2"), "--k, --schedule or --policy")
    assert_refused(call("specsim", "export", "vllm", "--schedule", "1:2", "--acceptance", counted), "--k")
    assert_refused(call("specsim", "export", "tgi", "--k", 2), "choose one of vllm")
    both = ("--p-min", 0.5, "--acceptance", counted)
    assert_refused(call("specsim", "export", "llamacpp", "--k", 2, *both), "--p-min and --acceptance", "one at a time")
