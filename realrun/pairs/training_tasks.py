"""Questions to train drafters on: templates of this project, filled with subjects, numbers and library text.

They are of the same six kinds as the tasks that drafters are measured on (tasks.jsonl), and share no question with
them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from realrun.pairs.library_text import docstring_spans, library_files

SUBJECTS = (
    "bees", "bicycles", "the moon", "bread", "glaciers", "chess", "rivers", "clocks", "the violin", "tea", "bridges",
    "volcanoes", "paper", "the stock exchange", "sleep", "rainbows", "libraries", "trains", "coral reefs", "armies",
    "vaccines", "gardens", "electric cars", "poetry", "maps", "owls", "photography", "soap", "tides", "democracy",
    "the human heart", "salt", "kites", "earthquakes", "cheese", "satellites", "wool", "mushrooms", "printing",
    "swimming", "dreams", "insurance", "windmills", "penguins", "glass", "the internet", "hospitals", "jazz", "deserts",
    "batteries", "taxes", "mountains", "football", "elephants", "concrete", "chocolate", "the night sky", "algebra",
)  # fmt: skip
QUESTIONS = (
    "What are {}, and why do they matter?", "Explain {} to a child of eight.", "Give me five facts about {}.",
    "Write a short story about {}.", "Write a poem of eight lines about {}.", "How did {} change the world?",
    "What should a beginner know about {}?", "Write a polite email in which I ask an expert about {}.",
    "List three advantages and three disadvantages of {}.", "What is the most common mistake people make about {}?",
    "Describe a day in the life of somebody who works with {}.", "Compare {} and {}.", "Write a dialogue about {}.",
    "Plan a school lesson about {}.", "Pretend you are an expert on {} and introduce yourself.",
    "Suggest a title and an outline for a book about {}.", "What would happen if there were no {}?",
)  # fmt: skip
ABOUT_PASSAGES = (
    "Read this text and answer in one sentence: what is it about?\n\n{}",
    "Which three words are the most important in this passage, and why?\n\n{}",
    "Passage:\n{}\n\nQuestion: what does the reader have to watch out for? Quote the passage.",
    "Answer only from the text below. What is it for?\n\n{}",
)
SUMMARIES = (
    "Summarise this in two sentences.\n\n{}", "Give the main points as a list.\n\n{}", "TL;DR please:\n\n{}",
    "Write a headline and one sentence for this text.\n\n{}",
)  # fmt: skip
EDITS = (
    "Correct the spelling and grammar, and change nothing else:\n\n{}", "Rewrite this in simpler words.\n\n{}",
    "Make this text more formal.\n\n{}", "Repeat this text, with every sentence on its own line.\n\n{}",
    "Shorten this to half its length.\n\n{}", "Put this into the past tense.\n\n{}",
)  # fmt: skip
ABOUT_CODE = (
    "What does this function do?\n\n```python\n{}\n```", "Add comments to this code.\n\n```python\n{}\n```",
    "Add type annotations to this code and repeat it.\n\n```python\n{}\n```",
    "Rename the variables so that they are easier to read.\n\n```python\n{}\n```",
    "Write a test for this function.\n\n```python\n{}\n```", "Is there a bug in this code?\n\n```python\n{}\n```",
)  # fmt: skip
PROGRAMS = (
    "reverses a string", "counts the words of a file", "checks whether a number is prime", "merges two sorted lists",
    "finds the longest word", "converts Celsius to Fahrenheit", "removes duplicates from a list", "flattens lists",
    "computes the average of a list", "counts vowels", "sorts dictionaries by a key", "reads a CSV file",
    "validates an email address", "rolls two dice", "prints a multiplication table", "finds common elements",
    "computes a factorial", "transposes a matrix", "groups words by their first letter", "checks for a palindrome",
    "generates a password", "computes compound interest", "counts the days between two dates", "parses a URL",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C", "SQL", "Java", "Bash")
NAMES = ("Ana", "Ben", "Carla", "Dev", "Ella", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
SUMS = (
    "{n} has {a} apples and buys {b} bags of {c} apples each. How many apples does {n} have now?",
    "A train travels {a} km in {c} hours. How far does it travel in {b} hours at the same speed?",
    "{n} earns {a} dollars an hour and works {c} hours a day for {b} days. How much is that?",
    "A box of {c} pencils costs {b} dollars. How much do {a} boxes cost, and how many pencils are in them?",
    "{n} reads {c} pages a day. How many days does a book of {a} pages take? Explain step by step.",
    "What is {b} percent of {a}? Show your work.",
    "There are {a} seats in {c} rows. If {b} rows are empty, how many seats are taken?",
)


def training_questions(count: int, seed: int = 0) -> list[str]:
    """Make `count` different questions, the six kinds in turn; the same for a seed and a Python version.

    Examples
    --------
    >>> questions = training_questions(6)
    >>> questions == training_questions(6)
    True
    """
    rng = np.random.default_rng(seed)
    passages, functions = _library()

    def pick(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    def numbers() -> dict[str, int]:
        return {"a": int(rng.integers(20, 400)), "b": int(rng.integers(2, 30)), "c": int(rng.integers(2, 13))}

    kinds: tuple[Callable[[], str], ...] = (
        lambda: pick(QUESTIONS).format(pick(SUBJECTS), pick(SUBJECTS)),
        lambda: pick(ABOUT_PASSAGES).format(pick(passages)),
        lambda: pick(SUMMARIES).format(pick(passages)),
        lambda: (
            pick(ABOUT_CODE).format(pick(functions))
            if rng.random() < 0.6
            else f"Write a {pick(LANGUAGES)} program that {pick(PROGRAMS)} and then {pick(PROGRAMS)}."
        ),
        lambda: pick(SUMS).format(n=pick(NAMES), **numbers()),
        lambda: pick(EDITS).format(pick(passages)),
    )

    def questions() -> Iterator[str]:
        seen = set[str]()
        while True:
            for kind in kinds:
                question = kind()
                while question in seen:
                    question = kind()
                seen.add(question)
                yield question

    return list(islice(questions(), count))


def _library() -> tuple[list[str], list[str]]:
    """Cut passages out of docstrings and functions out of code of the library files to train on."""
    passages, functions = [], []
    for source in library_files("train"):
        if source.is_test:  # which some distributions leave out
            continue
        for start, end in docstring_spans(source.text):
            paragraphs = textwrap.dedent(source.text[start:end]).strip("\"'rR \n").split("\n\n")
            passages += [" ".join(p.split()) for p in paragraphs if 200 <= len(p) <= 900 and ">>>" not in p]
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError):
            continue
        lines = source.text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 5 <= (node.end_lineno or 0) - node.lineno <= 20:
                functions.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return passages, functions
