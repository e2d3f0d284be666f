"""Handler of XLA's foreign function interface that runs collectives.

a. XLA calls `FfiHandler` on a thread of its own with the buffers of the operation and its attributes: ``call``, what
   `NativeCall.encode` has written, and, of an alltoall, ``splits``, the rows for each rank with commas between them.
b. The handler submits the collective on views of the buffers. Nothing is copied where the shape of the result is the
   tensor's, or where there is one result.
c. If the collective is not complete by then, the handler gives XLA a future and returns: the thread is free. Reigen's
   engine has the future completed later. XLA keeps the buffers until then, and may run the rest of the program on the
   thread that completes it: that is none which the engine needs.

Tokens, which carry an order between operations and no data, may be among arguments and results.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, sizeof
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from reigen import context
from reigen.api.native_calls import NativeCall, decode_call
from reigen.api.runtime_threads import ContinuationThreads, KnownThreads, wait_until_left
from reigen.engine.handle import CollectiveResult, Handle
from reigen.errors import CollectiveError, UnsupportedTypeError
from reigen.types import DTYPES, DType
from reigen.xla.failures import RuntimeFailures, status_code
from reigen.xla.ffi_structs import (
    ELEMENT_TYPES,
    EXECUTE_STAGE,
    FUNCTION,
    KNOWN_VERSIONS,
    METADATA_EXTENSION,
    STRING_ATTRIBUTE,
    TOKEN_TYPE,
    FfiApi,
    FfiAttributes,
    FfiBuffer,
    FfiBuffers,
    FfiCallFrame,
    FfiContextArguments,
    FfiErrorArguments,
    FfiFutureArguments,
    FfiFutureErrorArguments,
    FfiHandlerBundle,
    FfiMessageArguments,
    FfiMetadataExtension,
    FfiRegisterArguments,
    FfiSpan,
)

_Array = NDArray[Any]
#: contents, element type and address of a buffer
_View = tuple[_Array, DType, int | None]
_DTYPES = {code: DTYPES[name] for code, name in ELEMENT_TYPES.items()}
#: seconds for which a call holds its thread: the other ranks' part in a small sum is there sooner than another thread
#: could be woken. Threads that all wait for calls which none of them makes go on after it.
_WAIT_SECONDS = 0.002
_INT32 = 0xFFFFFFFF
#: computations that are dispatched and not complete are fewer; and so are operations of programs at a time
_MAX_IN_FLIGHT, _MAX_OPERATIONS = 1024, 1 << 16


class FfiMismatchError(Exception):
    """Error for a runtime with another interface than the one that is known here."""


class FfiHandler:
    """Handler whose address XLA keeps for as long as the process lives: so must its owner.

    Calls with one name run one after the other, in the order in which they come; others in any order. On a device other
    than the runtime's first, a name gets the device's number: each matches the same device of the other ranks.

    Args:
        version: of the interface, for which it says that it was made; one of `KNOWN_VERSIONS`.
        checks_order: the runtime numbers its executions in the order of their dispatch, and is to make calls with one
            name in that order, or the job ends with an error.
        answer: answers a question, a ``call`` that begins with ``?``, with an integer; its one result is that.
        device_index: makes of a device's number in the runtime, where it is not 0, its number in this process.
        decode: reads a ``call``.

    Attributes:
        function: the handler for ctypes.
        failures: the errors that it has given XLA.
    """

    def __init__(
        self,
        version: tuple[int, int] = KNOWN_VERSIONS[0],
        *,
        checks_order: bool = False,
        answer: Callable[[str], int] | None = None,
        device_index: Callable[[int], int] = int,
        decode: Callable[[bytes], NativeCall] = decode_call,
    ) -> None:
        self.function = FUNCTION(self._handle)
        self.failures = RuntimeFailures()
        self.version = version
        self._checks_order = checks_order
        self._answers, self._device_index, self._decode = answer, device_index, decode
        self._threads, self._continuations = KnownThreads(), ContinuationThreads("reigen-xla")
        #: calls that are in Python, and those whose future is not complete
        self._calls: dict[object, None] = {}
        self._lock = threading.Lock()
        #: by the name of a collective that is under way: what begins the next ones
        self._queues: dict[tuple[str, int], deque[_Call]] = {}
        #: by the address of an operation's attributes, the execution that called last
        self._last_runs: dict[int, int] = {}

    @property
    def address(self) -> int:
        """Address of the function."""
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def drain(self, seconds: float) -> bool:
        """Wait, so long at most, until no call is in Python or incomplete; return whether there is none."""
        return wait_until_left(self._calls, seconds)

    # -- on threads of XLA --------------------------------------------------------------------------------------------

    def _handle(self, address: int) -> int | None:
        key = object()
        self._calls[key] = None
        goes_on = False
        try:
            frame = FfiCallFrame.from_address(address)
            if frame.extension and self._answer(frame):
                return None
            self._threads.stay()
            try:
                check_frame(frame)
                goes_on = self._run(frame, key)
            except BaseException as error:  # noqa: BLE001  raised by the runtime, where the result is needed
                return self._error(frame.api.contents, error)
            return None
        finally:
            if not goes_on:
                del self._calls[key]

    def _answer(self, frame: FfiCallFrame) -> bool:
        """Tell XLA, if it asks, for which version the handler was made."""
        extension = FfiMetadataExtension.from_address(frame.extension)
        if extension.type != METADATA_EXTENSION:
            return False
        metadata = extension.metadata.contents
        metadata.version.major, metadata.version.minor = self.version
        metadata.traits = 0
        return True

    def _run(self, frame: FfiCallFrame, key: object) -> bool:
        """Run the collective; return whether it goes on behind the return."""
        attributes = _read_attributes(frame.attributes)
        text = attributes[b"call"]
        if self._answers is not None and text.startswith(b"?"):
            _views(frame.results)[0][0][...] = self._answers(text.decode())
            return False
        native = self._decode(text)
        device = _ask_context(frame, "device_ordinal_get") & _INT32
        if device and (device := self._device_index(device)):
            native = structs.replace(native, name=f"{native.name}@device{device}")
        if self._checks_order:
            self._check_order(native, frame.attributes.values[0], _ask_context(frame, "run_id_get"))
        splits, sources = attributes.get(b"splits"), _views(frame.arguments)
        call = _Call(
            native,
            [(array, dtype) for array, dtype, _ in sources],
            [array for array, _, _ in _views(frame.results, sources if native.row.in_place else ())],
            tuple(map(int, splits.split(b","))) if splits else None,
            frame.api.contents,
            key,
        )
        with self._lock:
            queue = self._queues.get(call.name)
            if queue is None:
                self._queues[call.name] = deque()
            else:
                frame.future = call.future = _create_future(call.api)
                queue.append(call)
                return True
        try:
            handle = call.begin(blocking=True)
            done = handle.wait_briefly(_WAIT_SECONDS)
            if done:
                call.deliver(handle.wait())
        except BaseException:
            self._begin_next(call.name)
            raise
        if done:
            self._begin_next(call.name)
            return False
        frame.future = call.future = _create_future(call.api)
        handle.add_done_callback(lambda: self._complete(call, handle))
        return True

    def _check_order(self, native: NativeCall, operation: int, run: int) -> None:
        """Compare with the last execution of the same operation of the same program, which counts its executions.

        They begin anywhere, and so they do again for a program that has got the memory of one that was forgotten.
        """
        last = self._last_runs.get(operation, run)
        if last - _MAX_IN_FLIGHT < run < last:
            error = CollectiveError(
                "two computations of this rank have called it in another order than they were dispatched in; "
                "dispatch them from one thread",
                tensor=native.name,
            )
            context.current().give_up(error)
            raise error
        if len(self._last_runs) >= _MAX_OPERATIONS:
            self._last_runs.clear()
        self._last_runs[operation] = run

    # -- on the thread of Reigen that completes a collective -----------------------------------------------------------

    def _complete(self, call: _Call, handle: Handle) -> None:
        self._begin_next(call.name)
        self._continuations.run(functools.partial(self._continue, call, handle))

    def _begin_next(self, name: tuple[str, int]) -> None:
        """Begin the next call of a name, if there is one: another was over."""
        while True:
            with self._lock:
                queue = self._queues[name]
                if not queue:
                    del self._queues[name]
                    return
                call = queue.popleft()
            try:
                handle = call.begin(blocking=False)
            except BaseException as error:  # noqa: BLE001  raised by the runtime, where the result is needed
                self._continuations.run(functools.partial(self._fail, call, error))
                continue
            handle.add_done_callback(functools.partial(self._complete, call, handle))
            return

    # -- on threads on which programs go on ---------------------------------------------------------------------------

    def _continue(self, call: _Call, handle: Handle) -> None:
        try:
            call.deliver(handle.wait())
        except BaseException as error:  # noqa: BLE001  raised by the runtime, where the result is needed
            self._fail(call, error)
        else:
            done = FfiFutureArguments(sizeof(FfiFutureArguments), None, call.future)
            _call(call.api, call.api.future_set_available, done)
            del self._calls[call.key]

    def _fail(self, call: _Call, error: BaseException) -> None:
        made = self._error(call.api, error)
        failed = FfiFutureErrorArguments(sizeof(FfiFutureErrorArguments), None, call.future, made)
        _call(call.api, call.api.future_set_error, failed)
        del self._calls[call.key]

    def _error(self, api: FfiApi, error: BaseException) -> int | None:
        """Make an `XLA_FFI_Error`; the runtime owns it."""
        text = self.failures.text_of(error).encode()
        made = FfiErrorArguments(sizeof(FfiErrorArguments), None, text, status_code(error))
        address: int | None = FUNCTION(api.error_create)(addressof(made))
        return address


@dataclass(slots=True, eq=False)
class _Call:
    """Call of the handler, on buffers that stay until it is complete.

    Attributes:
        native: the collective.
        sources: the tensors, with their element types.
        results: memory for the results.
        splits: of an alltoall.
        api: the runtime's functions.
        key: the call among those that are under way.
        future: for the runtime, if it goes on behind the handler's return.
    """

    native: NativeCall
    sources: list[tuple[_Array, DType]]
    results: list[_Array]
    splits: tuple[int, ...] | None
    api: FfiApi
    key: object
    future: int = 0

    @property
    def name(self) -> tuple[str, int]:
        """Name and process set."""
        return self.native.name, self.native.process_set

    def begin(self, *, blocking: bool) -> Handle:
        """Submit the collective."""
        in_place = self.native.row.in_place
        offers = not in_place and not self.native.is_grouped
        return self.native.start(
            [array for array, _ in self.sources],
            [dtype for _, dtype in self.sources],
            self.results if in_place else None,
            splits=self.splits,
            make_output=functools.partial(_offer, self.results[0]) if offers else None,
            blocking=blocking,
        )

    def deliver(self, outcome: CollectiveResult) -> None:
        """Copy results of a shape that depends on all ranks into the runtime's memory, unless they lie there."""
        native = self.native
        if native.row.in_place:
            return
        outcomes = outcome.members if native.is_grouped else (outcome,)
        for array, each in zip(self.results, outcomes, strict=False):
            found = each.on_host
            if found.shape != array.shape:
                raise CollectiveError(
                    f"the program was compiled for a result of shape {array.shape}, but the ranks' tensors give "
                    f"{found.shape}: inside a compiled program they have the same shape on all ranks",
                    tensor=native.name,
                )
            if not np.may_share_memory(found, array):
                np.copyto(array, found)
        if native.row.returns_splits and len(self.results) > 1:
            self.results[1][:] = np.asarray(outcome.received_splits).reshape(self.results[1].shape)


