"""The registry of trainings. To add a training, write a file with its settings and run function, and a line here."""

from __future__ import annotations

from realrun.train.common.trainings import Training
from realrun.train.draft import DRAFT_MODEL
from realrun.train.eagle import EAGLE, EAGLE3
from realrun.train.edd import EDD, VDM
from realrun.train.eesd import EESD
from realrun.train.medusa import MEDUSA
from realrun.train.predictor import PREDICTOR
from realrun.train.self_sd import SELF_SD
from realrun.train.space import SPACE

TRAININGS: list[Training] = [EESD, MEDUSA, SELF_SD, EDD, VDM, EAGLE, EAGLE3, DRAFT_MODEL, SPACE, PREDICTOR]
