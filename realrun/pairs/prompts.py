"""Read prompts: the lab's, those of studies, or a user's JSON Lines file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from realrun.pairs.library_text import Split, docstring_spans, library_files
from realrun.pairs.pair import is_lab
from realrun.pairs.training_tasks import training_questions
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import checked, parse_json

NAMED_PROMPTS = 5  # prompts that a message names at most
# Keys of a question, to be asked in a chat: of any file, and of data sets, where it is the first one.
QUESTIONS = ("prompt", "turns", "conversations", "question", "instruction")
FORMS = ("text", "messages", *QUESTIONS)
ROLES = ("system", "user", "assistant")
# The roles by their names in ShareGPT.
SPEAKERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant")}
# Keys of a question with those of its answer.
ANSWERED = {"instruction": ("output",), "question": ("answer",), "prompt": ("completion", "response")}
NO_ANSWER = "ANSWER"  # stands where the target's answer will, to learn what the template writes behind it
LAB_PROMPTS = "the lab's held-out prompts"
TASK_PROMPTS = "specsim's tasks"


@dataclass(frozen=True)
class Prompt:
    """Domain and token ids of a prompt.

    source : file that it was cut from, "" for a complete text
    place : file and line that it was read from, "" if not from a file
    chat : whether it is in the tokenizer's chat template
    followed : tokens between an answer and the next one, of a conversation of several turns
    answers : the data set's own answers, each with its end of text; none if it has none
    """

    domain: str
    tokens: list[int]
    source: str = ""
    place: str = field(default="", compare=False)
    chat: bool = field(default=False, compare=False)
    followed: Sequence[list[int]] = ()
    answers: Sequence[list[int]] = ()


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file of JSON Lines.

    Parameters
    ----------
    path : Path
        One object per line: {"text": ...}, a text to continue, {"messages": [...]}, a chat of {"role": ..., "content":
        ...}, formatted by the tokenizer's chat template, without answers that stand behind its last question, or
        {"prompt": ...}, a question, which becomes a chat, or a text to continue if the tokenizer has no template. So
        does the first question of a line of a common data set:
        {"turns": [...]} of MT-Bench and Spec-Bench, {"conversations": [...]} of ShareGPT, {"question": ...} of GSM8K,
        {"instruction": ..., "input": ...} of Alpaca. "domain" is optional (default: "category").
    tokenizer
        The pair's. A text that begins with the tokenizer's first special token does not get another.
    limit : int, optional
        Maximum number of prompts, spread evenly over the domains (default: all).

    Returns
    -------
    list of Prompt
        Domain and token ids of each.

    Raises
    ------
    InputError
        If the file does not exist, a line is not a prompt, or the tokenizer has no chat template.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import realrun
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "prompts.jsonl"
    ...     _ = path.write_text('{"text": "import os", "domain": "code"}')
    ...     prompts = realrun.read_prompts(path, pair.tokenizer)
    >>> prompts[0].domain
    'code'
    """
    prompts = [_prompt(row, place, tokenizer) for row, place in _rows(path)]
    return prompts if limit is None else spread(prompts, limit)


