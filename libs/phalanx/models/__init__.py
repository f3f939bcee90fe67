"""Models in plain torch: the built-in decoder, the protocol that a user's own model implements, Hugging Face mapping
both ways.
"""

from __future__ import annotations

from phalanx.models.decoder import Decoder, DecoderArgs
from phalanx.models.protocol import (
    HasInitialWeights,
    HasParallelPlan,
    HasStages,
    Initial,
    LanguageModel,
    Style,
    split_evenly,
)

__all__ = [
    "Decoder",
    "DecoderArgs",
    "HasInitialWeights",
    "HasParallelPlan",
    "HasStages",
    "Initial",
    "LanguageModel",
    "Style",
    "split_evenly",
]
