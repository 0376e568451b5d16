"""Drafters that have names: the lab's, with the command that trains each, and other targets'."""

from __future__ import annotations

from pathlib import Path

from realrun.pairs.drafter_files import FILE
from realrun.pairs.gguf_models import PACKAGES
from specsim.io.errors import InputError

SHIPPED = Path(__file__).parents[1] / "weights"  # what the package ships, by the names of target and drafter
LAB_WEIGHTS = SHIPPED / "lab"
TRAINED_HERE = Path("lab-weights")  # in the working folder, where the commands of RECIPES write
LAB_PREFIX = "lab:"  # before the name of a drafter of the lab's

# Of `realrun train`, without --out. None for weights that the package ships.
RECIPES: dict[str, str | None] = {
    "eesd": "eesd --layers 2 --tokens 4 --dtype bfloat16",
    "medusa-1": "medusa --heads 4 --lr 0.005 --tokens 5 --dtype bfloat16",
    "medusa-2": "medusa --joint --heads 4 --heads-from lab-weights/medusa-1 --lambda-0 0.1 --backbone-lr 0.0005 "
    "--dtype bfloat16",
    "self-sd": None,
    "edd": "edd --tokens 5 --dtype bfloat16",
    "eagle": None,
    "space": "space --lr 0.003 --batch 4 --window 128 --tokens 2 --dtype bfloat16",
}
LAB_DRAFTERS = tuple(RECIPES)


def has_lab_drafter(name: str) -> bool:
    """Check whether the weights of this drafter are shipped or were trained in the working folder."""
    return any((folder / name / FILE).is_file() for folder in (LAB_WEIGHTS, TRAINED_HERE))


def shipped_drafter(target: str, name: str) -> Path | None:
    """Find the folder of a drafter that the package ships for this target, if the target is not the lab's."""
    folder = SHIPPED / target / name
    return folder if target in PACKAGES and (folder / FILE).is_file() else None


def lab_drafter(name: str) -> Path:
    """Find the folder of a lab drafter; InputError with the training command if its weights are missing."""
    for folder in (LAB_WEIGHTS, TRAINED_HERE):
        if (folder / name / FILE).is_file():
            return folder / name
    raise InputError(f"the lab's drafter {name} is not trained yet; run: {training_command(name)}")


def training_command(name: str) -> str:
    """Write the command that trains a lab drafter."""
    return f"realrun train {RECIPES[name]} --out {TRAINED_HERE / name}"