def check_frame(frame: FfiCallFrame) -> None:
    """Compare the runtime's version and sizes with those known here.

    Raises:
        FfiMismatchError: something differs; nothing behind it was read.
    """
    if frame.struct_size < FfiCallFrame.future.offset:
        raise FfiMismatchError(f"XLA's call frame has {frame.struct_size} bytes, not {FfiCallFrame.future.offset}")
    check_api(frame.api.contents)
    if frame.stage != EXECUTE_STAGE:
        raise FfiMismatchError(f"XLA calls the handler in stage {frame.stage}, not {EXECUTE_STAGE}")
    for part in (frame.arguments, frame.results, frame.attributes):
        _check_size(part)


def check_api(api: FfiApi) -> tuple[int, int]:
    """Return the version of a runtime's interface.

    Raises:
        FfiMismatchError: it, or the size of the table of functions, is not known here.
    """
    version = (api.version.major, api.version.minor)
    if api.struct_size < sizeof(FfiApi) or version not in KNOWN_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN_VERSIONS)
        raise FfiMismatchError(
            f"XLA's foreign function interface has version {version[0]}.{version[1]} and {api.struct_size} bytes; "
            f"known are the versions {known} with at least {sizeof(FfiApi)}"
        )
    return version


def register_handler(api_address: int, name: str, platform: str = "Host", **options: Any) -> FfiHandler:
    """Register a handler with the runtime whose `XLA_FFI_GetApi` has given an address.

    Args:
        api_address: of the runtime's `XLA_FFI_Api`.
        name: of the target of custom calls; once in a process and runtime.
        platform: as XLA calls it: ``Host`` for processors.
        **options: as for `FfiHandler`.

    Raises:
        FfiMismatchError: the runtime has another interface, or refuses the handler.
    """
    if not api_address:
        raise FfiMismatchError("the runtime has no foreign function interface of XLA")
    api = FfiApi.from_address(api_address)
    handler = FfiHandler(check_api(api), **options)
    texts = [(text, len(text)) for text in (name.encode(), platform.encode())]
    spans = [FfiSpan(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), length) for text, length in texts]
    bundle = FfiHandlerBundle(None, None, None, handler.address)
    _call(api, api.handler_register, FfiRegisterArguments(sizeof(FfiRegisterArguments), None, *spans, bundle, 0))
    return handler