def read_conversations(path: Path, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> list[Prompt]:
    """Read conversations to train on from JSON Lines: each turn's question, and the data set's answers.

    A row is {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} of ShareGPT,
    {"turns": [...]}, the user's alone, or a question with its answer: {"instruction", "input", "output"} of Alpaca,
    {"question", "answer"} of GSM8K, {"prompt", "completion"}. All that `read_prompts` reads is read as well.

    eos_token_ids : of the target, which end an answer
    """
    return [_conversation(row, place, tokenizer, eos_token_ids) for row, place in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    check_prompts_file(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON text may hold other line separators
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    if not any(line.strip() for line in lines):
        raise InputError(f"{path} holds no prompt; add one JSON object per line")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield parse_json(line, place, invalid="correct the line"), place


def check_prompts_file(path: Path) -> None:
    """Raise InputError if the file does not exist."""
    if not path.is_file():
        raise InputError(f"prompt file {path} does not exist; give a JSON Lines file")


def check_training_prompts(target: str, path: Path | None) -> None:
    """Raise InputError if the file does not exist, or is missing for a target other than the lab's."""
    if path is not None:
        check_prompts_file(path)
    elif not is_lab(target):
        raise InputError(
            f'target {target} needs prompts to train on: give --prompts FILE, JSON Lines of {{"text": ...}} or '
            '{"messages": [...]}'
        )


def prompts_source(target: str, path: Path | None) -> str:
    """Name the source of a target's prompts for result files: a file's name, or by default the lab's or the tasks.

    Raises InputError, before models are loaded, if the file does not exist.
    """
    if path is not None:
        check_prompts_file(path)
        return path.name
    return LAB_PROMPTS if is_lab(target) else TASK_PROMPTS


def _prompt(row: Any, place: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    row = checked(row, place, dict[str, Any], invalid="give one JSON object per line")
    forms = [form for form in FORMS if form in row]
    if len(forms) != 1:
        raise InputError(
            f"{place} is not a prompt: it has {' and '.join(forms) or 'none'} of {', '.join(FORMS)}; give "
            "exactly one of them"
        )
    form, value = forms[0], row[forms[0]]
    if form in QUESTIONS:
        value = _first_question(form, row[form], row.get("input"), place)
        if tokenizer.chat_template:
            form, value = "messages", [{"role": "user", "content": value}]
    text = _chat_text(_asked(value, place), place, tokenizer) if form == "messages" else value
    if not isinstance(text, str):
        raise InputError(f"{place}: {form!r} is not a text; correct the line")
    begun = form == "messages" or bool(tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    tokens = tokenizer(text, add_special_tokens=not begun)["input_ids"]
    if not tokens:
        raise InputError(f"{place}: the prompt is empty; give some text")
    return Prompt(_domain(row, place), tokens, place=place, chat=form == "messages")


def _domain(row: dict[str, Any], place: str) -> str:
    given = next((row[key] for key in ("domain", "category") if row.get(key) is not None), "all")
    return checked(given, f"{place}: domain", str, invalid="correct the line")


def _asked(messages: Any, place: str) -> Any:
    """List a chat's turns without the answers behind its last question, which are the data set's."""
    if not isinstance(messages, list) or not messages:
        return messages
    turns = [_turn(turn) for turn in messages]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise InputError(f'{place}: "messages" holds answers alone; correct the line, or leave it out')
    return turns


def _turn(turn: Any) -> dict[str, Any]:
    """Read a turn of {"role", "content"}, or of {"from", "value"} of ShareGPT; parts of a text are joined."""
    turn = turn if isinstance(turn, dict) else {}
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    return {**turn, "role": SPEAKERS.get(str(role), role), "content": content}


def _first_question(form: str, value: Any, more: Any, place: str) -> str:
    """Return the user's first message of a data set's line; later turns answer another model. more : of its input"""
    if form == "turns" and isinstance(value, list):
        value = next(iter(value), None)
    elif form == "conversations" and isinstance(value, list):
        value = next((turn["content"] for turn in map(_turn, value) if turn["role"] == "user"), None)
    elif form == "instruction" and more:
        value = f"{value}\n\n{more}"
    if not isinstance(value, str) or not value:
        raise InputError(f"{place}: {form!r} holds no question of the user; correct the line, or leave it out")
    return value


def _conversation(row: Any, place: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Prompt:
    """Read a row as a conversation; one without answers and of a single turn is a prompt as any."""
    messages = _messages(row, place)
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if last < 0 or (last == 0 == len(messages) - 1):
        return _prompt(row, place, tokenizer)
    given = [message["role"] == "assistant" and message["content"] is not None for message in messages]
    if messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": None}]
    texts = [
        {**message, "content": NO_ANSWER if message["content"] is None else message["content"]} for message in messages
    ]
    asked, answers, end, tail = list[list[int]](), list[list[int]](), "", list[int]()
    for number, message in enumerate(texts):
        if message["role"] != "assistant":
            continue
        before, after = (_chat(texts[:count], place, tokenizer, count == number) for count in (number, number + 1))
        if not (before.startswith(end) and after.startswith(before)):
            raise InputError(f"{place}: the tokenizer's chat template changes earlier turns; give single questions")
        begun = bool(asked or tokenizer.chat_template)  # a template writes its own first token
        question = tokenizer(before[len(end) :], add_special_tokens=not begun)["input_ids"]
        answer = tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
        asked.append([*tail, *question])
        stop = next((at for at, token in enumerate(answer) if token in ends), None)
        answer, tail = (answer, []) if stop is None else (answer[: stop + 1], answer[stop + 1 :])
        if given[number : number + 1] == [True] and len(answers) == len(asked) - 1:  # all before are given
            answers.append(answer if stop is not None else [*answer, *ends[:1]])
        end = after
    if not asked[0]:
        raise InputError(f"{place}: the first question is empty; give some text")
    return Prompt(
        _domain(row, place),
        asked[0],
        place=place,
        chat=bool(tokenizer.chat_template),
        followed=asked[1:],
        answers=answers,
    )


def _messages(row: Any, place: str) -> list[dict[str, Any]]:
    """List a row's turns as {"role", "content"}, where the content of an answer that is not given is None.

    What is no conversation gives none.
    """
    if not isinstance(row, dict):
        return []
    messages: list[dict[str, Any]]
    if isinstance(turns := row.get("turns"), list):
        asked = [[{"role": "user", "content": turn}, {"role": "assistant", "content": None}] for turn in turns]
        messages = [message for pair in asked for message in pair][:-1]
    elif isinstance(row.get("messages"), list):
        messages = [_turn(turn) for turn in row["messages"]]
    elif isinstance(turns := row.get("conversations"), list):
        messages = [_turn(turn) for turn in turns]
        while messages and messages[0]["role"] == "assistant":  # a piece of a longer conversation
            messages = messages[1:]
    else:
        question = next((form for form in ANSWERED if form in row), None)
        answer = next((row[key] for key in ANSWERED.get(question or "", ()) if isinstance(row.get(key), str)), None)
        if question is None or answer is None:
            return []
        value = _first_question(question, row[question], row.get("input"), place)
        messages = [{"role": "user", "content": value}, {"role": "assistant", "content": answer}]
    known = all(
        message["role"] in ROLES
        and isinstance(message["content"], (str, type(None)) if message["role"] == "assistant" else str)
        for message in messages
    )
    return messages if known else []


def _chat(messages: Sequence[dict[str, str]], place: str, tokenizer: PreTrainedTokenizerBase, asks: bool) -> str:
    """Format a chat by the tokenizer's template, a line a message if it has none. asks : for the next answer"""
    if tokenizer.chat_template:
        return _chat_text(messages, place, tokenizer, asks)
    return "\n".join(message["content"] for message in messages) + "\n" * asks


def _chat_text(messages: Any, place: str, tokenizer: PreTrainedTokenizerBase, asks: bool = True) -> str:
    whole = isinstance(messages, list) and messages
    if not whole or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise InputError(f'{place}: "messages" is not a list of {{"role": ..., "content": TEXT}}; correct the line')
    if not tokenizer.chat_template:
        raise InputError(f'{place}: the tokenizer has no chat template for "messages"; give the whole text as "text"')
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(f"{place}: the tokenizer's chat template refuses it: {error}; correct the messages") from None


def training_prompts(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[Prompt]:
    """Make prompts to train drafters on, chats if the tokenizer has a template; see `training_questions`."""
    return [_prompt({"prompt": question}, "", tokenizer) for question in training_questions(count, seed)]


def around_question(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Give the tokens before a chat's first question, and those between its last token and the answer."""
    place = "a question to be made up"
    mark = "QUESTION"
    before, _, after = _chat_text([{"role": "user", "content": mark}], place, tokenizer).partition(mark)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))


def leave_out_long(prompts: Sequence[Prompt], longest: int) -> list[Prompt]:
    """Leave out prompts of more than `longest` tokens, and name them on standard error.

    InputError if all are longer.
    """
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= longest]
    long = [
        prompt.place or f"number {number}" for number, prompt in enumerate(prompts, 1) if len(prompt.tokens) > longest
    ]
    if not long:
        return fitting
    room = f"longer than the {max(longest, 0)} tokens that output and draft leave of the models' positions"
    if not fitting:
        raise InputError(f"all {len(prompts)} prompts are {room}; shorten them or --max-new-tokens")
    more = f" and {len(long) - NAMED_PROMPTS} more" if len(long) > NAMED_PROMPTS else ""
    which = f"{', '.join(long[:NAMED_PROMPTS])}{more}"
    print(f"prompts: {len(long)} of {len(prompts)} left out, as they are {room}: {which}", file=sys.stderr)
    return fitting


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Select `count` prompts in their order, as evenly over the domains as possible."""
    met: dict[str, int] = {}
    ranks = []
    for place, prompt in enumerate(prompts):
        met[prompt.domain] = met.get(prompt.domain, 0) + 1
        ranks.append((met[prompt.domain], place))
    return [prompts[place] for place in sorted(place for _, place in sorted(ranks)[:count])]


def lab_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int = 64, split: Split = "held_out"
) -> list[Prompt]:
    """Cut prompts from library files: program code, documentation prose, and tests.

    Each prompt is the prompt_tokens tokens before a cut: a line in the middle of a module (code) or of a test file
    (tests), or 40 % into a long docstring (prose). Each file gives a prompt; files are spread evenly over the split.
    Some distributions of Python leave the test files out; the other domains then share the count.
    """
    pools: dict[str, list[tuple[str, str]]] = {"code": [], "prose": [], "tests": []}
    for source in library_files(split):
        text = source.text
        line_end = text.find("\n", len(text) // 2) + 1
        spans = docstring_spans(text)
        if source.is_test:
            pools["tests"].append((text[:line_end], source.name))
        elif spans and len(pools["prose"]) <= len(pools["code"]):
            start, end = spans[len(spans) // 2]
            pools["prose"].append((text[: start + (end - start) * 2 // 5], source.name))
        else:
            pools["code"].append((text[:line_end], source.name))
    usable: dict[str, list[Prompt]] = {}
    for domain, contexts in sorted(pools.items()):
        cut = [
            Prompt(domain, tokenizer(context[-prompt_tokens * 16 :])["input_ids"][-prompt_tokens:], name)
            for context, name in contexts
        ]
        usable[domain] = [prompt for prompt in cut if len(prompt.tokens) == prompt_tokens]
    usable = {domain: pool for domain, pool in usable.items() if pool}
    prompts: list[Prompt] = []
    for number, (domain, pool) in enumerate(usable.items()):
        share = count // len(usable) + (number < count % len(usable))
        if len(pool) < share:
            raise InputError(
                f"the library's {split} files give {len(pool)} prompts of domain {domain}, {share} are needed; "
                "ask for fewer prompts"
            )
        stride = len(pool) / max(share, 1)
        prompts.extend(pool[int(i * stride)] for i in range(share))
    if not prompts:
        raise InputError(f"the library has no {split} source files; give prompts with --prompts")
    return prompts


def study_prompts(tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int = 64) -> list[Prompt]:
    """Cut prompts at line ends spread evenly over each held-out library file, as many per file as needed."""
    files = library_files("held_out")
    cuts = -(-count // len(files)) + 1
    prompts = []
    for number in range(1, cuts + 1):
        for source in files:
            end = source.text.find("\n", len(source.text) * number // (cuts + 1)) + 1
            tokens = tokenizer(source.text[:end][-16 * prompt_tokens :])["input_ids"][-prompt_tokens:]
            if len(tokens) == prompt_tokens:
                prompts.append(Prompt("tests" if source.is_test else "code", tokens, source.name))
    return prompts[:count]


def prompt_digest(prompts: Sequence[Prompt]) -> str:
    """Hash the tokens of all prompts."""
    return digest(json.dumps([prompt.tokens for prompt in prompts]))


def prompt_facts(prompts: Sequence[Prompt], source: str) -> dict[str, str | int]:
    """Describe the source, number and token digest of prompts, for result files."""
    return {"source": source or "not named", "count": len(prompts), "digest": prompt_digest(prompts)}
