"""Collectives on tensors where they lie, in the memory of a GPU."""

from reigen.backends.device.backend import DeviceBackend
from reigen.backends.device.base import (
    Device,
    DeviceArray,
    DeviceEvent,
    DeviceGroup,
    DeviceStream,
    DeviceWork,
    HostOrDeviceArray,
)
from reigen.backends.device.store import ReplicatedStore

__all__ = [
    "Device",
    "DeviceArray",
    "DeviceBackend",
    "DeviceEvent",
    "DeviceGroup",
    "DeviceStream",
    "DeviceWork",
    "HostOrDeviceArray",
    "ReplicatedStore",
]
