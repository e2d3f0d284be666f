"""Structures of XLA's foreign function interface (xla/ffi/api/c_api.h), versions 0.1 to 0.4, for ctypes.

Each begins with its size, as the runtime was compiled; within a major version fields are only added at the end. What
is used here has been the same in all of the versions.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p

#: Versions of the interface that have been tried: a runtime takes a handler of one of them, or refuses it. The newest
#: is offered first.
KNOWN_VERSIONS = ((0, 4), (0, 3), (0, 2), (0, 1))

#: `XLA_FFI_Extension_Metadata`, `XLA_FFI_AttrType_STRING`, `XLA_FFI_DataType_TOKEN`, `XLA_FFI_ExecutionStage_EXECUTE`
METADATA_EXTENSION, STRING_ATTRIBUTE, TOKEN_TYPE, EXECUTE_STAGE = 1, 4, 17, 3
#: `XLA_FFI_DataType` of the element types that can be communicated
ELEMENT_TYPES = {
    1: "bool",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
}

#: `XLA_FFI_Handler`, and every function of `XLA_FFI_Api` that is used: a pointer in, an error or NULL out.
FUNCTION = ctypes.CFUNCTYPE(c_void_p, c_void_p)


class FfiVersion(ctypes.Structure):
    """`XLA_FFI_Api_Version`."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class FfiApi(ctypes.Structure):
    """`XLA_FFI_Api`: the runtime's functions."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", FfiVersion),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_get_message", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", c_void_p),
        ("type_register", c_void_p),
        ("execution_context_get", c_void_p),
        ("state_set", c_void_p),
        ("state_get", c_void_p),
        ("device_memory_allocate", c_void_p),
        ("device_memory_free", c_void_p),
        ("thread_pool_schedule", c_void_p),
        ("thread_pool_num_threads", c_void_p),
        ("future_create", c_void_p),
        ("future_set_available", c_void_p),
        ("future_set_error", c_void_p),
        ("run_id_get", c_void_p),
        ("device_ordinal_get", c_void_p),
    ]


class FfiBuffers(ctypes.Structure):
    """`XLA_FFI_Args` and `XLA_FFI_Rets`."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("items", POINTER(c_void_p)),
    ]


class FfiAttributes(ctypes.Structure):
    """`XLA_FFI_Attrs`."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
    ]


class FfiSpan(ctypes.Structure):
    """`XLA_FFI_ByteSpan`: text without an end."""

    _fields_ = [("pointer", c_void_p), ("length", c_size_t)]


class FfiBuffer(ctypes.Structure):
    """`XLA_FFI_Buffer`: contents of a tensor."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dimensions", POINTER(c_int64)),
    ]


class FfiCallFrame(ctypes.Structure):
    """`XLA_FFI_CallFrame`: a call of a handler."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("api", POINTER(FfiApi)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", FfiBuffers),
        ("results", FfiBuffers),
        ("attributes", FfiAttributes),
        ("future", c_void_p),
    ]


class FfiMetadata(ctypes.Structure):
    """`XLA_FFI_Metadata`, as far as all versions have it."""

    _fields_ = [("struct_size", c_size_t), ("version", FfiVersion), ("traits", c_uint32)]


class FfiMetadataExtension(ctypes.Structure):
    """`XLA_FFI_Metadata_Extension`: the runtime asks for a handler's version."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(FfiMetadata)),
    ]


class FfiErrorArguments(ctypes.Structure):
    """`XLA_FFI_Error_Create_Args`."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class FfiMessageArguments(ctypes.Structure):
    """`XLA_FFI_Error_GetMessage_Args`."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("error", c_void_p), ("message", c_char_p)]


class FfiFutureArguments(ctypes.Structure):
    """`XLA_FFI_Future_Create_Args`, `XLA_FFI_Future_SetAvailable_Args`."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("future", c_void_p)]


class FfiFutureErrorArguments(ctypes.Structure):
    """`XLA_FFI_Future_SetError_Args`."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("future", c_void_p), ("error", c_void_p)]


class FfiContextArguments(ctypes.Structure):
    """`XLA_FFI_RunId_Get_Args`, and `XLA_FFI_DeviceOrdinal_Get_Args`, whose number has 32 bits."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("number", c_int64)]


class FfiHandlerBundle(ctypes.Structure):
    """`XLA_FFI_Handler_Bundle`."""

    _fields_ = [("instantiate", c_void_p), ("prepare", c_void_p), ("initialize", c_void_p), ("execute", c_void_p)]


class FfiRegisterArguments(ctypes.Structure):
    """`XLA_FFI_Handler_Register_Args`."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("name", FfiSpan),
        ("platform", FfiSpan),
        ("bundle", FfiHandlerBundle),
        ("traits", c_uint32),
    ]
