"""Optimizers by names and numbers, for servers, local stores and trainers. No framework."""

from reigen.files import check_can_be_written, write_atomically
from reigen.optim.array_files import packed, unpacked
from reigen.optim.base import Optimizer, Step, states_type
from reigen.optim.optimizer_state import Slot
from reigen.optim.registry import OPTIMIZERS, create, from_spec
from reigen.optim.rules import LAMB, LARS, NAG, SGD, AdaGrad, Adam, AdamW, Ftrl, RMSProp, Signum, Test
from reigen.optim.schedules import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler, Schedule
from reigen.optim.states import Piece, States, piece_of, slot_of
from reigen.optim.updater import Updater

__all__ = [  # noqa: RUF022  sorted as in the other packages: LAMB is no constant
    "AdaGrad",
    "Adam",
    "AdamW",
    "CosineScheduler",
    "FactorScheduler",
    "Ftrl",
    "LAMB",
    "LARS",
    "MultiFactorScheduler",
    "NAG",
    "OPTIMIZERS",
    "Optimizer",
    "Piece",
    "PolyScheduler",
    "RMSProp",
    "SGD",
    "Schedule",
    "Signum",
    "Slot",
    "States",
    "Step",
    "Test",
    "Updater",
    "check_can_be_written",
    "create",
    "from_spec",
    "packed",
    "piece_of",
    "slot_of",
    "states_type",
    "unpacked",
    "write_atomically",
]
