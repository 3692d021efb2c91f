"""Weights to servers of vLLM over NCCL, by a unique id (`rollout.transfer=nccl`).

Written and tested against a stand-in, not run on a GPU. What vLLM does was read in its release
0.32.0, with pull request 53784 of vllm-project/vllm (unique ids), under `vllm/`:

* entrypoints/rl/online/api_router.py: the routes; /get_world_size counts all workers of a server.
* distributed/weight_transfer/nccl_common.py: `init_info`; the id is standard base64 of 128 bytes, a
  worker's rank is its own and rank_offset.
* distributed/device_communicators/pynccl.py, `from_unique_id_bytes`: ncclCommInitRank, for which
  all ranks must be there at once, then an all_reduce of one float32, which all must join.
* distributed/weight_transfer/nccl_engine.py: `update_info`, with types as torch calls them; unless
  packed, each tensor is one ncclBroadcast of rank 0, in the order of the names.
* v1/worker/gpu_worker.py: /start_weight_update before /update_weights, /finish_weight_update after.

NCCL refuses ranks of other versions (NVIDIA/nccl, src/init.cc: ncclInvalidUsage), and waits without
end for one that doesn't come: its calls are made in threads that can be left behind.
"""

import asyncio
import base64
import concurrent.futures
import ctypes
import functools
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bacr_client import EngineError, Server
from bacr_client.server import LOADING
from bacr_jax.errors import UserError
from bacr_jax.types import Params

# Of nccl.h (ncclDataType_t, ncclSum) and cuda.h (a stream that waits for no other; work goes on).
_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SUM, _NON_BLOCKING, _NOT_READY = 0, 1, 600
# Seconds between two questions to a device, and for a thread to see that its group is given up.
_BETWEEN, _GRACE = 1e-4, 2.0
# Programs of several devices, enqueued by two threads at once, could wait for each other.
_FETCHING = threading.Lock()


class UniqueId(ctypes.Structure):
    """NCCL's name of a group."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Libraries(NamedTuple):
    """NCCL, the driver of CUDA, and where the first one lies: servers must load its version."""

    nccl: Any
    cuda: Any
    path: str


def find_libraries() -> Libraries:
    """The NCCL that JAX computes with; UserError: there is no NVIDIA device, or no NCCL."""
    if "cuda" not in jax.local_devices()[0].client.platform_version:
        raise UserError(
            "rollout.transfer=nccl: needs an NVIDIA device, and JAX found "
            f"{jax.local_devices()[0].platform}; write rollout.transfer=folder"
        )
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    path = str(Path(places[0], "lib", "libnccl.so.2")) if places else "libnccl.so.2"
    try:
        nccl, cuda = ctypes.CDLL(path), ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UserError(
            f"rollout.transfer=nccl: can't load NCCL ({error}); install jax[cuda12], or write "
            "rollout.transfer=folder"
        ) from None
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return Libraries(nccl, cuda, path)


@dataclass(frozen=True)
class Tensor:
    """A tensor to send.

    Attributes:
      dtype: as torch and NumPy call it.
      fetch: brings it to the device that sends, whole; called when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], jax.Array]


