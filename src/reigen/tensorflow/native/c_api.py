"""TensorFlow's C API for operations, declared for ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf

#: Letters of `_FUNCTIONS`.
_TYPES = {
    "v": None,
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "z": ctypes.c_size_t,
    "s": ctypes.c_char_p,
    "b": ctypes.c_bool,
}
#: What is used: the result, and the arguments.
_FUNCTIONS = {
    "NewStatus": "p",
    "DeleteStatus": "vp",
    "SetStatus": "vpis",
    "GetCode": "ip",
    "Message": "sp",
    "NewOpDefinitionBuilder": "ps",
    "OpDefinitionBuilderAddAttr": "vps",
    "OpDefinitionBuilderAddInput": "vps",
    "OpDefinitionBuilderAddOutput": "vps",
    "OpDefinitionBuilderSetIsStateful": "vpb",
    "OpDefinitionBuilderSetShapeInferenceFunction": "vpp",
    "RegisterOpDefinition": "vpp",
    "NewAsyncKernelBuilder": "pssppp",
    "RegisterKernelBuilder": "vspp",
    "OpKernelConstruction_GetAttrString": "vpspzp",
    "NumInputs": "ip",
    "GetInput": "vpipp",
    "ForwardInputOrAllocateOutput": "pppiipipp",
    "AllocateOutput": "ppiipizp",
    "DeleteTensor": "vp",
    "TensorData": "pp",
    "TensorType": "ip",
    "NumDims": "ip",
    "Dim": "lpi",
    "RunAsyncOpKernelDoneCallback": "vp",
    "OpKernelContext_Failure": "vpp",
    "NewShapeHandle": "p",
    "DeleteShapeHandle": "vp",
    "ShapeInferenceContextNumInputs": "lp",
    "ShapeInferenceContextGetInput": "vpipp",
    "ShapeInferenceContextSetOutput": "vpipp",
    "ShapeInferenceContextRankKnown": "ipp",
    "ShapeInferenceContextRank": "lpp",
    "ShapeInferenceContextVectorFromSize": "ppz",
    "ShapeInferenceContextSubshape": "vppllpp",
    "ShapeInferenceContextConcatenateShapes": "vppppp",
}
#: Those that may call Python, or that other threads of TensorFlow may have to wait for; the others keep Python's lock.
_RELEASING = {"RegisterOpDefinition", "RegisterKernelBuilder", "RunAsyncOpKernelDoneCallback"}


class MissingFunctionError(Exception):
    """Error for a build of TensorFlow without a function that is needed."""


class CApi:
    """The functions, as attributes, without ``TF_``.

    Raises:
        MissingFunctionError: one does not exist.
        OSError: there is no library.
    """

    def __init__(self) -> None:
        self.path = library_path()
        library, short = ctypes.CDLL(str(self.path)), ctypes.PyDLL(str(self.path))
        for name, signature in _FUNCTIONS.items():
            try:
                function: Any = getattr(library if name in _RELEASING else short, f"TF_{name}")
            except AttributeError:
                raise MissingFunctionError(f"{self.path.name} has no TF_{name}") from None
            function.restype, *function.argtypes = (_TYPES[letter] for letter in signature)
            setattr(self, name, function)
        #: for calls whose result tells whether they succeeded; of all threads
        self.status: int = self.NewStatus()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def library_path() -> Path:
    """Return TensorFlow's library with the C API."""
    return Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"
