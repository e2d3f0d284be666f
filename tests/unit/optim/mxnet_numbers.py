"""What MXNet 1.9.1 makes of a weight: printed by the real one (mxnet==1.9.1, numpy==1.23.5), eight digits.

Each entry: name of the optimizer, its parameters, and the weight after four updates of `WEIGHT` with `GRADIENTS`
through ``mx.optimizer.get_updater``. For `MXNET_SPARSE` weight and gradients are row-sparse of shape (3, 2) and only
the rows `SPARSE_ROWS` of each gradient are there.
"""

from typing import Any

WEIGHT = [0.5, -1.25, 2.0, 0.0, -0.75, 3.5]
GRADIENTS = [
    [0.25, -3.0, 1.5, 0.0, 0.5, -0.125],
    [-1.0, 0.75, 2.5, 0.0, -0.5, 1.0],
    [4.0, 0.5, -1.5, 0.0, 0.25, 0.375],
    [0.125, -0.5, -2.0, 0.0, 1.0, -4.0],
]
SPARSE_ROWS = [[0, 2], [1], [0, 1, 2], [2]]

_COMMON = {"learning_rate": 0.05, "wd": 0.5, "rescale_grad": 0.5, "clip_gradient": 1.0}

Case = tuple[str, dict[str, Any], list[float]]

MXNET: dict[str, Case] = {
    "sgd": ("sgd", {**_COMMON}, [0.41794169, -1.1007786, 1.8116498, 0.0, -0.70856255, 3.1828978]),
    "sgd with momentum": (
        "sgd",
        {**_COMMON, "momentum": 0.9},
        [0.33956784, -0.87703371, 1.4335302, 0.0, -0.63096929, 2.7151845],
    ),
    "nag": (
        "nag",
        {**_COMMON, "momentum": 0.9, "wd": 0.0},
        [0.41894314, -1.1198512, 1.8711089, 0.0, -0.82263869, 3.4964161],
    ),
    "signum": (
        "signum",
        {**_COMMON, "momentum": 0.9, "wd_lh": 0.2},
        [0.28327802, -1.0037252, 1.7241722, 0.0, -0.52342701, 3.1650665],
    ),
    "signsgd": (
        "signum",
        {**_COMMON, "momentum": 0.0},
        [0.35428226, -1.1295482, 1.8122517, 0.0, -0.77532774, 3.1629696],
    ),
    "adam": (
        "adam",
        {**_COMMON, "epsilon": 0.01},
        [0.42034999, -1.1140794, 1.8581698, 0.0, -0.66004115, 3.3490574],
    ),
    "adagrad": (
        "adagrad",
        {**_COMMON, "eps": 0.01},
        [0.41499823, -1.1001114, 1.7767973, 0.0, -0.74365234, 3.1683614],
    ),
    "rmsprop": (
        "rmsprop",
        {**_COMMON, "epsilon": 0.01, "gamma1": 0.8},
        [0.34176773, -1.0016305, 1.8050094, 0.0, -0.60205305, 3.2669148],
    ),
    "rmsprop with clipped weights": (
        "rmsprop",
        {**_COMMON, "epsilon": 0.01, "clip_weights": 1.5},
        [0.29467148, -0.92900872, 1.4311036, 0.0, -0.5737173, 1.3880711],
    ),
    "rmsprop, centred": (
        "rmsprop",
        {**_COMMON, "epsilon": 0.01, "centered": True, "gamma2": 0.8},
        [0.058624551, -0.54637253, 1.2599396, 0.0, -0.24062903, 2.5943515],
    ),
    "ftrl": (
        "ftrl",
        {**_COMMON, "lamda1": 0.5, "beta": 2.0},
        [0.0075113629, -0.39452758, 0.52670127, 0.0, -0.08370591, 0.096588224],
    ),
    "lamb": (
        "lamb",
        {**_COMMON, "epsilon": 0.001},
        [0.3356272, -0.94712251, 1.571503, 0.0, -0.7690866, 2.9847071],
    ),
    "lamb, bounded, not corrected": (
        "lamb",
        {**_COMMON, "epsilon": 0.001, "lower_bound": 0.5, "upper_bound": 2.0, "bias_correction": False},
        [0.39793459, -1.0966545, 1.8180739, 0.0, -0.85212654, 3.3529513],
    ),
    "lars": (
        "lars",
        {**_COMMON, "momentum": 0.9, "eta": 0.01, "eps": 0.001},
        [0.49834231, -1.2457013, 1.9932107, 0.0, -0.74858624, 3.4909694],
    ),
    "test": ("test", {"rescale_grad": 0.5}, [2.1875, -2.375, 2.25, 0.0, -0.125, 2.125]),
}

MXNET_SPARSE: dict[str, Case] = {
    "sgd": (
        "sgd",
        {**_COMMON, "momentum": 0.9},
        [0.40234375, -1.0789063, 1.8, 0.0, -0.71646482, 3.0601661],
    ),
    "sgd, not lazy": (
        "sgd",
        {**_COMMON, "momentum": 0.9, "lazy_update": False},
        [0.27730221, -0.8404907, 1.5041602, 0.0, -0.66366452, 2.780575],
    ),
    "adam": (
        "adam",
        {**_COMMON, "epsilon": 0.01},
        [0.44201019, -1.1828831, 1.9447211, 0.0, -0.70827568, 3.4034092],
    ),
    "adam, not lazy": (
        "adam",
        {**_COMMON, "epsilon": 0.01, "lazy_update": False},
        [0.37846038, -1.1023297, 1.8477107, 0.0, -0.66689324, 3.3490574],
    ),
    "adagrad": (
        "adagrad",
        {**_COMMON, "eps": 0.01, "wd": 0.0},
        [0.41158515, -1.2123182, 1.9801526, 0.0, -0.86047101, 3.5329919],
    ),
    "ftrl": (
        "ftrl",
        {**_COMMON, "lamda1": 0.5, "beta": 2.0},
        [0.0, -0.39252037, 0.64781398, 0.0, -0.089258596, 0.10651731],
    ),
}

#: SGD with momentum 0.9 and ``multi_precision`` on float16 weights and gradients.
MXNET_HALF = [0.339599609375, -0.876953125, 1.43359375, 0.0, -0.630859375, 2.71484375]
HALF_PARAMETERS = {**_COMMON, "momentum": 0.9, "multi_precision": True}

#: Rates of updates 1 to 10: name, parameters, rates.
MXNET_SCHEDULES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "factor",
        {"step": 3, "factor": 0.5, "base_lr": 1.0, "warmup_steps": 4, "warmup_begin_lr": 0.2},
        [0.4, 0.6, 0.8, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125],
    ),
    (
        "factor",
        {"step": 1, "factor": 0.1, "base_lr": 1.0, "stop_factor_lr": 0.05},
        [1.0, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05],
    ),
    (
        "multifactor",
        {"step": [2, 5], "factor": 0.1, "base_lr": 1.0},
        [1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01],
    ),
    (
        "poly",
        {"max_update": 8, "base_lr": 1.0, "final_lr": 0.1, "warmup_steps": 2},
        [0.5, 1.0, 0.725, 0.5, 0.325, 0.2, 0.125, 0.1, 0.1, 0.1],
    ),
    (
        "cosine",
        {
            "max_update": 8,
            "base_lr": 1.0,
            "final_lr": 0.1,
            "warmup_steps": 2,
            "warmup_begin_lr": 0.5,
            "warmup_mode": "constant",
        },
        [0.5, 1.0, 0.93971143, 0.775, 0.55, 0.325, 0.16028857, 0.1, 0.1, 0.1],
    ),
]