class Group:
    """A communicator of NCCL: the learner's device, which is rank 0, and all those of a server.

    `connect` and `send` wait for the server, inside `run`.
    """

    def __init__(self, libraries: Libraries, device: jax.Device, url: str):
        self._libraries, self._device, self._url = libraries, device, url
        self._lock, self._given_up = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._comm: ctypes.c_void_p | None = None
        # It stays when the group is given up: one a server that was lost.
        self._stream = ctypes.c_void_p()
        self.unique_id = UniqueId()
        self._nccl("ncclGetUniqueId", ctypes.byref(self.unique_id))

    def run(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Does some work on the group's device, in a thread that ends with the process."""
        outcome = concurrent.futures.Future[None]()
        outcome.set_running_or_notify_cancel()

        def body() -> None:
            try:
                self._choose_device()
                work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        self._thread = threading.Thread(target=body, name=f"NCCL to {self._url}", daemon=True)
        self._thread.start()
        return asyncio.wrap_future(outcome)

    def connect(self, world_size: int) -> None:
        """Joins the group, which the server does at the same time."""
        self._cuda("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        comm = ctypes.c_void_p()
        self._nccl("ncclCommInitRank", ctypes.byref(comm), world_size, self.unique_id, 0)
        with self._lock:
            self._comm = comm
        if self._given_up.is_set():
            # Too late: whoever gave the group up had nothing to abort.
            self._abort()
        # Kept: until it is aborted the group may still write there.
        self._one = jax.device_put(np.zeros(1, np.float32), self._device)
        self._collective("ncclAllReduce", self._one, _SUM)

    def send(self, array: jax.Array) -> None:
        """Broadcasts an array of the group's device; returns when it is no longer needed."""
        self._collective("ncclBroadcast", array, 0)

    def close(self) -> None:
        """Gives the group up: whatever goes on in it ends with an error, here and at the server.

        NCCL's orderly end (ncclCommDestroy) would wait for the server.
        """
        self._given_up.set()
        if self._thread is not None:
            # What still runs then is inside NCCL, which lets it go.
            self._thread.join(_GRACE)
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._libraries.nccl.ncclCommAbort(comm)

    def _collective(self, name: str, array: jax.Array, argument: int) -> None:
        """One, in place, until the device is through with it; the argument is operation or root."""
        array.block_until_ready()
        at, count = ctypes.c_void_p(array.unsafe_buffer_pointer()), ctypes.c_size_t(array.size)
        kind, group = _TYPES[array.dtype.name], (self._comm, self._stream)
        self._nccl(name, at, at, count, kind, argument, *group)
        while self._libraries.cuda.cuStreamQuery(self._stream) == _NOT_READY:
            self._check_kept()
            time.sleep(_BETWEEN)
        self._cuda("cuStreamQuery", self._stream)

    def _choose_device(self) -> None:
        """Makes JAX's context of the device that of this thread, in which NCCL finds it."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._cuda("cuInit", 0)
        self._cuda("cuDeviceGet", ctypes.byref(number), self._device.local_hardware_id)
        self._cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._cuda("cuCtxSetCurrent", context)

    def _check_kept(self) -> None:
        if self._given_up.is_set():
            raise EngineError(f"{self._url}: its group of NCCL was given up")

    def _nccl(self, name: str, *arguments: Any) -> None:
        self._check_kept()
        if code := getattr(self._libraries.nccl, name)(*arguments):
            said = self._libraries.nccl.ncclGetErrorString(code).decode()
            raise EngineError(f"{self._url}: {name} of NCCL failed ({said})")

    def _cuda(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._libraries.cuda, name)(*arguments):
            raise EngineError(f"{self._url}: {name} of CUDA failed (error {code})")


@dataclass
class Sender:
    """Brings policies to servers, each in a group of its own: one that is lost holds up no other.

    Attributes:
      device: it sends.
      tensors: of parameters, in the layout of an exported folder.
      deadline: seconds for a server to join a group, or to take all tensors.
    """

    libraries: Libraries
    device: jax.Device
    tensors: Callable[[Params], Sequence[Tensor]]
    deadline: float = 600.0
    _groups: dict[str, Group] = field(default_factory=dict)

    async def load(self, server: Server, tensors: Sequence[Tensor], version: str) -> None:
        """`Server.load` without a folder; EngineError: as there, or NCCL failed."""
        try:
            move = functools.partial(self._move, server, tensors)
            await server.take(version, move, f"version {version}")
        except BaseException:
            self.drop(server.url)
            raise

    def drop(self, url: str) -> None:
        """Gives up the group of a server, which joins another one at the next `load`."""
        group = self._groups.pop(url, None)
        if group is not None:
            group.close()

    async def _move(self, server: Server, tensors: Sequence[Tensor]) -> None:
        group = self._groups.get(server.url) or await self._connected(server)

        def send() -> None:
            for tensor in tensors:
                with _FETCHING:
                    array = tensor.fetch().block_until_ready()
                assert (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype), tensor.name
                group.send(array)

        info = {
            "names": [tensor.name for tensor in tensors],
            "dtype_names": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        await server.ask("/start_weight_update", {}, LOADING)
        await self._both(server, "/update_weights", {"update_info": info}, group.run(send))
        await server.ask("/finish_weight_update", {}, LOADING)

    async def _connected(self, server: Server) -> Group:
        found = await server.ask("/get_world_size", None)
        devices = found.get("world_size") if isinstance(found, dict) else None
        if type(devices) is not int or devices < 1:
            raise EngineError(f"{server.url}: says that it has {devices!r:.40} devices")
        group = self._groups[server.url] = Group(self.libraries, self.device, server.url)
        info = {
            "rank_offset": 1,
            "world_size": 1 + devices,
            "nccl_unique_id_b64": base64.b64encode(bytes(group.unique_id)).decode(),
            "packed": False,
        }
        joining = group.run(functools.partial(group.connect, 1 + devices))
        try:
            await self._both(server, "/init_weight_transfer_engine", {"init_info": info}, joining)
        except EngineError as error:
            raise EngineError(
                f'{error}; start it with --weight-transfer-config \'{{"backend": "nccl"}}\' and '
                f"VLLM_NCCL_SO_PATH={self.libraries.path}"
            ) from None
        return group

    async def _both(self, server: Server, path: str, body: Any, ours: asyncio.Future[None]) -> None:
        """Asks a server to do its part of something, while ours goes on, until the deadline."""
        theirs = asyncio.ensure_future(server.ask(path, body, LOADING))
        try:
            done, left = await asyncio.wait(
                (ours, theirs), timeout=self.deadline, return_when=asyncio.FIRST_EXCEPTION
            )
            for one in done:
                one.result()
            if left:
                raise EngineError(f"{server.url}{path}: took more than {self.deadline:g} s")
        finally:
            ours.cancel()
            theirs.cancel()
            await asyncio.gather(ours, theirs, return_exceptions=True)
