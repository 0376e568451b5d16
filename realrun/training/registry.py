"""All trainings. To add one: a file with settings and a run function, and a line here."""

from __future__ import annotations

from realrun.training.common.trainings import Training
from realrun.training.eagle import EAGLE
from realrun.training.edd import EDD, VDM
from realrun.training.eesd import EESD
from realrun.training.medusa2 import MEDUSA
from realrun.training.predictor.train import PREDICTOR
from realrun.training.self_sd.search import SELF_SD
from realrun.training.space import SPACE

TRAININGS: list[Training] = [EESD, MEDUSA, SELF_SD, EDD, VDM, EAGLE, SPACE, PREDICTOR]
