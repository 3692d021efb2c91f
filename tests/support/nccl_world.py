"""NCCL, the driver of CUDA and a server of vLLM that takes weights by them, all in this process."""

import base64
import binascii
import ctypes
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from bacr_jax.rollout.nccl import UniqueId
from served_world import Reloading

# Of nccl.h: what may be sent here, and its number.
TYPES = {"float32": (7, np.float32), "bfloat16": (9, ml_dtypes.bfloat16)}
SIZES = {number: np.dtype(kind).itemsize for number, kind in TYPES.values()}
SUCCESS, INVALID_USAGE, REMOTE_ERROR, NOT_READY = 0, 5, 6, 600
PATIENCE = 20


class Ring:
    """The ranks of a group, and by number each call that they make; None: all have made it."""

    def __init__(self, size):
        self.size, self.ranks, self.asked, self.broken = size, set(), {}, False


class FakeNccl:
    """Functions by their names and signatures, on memory of the host.

    As of NCCL, a call that all ranks must make returns at once, and its stream is busy until they
    have all made the same; joining a group waits for them.

    Attributes:
      aborted: communicators that were aborted, as (group's id, rank).
      refuses: the group is refused to all ranks, as where their versions differ.
    """

    def __init__(self, refuses=False):
        self.changed, self.numbers = threading.Condition(), itertools.count(1)
        self.rings, self.comms, self.streams = {}, {}, {}
        self.refuses, self.over, self.aborted = refuses, False, []

    def end(self):
        """Lets go whoever still waits."""
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def ncclGetErrorString(self, code):
        return {INVALID_USAGE: b"invalid usage", REMOTE_ERROR: b"remote error"}[code]

    def ncclGetUniqueId(self, reference):
        ctypes.memmove(reference, os.urandom(128), 128)
        return SUCCESS

    def ncclCommInitRank(self, reference, size, unique_id, rank):
        with self.changed:
            ring = self.rings.setdefault(bytes(unique_id), Ring(size))
            ring.broken |= self.refuses or ring.size != size or rank in ring.ranks
            ring.ranks.add(rank)
            self.changed.notify_all()
            whole = lambda: len(ring.ranks) == ring.size
            self.changed.wait_for(lambda: ring.broken or whole() or self.over, PATIENCE)
            if ring.broken or not whole():
                return INVALID_USAGE if ring.broken else REMOTE_ERROR
            number = reference._obj.value = next(self.numbers)
            self.comms[number] = (bytes(unique_id), ring, rank, itertools.count())
            return SUCCESS

    def ncclAllReduce(self, source, target, count, kind, operation, comm, stream):
        assert operation == 0
        return self.together("sum", source, target, count, kind, 0, comm, stream)

    def ncclBroadcast(self, source, target, count, kind, root, comm, stream):
        return self.together("broadcast", source, target, count, kind, root, comm, stream)

    def together(self, call, source, target, count, kind, root, comm, stream):
        with self.changed:
            _, ring, rank, order = self.comms[comm.value]
            place = next(order)
            asked = ring.asked.setdefault(place, {})
            asked[rank] = (call, count.value, kind, root), target.value
            self.streams[stream.value] = (ring, place)
            if len(asked) == ring.size and len({what for what, _ in asked.values()}) == 1:
                if call == "broadcast":
                    raw = ctypes.string_at(asked[root][1], count.value * SIZES[kind])
                    for other, (_, address) in asked.items():
                        if other != root:
                            ctypes.memmove(address, raw, len(raw))
                ring.asked[place] = None
            self.changed.notify_all()
            return SUCCESS

    def ncclCommAbort(self, comm):
        with self.changed:
            unique_id, ring, rank, _ = self.comms.pop(comm.value)
            ring.broken = True
            self.aborted.append((unique_id, rank))
            self.changed.notify_all()
            return SUCCESS

    def cuStreamCreate(self, reference, flags):
        reference._obj.value = next(self.numbers)
        return SUCCESS

    def cuStreamQuery(self, stream):
        with self.changed:
            ring, place = self.streams[stream.value]
            return SUCCESS if ring.broken or ring.asked[place] is None else NOT_READY

    def cuInit(self, flags):
        return SUCCESS

    cuCtxSetCurrent = cuInit

    def cuDeviceGet(self, reference, ordinal):
        return SUCCESS

    cuDevicePrimaryCtxRetain = cuDeviceGet


