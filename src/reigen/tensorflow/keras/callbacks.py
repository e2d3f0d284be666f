"""Callbacks for ``fit`` of ``tf.keras``: those of `reigen.keras.callbacks`, or the same for the legacy Keras."""

from reigen.tensorflow.keras.choice import IS_LEGACY

if IS_LEGACY:
    from reigen.tensorflow.keras.legacy_callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
else:
    from reigen.keras.callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
