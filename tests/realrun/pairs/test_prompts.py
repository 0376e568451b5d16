"""A user's prompts: what a file may hold, which of them are taken, and what results say of them."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from realrun.cli.options import load_prompts
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import (
    LAB_PROMPTS,
    TASK_PROMPTS,
    Prompt,
    prompt_digest,
    prompt_facts,
    prompts_source,
    read_prompts,
    spread,
)
from specsim.io.examples import TASKS
from tests.support.checks import refusal
from tests.support.tiny import tiny_pair, tiny_prompts, tiny_tokenizer

TEMPLATE = "{{ bos_token }}{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}[assistant]"


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """It puts "^" before every text, unless told not to."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.bos_token = "^"
    bos = tokenizer.convert_tokens_to_ids("^")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="^ $A", special_tokens=[("^", bos)])
    tokenizer.chat_template = template
    return tokenizer


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_are_read_with_their_domains(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "ab", "domain": "x"}\n\n{"text": "c\u2028", "more": 1}\n', encoding="utf-8")
    first, second = read_prompts(path, tiny_tokenizer())
    assert first == Prompt("x", tiny_tokenizer()("ab")["input_ids"]) and len(first.tokens) == 2
    assert second.domain == "all" and len(second.tokens) == 2  # a line separator in JSON text ends no line
    assert read_prompts(path, tiny_tokenizer(), 1) == [first]


def test_a_chat_is_put_into_words_by_the_tokenizers_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    rows = [{"messages": messages, "domain": "chat"}, {"prompt": "why?"}, {"text": "why?"}]
    path = written(tmp_path / "p.jsonl", *rows)
    tokenizer = chat_tokenizer()
    chat, asked, plain = read_prompts(path, tokenizer)
    assert chat.domain == "chat" and [prompt.chat for prompt in (chat, asked, plain)] == [True, True, False]
    assert tokenizer.decode(asked.tokens).replace(" ", "") == "^[user]why?[assistant]"
    assert tokenizer.decode(chat.tokens).replace(" ", "") == "^[system]bebrief[user]why?[assistant]"
    assert tokenizer.decode(plain.tokens).replace(" ", "") == "^why?"


def test_no_text_gets_a_second_first_token(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"text": "^ab"}, {"text": "ab"})
    first, second = read_prompts(path, chat_tokenizer())
    assert first.tokens == second.tokens and len(first.tokens) == 3


ASKED = "why?"
DATA_SETS = {
    "MT-Bench": {"question_id": 81, "category": "writing", "turns": [ASKED, "and now?"]},
    "Spec-Bench": {"question_id": 1, "category": "math", "turns": [ASKED]},
    "ShareGPT": {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "hi"},
            {"from": "human", "value": ASKED},
            {"from": "gpt", "value": "so"},
        ],
    },
    "ShareGPT with messages' keys": {"conversations": [{"role": "user", "content": ASKED}]},
    "GSM8K": {"question": ASKED, "answer": "#### 3"},
    "Alpaca": {"instruction": ASKED, "input": "", "output": "so"},
    "a chat with its answer": {
        "messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "so"}],
    },
    "parts of a text": {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]},
    "a table without domains": {"question": ASKED, "domain": None, "category": None},
}


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_first_question_of_a_data_sets_line_is_asked(name: str, tmp_path: Path) -> None:
    row = DATA_SETS[name]
    path = written(tmp_path / "p.jsonl", row)
    tokenizer = chat_tokenizer()
    (asked,) = read_prompts(path, tokenizer)
    (as_messages,) = read_prompts(
        written(tmp_path / "m.jsonl", {"messages": [{"role": "user", "content": ASKED}]}), tokenizer
    )
    assert asked.tokens == as_messages.tokens and asked.domain == (row.get("category") or "all")
    if "messages" in row:
        return
    plain = chat_tokenizer(None)
    (continued,) = read_prompts(path, plain)
    assert plain.decode(continued.tokens).replace(" ", "") == "^why?"


def test_an_instruction_keeps_its_input(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"instruction": "ab", "input": "cd"}, {"text": "ab\n\ncd"})
    instruction, text = read_prompts(path, chat_tokenizer(None))
    assert instruction.tokens == text.tokens