def _call(api: FfiApi, function: int, arguments: ctypes.Structure) -> None:
    """Call a function of the runtime; raises FfiMismatchError with its message if it fails."""
    error = FUNCTION(function)(addressof(arguments))
    if error:
        asked = FfiMessageArguments(sizeof(FfiMessageArguments), None, error, None)
        FUNCTION(api.error_get_message)(addressof(asked))
        message = (asked.message or b"").decode(errors="replace")
        FUNCTION(api.error_destroy)(addressof(FfiMessageArguments(sizeof(FfiFutureArguments), None, error, None)))
        raise FfiMismatchError(f"XLA refuses a call of its foreign function interface: {message}")


def _ask_context(frame: FfiCallFrame, function: str) -> int:
    """Return the number that a function of the runtime gives for a call's context."""
    api = frame.api.contents
    arguments = FfiContextArguments(sizeof(FfiContextArguments), None, frame.context, 0)
    _call(api, getattr(api, function), arguments)
    return int(arguments.number)


def _create_future(api: FfiApi) -> int:
    arguments = FfiFutureArguments(sizeof(FfiFutureArguments), None, None)
    _call(api, api.future_create, arguments)
    return int(arguments.future)


def _check_size(part: Any) -> None:
    if part.struct_size < sizeof(part):
        raise FfiMismatchError(f"XLA's {type(part).__name__} has {part.struct_size} bytes, not {sizeof(part)}")