class Failed(Exception):
    """Of a worker: status 500."""


class Joining(Reloading):
    """A server whose workers join a group of NCCL and take weights from it, as vLLM's do.

    Attributes:
      received: what each worker took, as (name, type, values).
      groups: `init_info` of every group that it joined.
      devices: how many it says that it has; None: as many as it has workers.
      idle: routes on which it does nothing, and never answers.
      fails_at: number of the tensor at which it fails.
    """

    def __init__(self, nccl, workers=2, devices=None, idle=(), fails_at=None, **how):
        super().__init__(**how)
        self.nccl, self.workers, self.devices = nccl, workers, devices or workers
        self.idle, self.fails_at, self.groups = idle, fails_at, []
        self.comms, self.received, self.active = None, [], False

    def says(self, path):
        if path == "/get_world_size":
            return {"world_size": self.devices}
        return super().says(path)

    def told(self, route, body):
        if route in self.idle:
            with self.nccl.changed:
                self.nccl.changed.wait_for(lambda: self.nccl.over, PATIENCE)
        try:
            if route == "/init_weight_transfer_engine":
                self.groups.append(body["init_info"])
                self.comms = self.each(self.join, body["init_info"])
            elif route == "/start_weight_update":
                self.check(not self.active)
                self.active = True
            elif route == "/update_weights":
                self.check(self.active and self.comms)
                self.active = False
                self.received = self.each(self.take, body["update_info"])
                self.active = True
            elif route == "/finish_weight_update":
                self.check(self.active)
                self.active = False
        except Failed:
            return 500
        return super().told(route, body)

    def each(self, work, info):
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda worker: work(worker, **info), range(self.workers)))

    @staticmethod
    def check(fine):
        if not fine:
            raise Failed

    def wait(self, stream):
        with self.nccl.changed:
            ring, place = self.nccl.streams[stream.value]
            done = lambda: ring.asked[place] is None
            self.nccl.changed.wait_for(lambda: done() or ring.broken or self.nccl.over, PATIENCE)
            self.check(done())

    def join(self, worker, rank_offset, world_size, nccl_unique_id_b64, packed):
        assert packed is False
        try:
            raw = base64.b64decode(nccl_unique_id_b64, validate=True)
        except binascii.Error:
            raise Failed from None
        self.check(len(raw) == 128 and worker + rank_offset < world_size)
        comm, stream = ctypes.c_void_p(), ctypes.c_void_p(worker + id(self))
        unique_id = UniqueId.from_buffer_copy(raw)
        reference = ctypes.byref(comm)
        rank = worker + rank_offset
        self.check(self.nccl.ncclCommInitRank(reference, world_size, unique_id, rank) == SUCCESS)
        one = np.zeros(1, np.float32)
        at = ctypes.c_void_p(one.ctypes.data)
        self.nccl.ncclAllReduce(at, at, ctypes.c_size_t(1), 7, 0, comm, stream)
        self.wait(stream)
        return comm, stream

    def take(self, worker, names, dtype_names, shapes):
        assert len(names) == len(dtype_names) == len(shapes)
        comm, stream = self.comms[worker]
        found = []
        for number, (name, dtype, shape) in enumerate(zip(names, dtype_names, shapes)):
            self.check(number != self.fails_at and comm.value in self.nccl.comms)
            kind, as_numpy = TYPES[dtype]
            values = np.zeros(shape, as_numpy)
            at, count = ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.size)
            self.nccl.ncclBroadcast(None, at, count, kind, 0, comm, stream)
            self.wait(stream)
            found.append((name, dtype, values))
        return found