GOOD = '{"text": "ab"}\n'


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (GOOD + "{", ":2 "),
        (GOOD + "\n" + '"text"', ":3 "),
        (GOOD + '["text"]', ":2 "),
        (GOOD + '{"turns": []}', ":2: 'turns'"),
        (GOOD + '{"turns": [3]}', ":2: 'turns'"),
        (GOOD + '{"conversations": [{"from": "gpt", "value": "hi"}]}', ":2: 'conversations'"),
        (GOOD + '{"question": 3}', ":2: 'question'"),
        (GOOD + '{"turns": ["a"], "text": "b"}', ":2 is not a prompt: it has text and turns"),
        (GOOD + '{"answer": "a"}', ":2 is not a prompt"),
        (GOOD + '{"text": "a", "prompt": "a"}', ":2 is not a prompt"),
        (GOOD + "[" * 100_000, ":2 is not "),
        (GOOD + '{"text": ""}', ":2: the prompt is empty"),
        (GOOD + '{"text": 7}', ":2: 'text' is not a text"),
        ('[{"text": "ab"}]', ":1 is malformed (Expected `object`, got `array`); give one JSON object per line"),
        (GOOD + '{"messages": [{"role": "assistant", "content": "a"}]}', ':2: "messages" holds answers alone'),
        (GOOD + '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', ':2: "messages" is not a list of '),
        (GOOD + '{"text": "a", "domain": 3}', ":2: domain is malformed"),
        (GOOD + '{"messages": []}', ':2: "messages" is not a list of '),
        (GOOD + '{"messages": [{"role": "user"}]}', ':2: "messages" is not a list of '),
        (GOOD + '{"messages": [{"role": "user", "content": "a"}]}', ":2: the tokenizer has no chat template"),
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_prompt_files_are_refused_with_their_line(tmp_path: Path, content: str | bytes, names: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal(lambda: read_prompts(path, tiny_tokenizer()), str(path), names)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{% for %}"])
def test_what_a_template_refuses_is_refused_with_its_line(tmp_path: Path, template: str) -> None:
    path = written(tmp_path / "p.jsonl", {"messages": [{"role": "system", "content": "a"}]})
    refusal(lambda: read_prompts(path, chat_tokenizer(template)), f"{path}:1: the tokenizer's chat template refuses it")


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    refusal(lambda: read_prompts(tmp_path / "absent", tiny_tokenizer()), "absent", "does not exist")
    refusal(lambda: read_prompts(tmp_path, tiny_tokenizer()), "does not exist")


@given(domains=st.lists(st.sampled_from("abcd"), max_size=30), count=st.integers(1, 40))
def test_some_of_many_are_of_all_domains_alike(domains: list[str], count: int) -> None:
    prompts = [Prompt(domain, [number]) for number, domain in enumerate(domains)]
    chosen = spread(prompts, count)
    assert len(chosen) == min(count, len(prompts))
    assert [prompt.tokens for prompt in chosen] == sorted(prompt.tokens for prompt in chosen)  # in their order
    for domain in set(domains):
        own = [prompt for prompt in prompts if prompt.domain == domain]
        taken = [prompt for prompt in chosen if prompt.domain == domain]
        assert taken == own[: len(taken)]
        if len(taken) < len(own):  # nobody has more than one more than who had some left
            assert all(sum(prompt.domain == other for prompt in chosen) <= len(taken) + 1 for other in set(domains))


def test_a_file_is_used_whole_unless_told_and_a_cut_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "p.jsonl", *({"text": f"{n}", "domain": "wxyz"[n // 50]} for n in range(200)))
    pair = tiny_pair()
    assert len(load_prompts(pair, path, None, 500)) == 200
    assert capsys.readouterr().err == ""
    assert len(load_prompts(pair, path, 10, 500)) == 10
    assert capsys.readouterr().err == f"prompts: 10 of the 200 in {path} (3 w, 3 x, 2 y, 2 z)\n"


def test_sources_are_named(tmp_path: Path) -> None:
    assert prompts_source("lab", None) == prompts_source("lab-deep:24", None) == LAB_PROMPTS
    assert prompts_source("mine/", written(tmp_path / "p.jsonl", {"text": "a"})) == "p.jsonl"
    assert prompts_source("mine/", None) == TASK_PROMPTS
    refusal(lambda: prompts_source("lab", tmp_path / "absent"), "absent", "does not exist")


def test_the_tasks_are_equally_many_of_six_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in TASKS.read_text().splitlines()]
    kinds = Counter(row["domain"] for row in rows)
    assert len(kinds) == 6 and {*kinds.values()} == {40} and len({row["id"] for row in rows}) == 240
    assert {len(row["turns"]) for row in rows if row["domain"] == "conversation"} == {2}
    assert all(len(" ".join(row["turns"]).split()) <= 250 for row in rows)
    mine = replace(tiny_pair(), target_name="mine")
    chosen = load_prompts(mine, None, None, 10_000)
    assert Counter(prompt.domain for prompt in chosen) == dict.fromkeys(kinds, 6)
    assert "prompts: 36 of the 240 in specsim's tasks" in capsys.readouterr().err


def test_results_name_their_prompts() -> None:
    prompts = tiny_prompts(3)
    assert prompt_facts(prompts, "p.jsonl") == {"source": "p.jsonl", "count": 3, "digest": prompt_digest(prompts)}
    assert prompt_facts(prompts, "")["source"] == "not named"


def test_a_name_that_is_the_labs_drafter_and_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eagle").mkdir()
    refusal(lambda: load_pair(drafter="eagle"), "drafter eagle", "lab:eagle", "./eagle")
    assert load_pair(drafter="lab:eagle").draft_name == "lab/eagle"
    refusal(lambda: load_pair(drafter="./eagle"), "eagle")  # an empty folder is no drafter, but the one that was meant
    refusal(lambda: load_pair(drafter="lab:abacus"), "the lab has no drafter abacus", "eesd")
    assert load_pair(drafter="self-sd").draft_name == "lab/self-sd"