def _read_attributes(attributes: FfiAttributes) -> dict[bytes, bytes]:
    """Return the attributes that are texts."""
    found = {}
    for index in range(attributes.count):
        if attributes.types[index] == STRING_ATTRIBUTE:
            name, value = (FfiSpan.from_address(each[index]) for each in (attributes.names, attributes.values))
            found[ctypes.string_at(name.pointer, name.length)] = ctypes.string_at(value.pointer, value.length)
    return found


def _views(buffers: FfiBuffers, like: Sequence[_View] = ()) -> list[_View]:
    """Return the contents of buffers, in storage types, their element types and addresses; tokens are left out.

    ``like`` may have views of the same shapes in the same order; where the memory is the same, so is the view.
    """
    found: list[_View] = []
    items, size = buffers.items, sizeof(FfiBuffer)
    for index in range(buffers.count):
        buffer = FfiBuffer.from_address(items[index])
        if buffer.dtype == TOKEN_TYPE:
            continue
        if buffer.struct_size < size:
            _check_size(buffer)
        address = buffer.data
        if like and like[len(found)][2] == address:
            found.append(like[len(found)])
            continue
        dtype = _DTYPES.get(buffer.dtype)
        if dtype is None:
            raise UnsupportedTypeError(f"Tensor type {buffer.dtype} of XLA is not supported")
        shape = tuple(buffer.dimensions[: buffer.rank])
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes:
            contents = np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype.storage)
            found.append((contents.reshape(shape), dtype, address))
        else:
            found.append((np.empty(shape, dtype.storage), dtype, None))
    return found


def _offer(array: _Array, shape: tuple[int, ...]) -> _Array:
    """Return the runtime's memory for a result, if it has this shape; `_Call.deliver` refuses all others."""
    return array if array.shape == shape else np.empty(shape, array.dtype)
