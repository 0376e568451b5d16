"""`specsim record-text`: traces of prompt lookup and suffix decoding from texts, and what is no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.lookup.from_text import TokenText, lookup_trace, read_token_texts
from specsim.lookup.ngram import RULES
from specsim.trace.files import read_trace
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

ROWS = [
    {"prompt_tokens": [5, 6, 7, 8, 5], "output_tokens": [6, 7, 8, 5, 6, 9], "domain": "code"},
    {"prompt_tokens": [1, 2, 3], "output_tokens": [1, 2, 3, 1, 2], "max_output_tokens": 8},
]


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_from_text_is_read_and_replayed(tmp_path: Path) -> None:
    texts, out = written(tmp_path, ROWS), tmp_path / "lookup"
    document = json_of(call("specsim", "record-text", texts, out, "--rule", "transformers", "--json"))
    assert document["rule"] == {"min_ngram": 1, "max_ngram": 2, "occurrence": "first", "at_end": "stop"}
    trace = read_trace(out)
    assert trace.output_tokens.tolist() == [6, 5] and trace.budget_tokens.tolist() == [6, 8]
    assert trace.domain.tolist() == ["code", "all"] and trace.meta["drafter_facts"] == document["rule"]
    assert trace.prompts[1].tolist() == [1, 2, 3]
    # By hand: first "5" alone stood before, and 6, 7, 8, 5 followed; then "5 6", which 7, 8, 5, 6 followed; and so on.
    assert trace.match_len.tolist() == [4, 4, 3, 2, 1, 0, 0, 3, 3, 2, 1]
    cost = tmp_path / "cost.json"
    cost.write_text('{"s_d": 1e-6, "s_t": 0.01}')
    counted = json_of(call("specsim", "replay", out, "--policy", "fixed_k", "--cost", cost, "--as", "vllm", "--json"))[
        "engine"
    ]
    assert counted["num_drafts"] > 0 and counted["sequences_cut_off"] == 2  # neither is recorded behind its end


def test_options_change_a_rule(tmp_path: Path) -> None:
    texts = written(tmp_path, ROWS)
    args = ["--rule", "vllm", "--min-ngram", 2, "--max-ngram", 3, "--at-end", "copy", "--json"]
    document = json_of(call("specsim", "record-text", texts, tmp_path / "a", *args))
    assert document["rule"] == {"min_ngram": 2, "max_ngram": 3, "occurrence": "first", "at_end": "copy"}
    assert_refused(call("specsim", "record-text", texts, tmp_path / "a", *args), "exists", "--overwrite")
    shown = call("specsim", "record-text", texts, tmp_path / "a", "--overwrite")
    assert shown.code == 0 and "mean_match_len" in shown.out


def test_suffix_decoding_drafts_from_one_line_to_the_next(tmp_path: Path) -> None:
    rows = [
        {"prompt_tokens": [1, 2], "output_tokens": [3, 4, 5, 6]},
        {"prompt_tokens": [7], "output_tokens": [3, 4, 5]},
    ]
    texts = written(tmp_path, rows)
    args = ["--rule", "suffix", "--max-spec-factor", 2, "--json"]
    document = json_of(call("specsim", "record-text", texts, tmp_path / "a", *args))
    assert document["rule"] == {
        "max_tree_depth": 24, "max_spec_factor": 2.0, "max_spec_offset": 0.0, "min_token_prob": 0.1,
        "max_cached_requests": 10000,
    }  # fmt: skip
    trace = read_trace(tmp_path / "a")
    assert trace.meta["drafter"] == "suffix decoding" and trace.depth == 24
    # After its 3 the second line drafts the first line's 4, 5; after 3, 4 its 5, 6, of which 5 comes.
    assert trace.match_len.tolist() == [0, 0, 0, 0, 0, 2, 1]
    limited = [*args, "--max-cached-requests", 1, "--max-draft-tokens", 4]
    json_of(call("specsim", "record-text", texts, tmp_path / "b", *limited))
    alone = read_trace(tmp_path / "b")
    assert alone.depth == 4 and not alone.match_len.any()


def test_a_setting_of_another_rule_is_refused(tmp_path: Path) -> None:
    texts = written(tmp_path, ROWS)
    for rule, option, own in (("suffix", "--min-ngram", "--max-tree-depth"), ("vllm", "--max-tree-depth", "--at-end")):
        refused = call("specsim", "record-text", texts, tmp_path / "a", "--rule", rule, option, 2)
        assert_refused(refused, f"rule {rule} has no setting {option}", own)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_tokens": [1]}, "line 2 is malformed (Object missing required field `output_tokens`)"),
        ({"prompt_tokens": [], "output_tokens": [1]}, "line 2: 'prompt_tokens' is not a list of token ids"),
        ({"prompt_tokens": [-1], "output_tokens": [1]}, "line 2: 'prompt_tokens' is not a list of token ids"),
        ({"prompt_tokens": [1], "output_tokens": [2**31]}, "line 2: 'output_tokens' is not a list of token ids"),
        ({"prompt_tokens": [1], "output_tokens": [1, 2], "max_output_tokens": 1}, "line 2: 2 output tokens, more"),
        ({"prompt_tokens": ["a"], "output_tokens": [1]}, "`$.prompt_tokens[0]`"),
        ("{", "line 2 is not valid JSON"),
    ],
)
def test_what_is_no_text_is_named_by_its_line(tmp_path: Path, row: Any, message: str) -> None:
    refusal(lambda: read_token_texts(written(tmp_path, [ROWS[0], row])), message)


def test_no_texts_and_too_small_a_vocabulary_are_refused(tmp_path: Path) -> None:
    refusal(lambda: read_token_texts(written(tmp_path, [])), "is empty")
    refusal(lambda: read_token_texts(tmp_path / "none.jsonl"), "does not exist")
    refusal(lambda: lookup_trace([], RULES["specsim"], 4), "0 texts, drafts of 4 tokens")
    with pytest.raises(InputError, match="token 9 is beyond a vocabulary of 5"):
        lookup_trace([TokenText([1], [9], "all", 1)], RULES["specsim"], 4, vocabulary=5)


def test_a_text_of_one_token_over_and_over_is_copied() -> None:
    for rule, limit in (("specsim", 4), ("transformers", 4)):
        trace = lookup_trace([TokenText([7] * 9, [7] * 12, "all", 12)], RULES[rule], limit)
        assert trace.match_len.tolist() == np.minimum(limit, np.arange(12, 0, -1)).tolist()
