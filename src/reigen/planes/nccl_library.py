"""libnccl, as far as the NCCL plane needs it: a dozen C functions, called through ctypes.

Which NCCL, and why
-------------------
The one that torch has loaded. CUDA tensors come from torch, and a torch that makes them carries a libnccl.so.2 that
fits its CUDA (wheel ``nvidia-nccl-cu12`` or ``-cu13``); the dynamic loader gives the same library to whoever asks for
it by that name. A second NCCL in the process would be another version beside it.

nccl4py was looked at (0.6.0, wheel for CPython 3.11, 2026). Its licence would allow it: ``License-Expression:
Apache-2.0``, and LICENSE.txt is that licence, though the description beside it still says that it "follows the NCCL
SLA". What speaks against it is what it brings: installed without an extra it cannot be imported (``nccl.core`` needs
``cuda.core``, which needs ``cuda.bindings``), and its extras install cuda-bindings, nvidia-cutlass-dsl (a kernel
compiler) and an NCCL wheel of 300 MB and more beside torch's. It calls the same functions that are called here.

Compatibility: functions, enumerations and structures below are those of nccl.h, which NCCL only adds to. The
configuration is that of NCCL 2.14, the first with non-blocking communicators; later ones take the fields that it lacks
at their defaults (by the ``size`` and ``version`` in it). What was tried: the declarations against libnccl 2.32.3 on a
machine without a GPU (loads, tells its version, gives a unique id, and refuses to make a communicator for want of a
driver). Written against the documented interface; not run on a GPU yet.

Security: NCCL connects the ranks by itself. Its connections are neither authenticated with the job's secret nor
encrypted; the unique id, which a stranger would have to know, travels over the job's own, authenticated plane. NCCL
chooses the interface (``NCCL_SOCKET_IFNAME``): GPUs of several hosts belong into a network of their own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reigen.errors import CollectiveError

#: ncclResult_t
SUCCESS, IN_PROGRESS = 0, 7
#: The first version with non-blocking communicators.
_MIN_VERSION = 21400
_SONAME = "libnccl.so.2"
_ID_BYTES = 128
_MAGIC = 0xCAFEBEEF
_HOST_IMMEDIATE = 1

_Pointer, _Int, _Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_To = ctypes.POINTER


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_ubyte * _ID_BYTES)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.14."""

    _fields_ = [("size", _Size), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", _Int)]


#: Parameters of each function; all but two return an ncclResult_t.
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_To(_Int)],
    "ncclGetUniqueId": [_To(UniqueId)],
    "ncclCommInitRankConfig": [_To(_Pointer), _Int, UniqueId, _Int, _To(Config)],
    "ncclCommGetAsyncError": [_Pointer, _To(_Int)],
    "ncclCommFinalize": [_Pointer],
    "ncclCommDestroy": [_Pointer],
    "ncclCommAbort": [_Pointer],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_Pointer, _Pointer, _Size, _Int, _Int, _Pointer, _Pointer],
    "ncclReduce": [_Pointer, _Pointer, _Size, _Int, _Int, _Int, _Pointer, _Pointer],
    "ncclReduceScatter": [_Pointer, _Pointer, _Size, _Int, _Int, _Pointer, _Pointer],
    "ncclBroadcast": [_Pointer, _Pointer, _Size, _Int, _Int, _Pointer, _Pointer],
    "ncclAllGather": [_Pointer, _Pointer, _Size, _Int, _Pointer, _Pointer],
    "ncclSend": [_Pointer, _Size, _Int, _Int, _Pointer, _Pointer],
    "ncclRecv": [_Pointer, _Size, _Int, _Int, _Pointer, _Pointer],
    "ncclRedOpCreatePreMulSum": [_To(_Int), _Pointer, _Int, _Int, _Pointer],
    "ncclRedOpDestroy": [_Int, _Pointer],
}
_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [_Int], "ncclGetLastError": [_Pointer]}


class Communicator:
    """A handle of NCCL's, which writes it again when initialization ends: its storage lives as long as it is used."""

    def __init__(self) -> None:
        self.storage = _Pointer()

    @property
    def handle(self) -> int | None:
        """The ``ncclComm_t``."""
        return self.storage.value


