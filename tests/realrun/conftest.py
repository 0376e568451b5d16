"""The lab's models, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

from realrun.measure.profile import LEAST_SWEEPS
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from tests.support.quick import FEWEST_SWEEPS, quick_measurements


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small run no slower on one thread, and a shared machine disturbs them less."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few sweeps, and the fewest where nothing depends on them."""
    fewest = request.path.parent.name in ("experiment", "leaderboard")
    with quick_measurements(FEWEST_SWEEPS if fewest else LEAST_SWEEPS):
        yield


@pytest.fixture(scope="session")
def lab_pair64() -> Pair:
    return load_pair(dtype="float64")


@pytest.fixture(scope="session")
def lab_pair32() -> Pair:
    return load_pair(dtype="float32")


@pytest.fixture(scope="session")
def prompts(lab_pair64: Pair) -> list[Prompt]:
    """21 prompts of 64 tokens, 7 per domain."""
    return lab_prompts(lab_pair64.tokenizer, 21)