class Nccl:
    """The functions, with their results looked at. What they raise is a CollectiveError that says which one failed.

    Args:
        functions: has them by their names in C: a ``ctypes.CDLL``, or what stands in for one in a test.
        path: where it is from.
    """

    def __init__(self, functions: Any, path: str) -> None:
        self.functions = functions
        self.path = path
        version = _Int()
        self.check(functions.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
        #: as NCCL_VERSION_CODE: 22703 for 2.27.3
        self.version = version.value

    @property
    def version_text(self) -> str:
        """For people."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def check(self, result: int, what: str, comm: Communicator | None = None) -> None:
        """Accept success, and the beginning of something that is not over yet."""
        if result not in (SUCCESS, IN_PROGRESS):
            raise CollectiveError(f"NCCL {self.version_text}: {what} failed: {self.text(result, comm)}")

    def text(self, result: int, comm: Communicator | None) -> str:
        """What a result means, and what NCCL says of its last failure."""
        meaning = self.functions.ncclGetErrorString(result).decode(errors="replace")
        last = self.functions.ncclGetLastError(None if comm is None else comm.handle)
        told = last.decode(errors="replace").strip() if last else ""
        return f"{meaning} ({told})" if told else str(meaning)

    def unique_id(self) -> bytes:
        """What the ranks of a new communicator have to know; NCCL listens for them from now on."""
        unique = UniqueId()
        self.check(self.functions.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        return bytes(unique)

    def begin(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Begin to make a non-blocking communicator; `progress` tells when it is there."""
        comm = Communicator()
        config = Config(ctypes.sizeof(Config), _MAGIC, _MIN_VERSION, 0)
        unique = UniqueId.from_buffer_copy(unique_id)
        out = ctypes.byref(comm.storage)
        self.check(
            self.functions.ncclCommInitRankConfig(out, size, unique, rank, ctypes.byref(config)),
            "ncclCommInitRankConfig",
        )
        return comm

    def progress(self, comm: Communicator) -> int:
        """Whether the communicator is at rest (SUCCESS), not yet (IN_PROGRESS), or has failed (anything else)."""
        state = _Int()
        self.check(
            self.functions.ncclCommGetAsyncError(comm.handle, ctypes.byref(state)), "ncclCommGetAsyncError", comm
        )
        return state.value

    def premul_sum(self, factor: bytes, datatype: int, comm: Communicator) -> int:
        """An operator that multiplies each input by ``factor``, an element of that type, and adds."""
        op = _Int()
        scalar = ctypes.create_string_buffer(factor, len(factor))
        create = self.functions.ncclRedOpCreatePreMulSum
        result = create(ctypes.byref(op), ctypes.addressof(scalar), datatype, _HOST_IMMEDIATE, comm.handle)
        self.check(result, "ncclRedOpCreatePreMulSum", comm)
        return op.value


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the functions take and return.

    Raises:
        AttributeError: it lacks one of them.
    """
    for names, result in ((_SIGNATURES, _Int), (_TEXTS, ctypes.c_char_p)):
        for name, parameters in names.items():
            function = getattr(library, name)
            function.argtypes, function.restype = parameters, result
    return library


@functools.cache
def load() -> tuple[Nccl | None, str]:
    """``(NCCL, where it is from)``, or ``(None, why there is none)``. The first that is found serves."""
    reasons = []
    for path, mode in _candidates():
        try:
            nccl = Nccl(declare(ctypes.CDLL(path, mode=mode)), path)
        except (OSError, AttributeError, CollectiveError) as error:
            reasons.append(str(error))
            continue
        if nccl.version >= _MIN_VERSION:
            return nccl, f"NCCL {nccl.version_text} ({path})"
        reasons.append(f"{path} is NCCL {nccl.version_text}, and 2.14 is the first that can be used")
    return None, f"there is no NCCL: {reasons[-1]}"


def _candidates() -> Iterator[tuple[str, int]]:
    """Files and ``dlopen`` modes: what the process has loaded, what torch's wheels brought, what the system has."""
    yield _SONAME, os.RTLD_NOLOAD | os.RTLD_NOW
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib" / _SONAME
        if path.exists():
            yield str(path), os.RTLD_NOW
    yield _SONAME, os.RTLD_NOW
