"""Makes Triton's CPU interpreter many times faster.

The interpreter patches Triton's language at each call; here this happens only once. The kernels of
a decoding step run over the whole grid at once in NumPy, with the same operations as in the
interpreter, so that the results are equal bit for bit (test_offline.py).

Each function in `WHOLE` replaces one kernel. It takes a dict of the kernel's arguments by name. It
returns True if it has run the kernel, and False if it does not support these arguments.
"""

import ctypes
import inspect

import numpy as np
from triton import backends
from triton.runtime import interpreter


class Driver:
    """Driver of the CPU backend, which is always active."""

    @staticmethod
    def is_active():
        """Returns True. Triton calls this to select the driver."""
        return True


class Patched:
    """Scope of a patch that is never undone, because Triton's language stays patched."""

    def restore(self):
        """Does nothing. The interpreter calls this after each kernel."""


patch, patched = interpreter._patch_lang, set()


def patch_once(kernel):
    """Replaces Triton's language functions by the interpreter's functions on the first call.

    The original function does this at each call.
    """
    languages = (interpreter.tl, interpreter.tl.core)
    found = frozenset(id(value) for value in kernel.__globals__.values() if value in languages)
    if found not in patched:
        patch(kernel)
        patched.add(found)
    return Patched()


def hashed(h, key):
    """Computes one round of the murmur3 hash on uint32."""
    key = key * np.uint32(0xCC9E2D51)
    key = (key << 15 | key >> 17) * np.uint32(0x1B873593)
    h = h ^ key
    return (h << 13 | h >> 19) * np.uint32(5) + np.uint32(0xE6546B64)


def uniform(seed, pos, token):
    """Returns float32 random numbers in the open interval (0, 1).

    The shape is the broadcast shape of the arguments.
    """
    h = np.zeros_like(seed, np.uint32)
    for word in (seed, seed >> 32, pos, token):
        h = hashed(h, (word & 0xFFFFFFFF).astype(np.uint32))
    h = h ^ np.uint32(16)
    h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
    h = h ^ h >> 16
    high, low = (h >> 16).astype(np.float32), (h & 0xFFFF).astype(np.float32)
    return high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32)


def log1p_of_negative(value):
    """Computes log(1 - value) for values from 0 to 1."""
    one, sum_ = np.float32(1), np.float32(1 / 8)
    for n in range(7, 0, -1):
        sum_ = np.float32(1 / n) + value * sum_
    direct = np.log(np.maximum(one - value, np.float32(5.960464477539063e-08)))
    return np.where(value < np.float32(0.25), -value * sum_, direct)


def gumbel(a):
    """Samples a token for each row: the argmax of the logits after temperature and Gumbel noise."""
    if a["IS_DRAFTING"] or a["USE_FP64"] or a["logits_cache_ptr"] is not None:
        return False
    rows = a["expanded_idx_mapping_ptr"].numpy().astype(np.int64)
    logits = a["logits_ptr"].numpy().astype(np.float32)
    temperature = np.where(rows >= 0, a["temp_ptr"].numpy()[rows], 0).astype(np.float32)[:, None]
    seed = np.where(rows >= 0, a["seeds_ptr"].numpy()[rows], 0).astype(np.int64)[:, None]
    pos = a["pos_ptr"].numpy()[: len(rows)].astype(np.int64)[:, None]
    drawn = temperature != 0
    if a["APPLY_TEMPERATURE"]:
        logits = np.where(drawn, logits / np.where(drawn, temperature, 1), logits)
    token = np.arange(logits.shape[1], dtype=np.int64)[None]
    noise = -np.log(-log1p_of_negative(uniform(seed, pos, token)))
    logits = np.where(drawn, logits + noise, logits)
    for block in range(a["local_max_ptr"].shape[1]):
        part = logits[:, block * a["BLOCK_SIZE"] : (block + 1) * a["BLOCK_SIZE"]]
        a["local_max_ptr"].numpy()[:, block] = part.max(1)
        a["local_argmax_ptr"].numpy()[:, block] = part.argmax(1) + block * a["BLOCK_SIZE"]
    return True


def log_softmax(a):
    """Computes the log-probabilities of given tokens in float32."""
    logits = a["logits_ptr"].numpy().astype(np.float32)
    largest = logits.max(1, keepdims=True)
    width = -(-logits.shape[1] // a["BLOCK_SIZE"]) * a["BLOCK_SIZE"]
    e = np.zeros((len(logits), width), np.float32)
    e[:, : logits.shape[1]] = np.exp(logits - largest)
    total = np.float32(0)
    for block in range(0, width, a["BLOCK_SIZE"]):
        total = total + e[:, block : block + a["BLOCK_SIZE"]].sum(1)
    chosen = np.take_along_axis(logits, a["topk_ids_ptr"].numpy(), 1)
    a["output_ptr"].numpy()[:] = chosen - largest - np.log(total)[:, None]
    return True


def ranks(a):
    """Counts the tokens that are at least as likely as the given token of each row."""
    logits = a["logits_ptr"].numpy()
    chosen = np.take_along_axis(logits, a["token_ids_ptr"].numpy()[:, None], 1)
    a["output_ptr"].numpy()[:] = (logits >= chosen).sum(1)
    return True


def positions(a):
    """Computes the position of each new token, and the length of each row with these tokens."""
    start, computed = queries(a), a["num_computed_tokens_ptr"].numpy()[a["idx_mapping_ptr"].numpy()]
    new = np.diff(start)
    lengths = a["seq_lens_ptr"].numpy()
    lengths[: len(new)] = computed + new
    lengths[len(new) :] = 0
    token = np.arange(start[0], start[-1])
    a["pos_ptr"].numpy()[start[0] : start[-1]] = np.repeat(computed - start[:-1], new) + token
    return True


def queries(a):
    """Returns the start offset of each row's tokens, followed by the end offset of the last row."""
    return a["query_start_loc_ptr"].numpy()[: len(a["idx_mapping_ptr"]) + 1].astype(np.int64)


def last_tokens(a):
    """Sets each row's last sampled token as its next input token, with one logit per row."""
    rows, ends = a["idx_mapping_ptr"].numpy(), queries(a)[1:]
    first = a["cu_num_logits_ptr"].numpy()[: len(rows) + 1]
    if a["NUM_NEW_SAMPLED_TOKENS"] != 1 or (np.diff(first) != 1).any():
        return False
    a["logits_indices_ptr"].numpy()[first[:-1]] = ends - 1
    decodes = a["seq_lens_ptr"].numpy()[: len(rows)] > a["prefill_len_ptr"].numpy()[rows]
    last = a["last_sampled_tokens_ptr"].numpy()[rows[decodes]].reshape(-1)
    a["input_ids_ptr"].numpy()[ends[decodes] - 1] = last
    return True


def sampled(a):
    """Computes the number of sampled tokens of each row, which is 0 during prefill."""
    rows = a["idx_mapping_ptr"].numpy()
    prefills = a["seq_lens_ptr"].numpy()[: len(rows)] < a["prefill_len_ptr"].numpy()[rows]
    drawn = np.where(prefills, 0, a["num_sampled_ptr"].numpy()[: len(rows)])
    logits = np.diff(a["cu_num_logits_ptr"].numpy()[: len(rows) + 1])
    a["num_sampled_ptr"].numpy()[: len(rows)] = drawn
    a["num_rejected_ptr"].numpy()[: len(rows)] = np.where(prefills, 0, logits - drawn)
    return True


def update(a):
    """Appends the sampled token to each row. Rows have at most one sampled token."""
    rows, drawn = a["idx_mapping_ptr"].numpy(), a["num_sampled_ptr"].numpy()
    if (rows < 0).any() or drawn.max() > 1:
        return False
    token = a["sampled_tokens_ptr"].numpy()[: len(rows), 0][drawn > 0]
    which, total = rows[drawn > 0], a["total_len_ptr"].numpy()
    a["last_sampled_tokens_ptr"].numpy().reshape(-1)[which] = token
    a["all_token_ids_ptr"].numpy()[which, total[which]] = token
    total[which] += 1
    if a["output_bin_counts_ptr"] is not None:
        a["output_bin_counts_ptr"].numpy()[which, token] += 1
    new = 0 if a["query_start_loc_ptr"] is None else np.diff(queries(a))
    a["num_computed_tokens_ptr"].numpy()[rows] += new - a["num_rejected_ptr"].numpy()[: len(rows)]
    return True


def blocks(pointers, rows, a):
    """Returns the first rows of a block table as an array (rows, blocks), given its address."""
    shape = (rows, int(a["block_table_strides"][0]))
    whole = (ctypes.c_int32 * (shape[0] * shape[1])).from_address(int(pointers[0]))
    return np.frombuffer(whole, np.int32).reshape(shape)


def block_tables(a):
    """Copies the block table rows of a step's requests into consecutive rows."""
    rows = a["batch_idx_to_req_idx"].numpy()
    if a["grid"] != (1, a["num_reqs"]):
        return False
    taken = a["num_blocks_ptr"].numpy()[0, rows]
    source = blocks(a["src_block_table_ptrs"], rows.max() + 1, a)[rows, : taken.max()]
    target = blocks(a["dst_block_table_ptrs"], len(rows), a)[:, : taken.max()]
    np.copyto(target, source, where=np.arange(taken.max()) < taken[:, None])
    return True


def slots(a):
    """Computes the slot in the KV cache for the keys and values of each token."""
    rows = a["idx_mapping"].numpy()
    plain = a["grid"][0] == 1 and a["CP_SIZE"] == 1 and bool(a["slot_mapping_enabled"][0])
    if not plain or (rows < 0).any():
        return False
    start = a["query_start_loc"].numpy()[: len(rows) + 1].astype(np.int64)
    row, size = np.repeat(rows, np.diff(start)), int(a["block_sizes"][0])
    pos, out = a["pos"].numpy()[start[0] : start[-1]], a["slot_mappings_ptr"].numpy()[0]
    block = blocks(a["block_table_ptrs"], rows.max() + 1, a)[row, pos // size]
    out[start[0] : start[-1]] = block.astype(np.int64) * size + pos % size
    out[start[-1] :] = a["PAD_ID"]
    return True


WHOLE = {
    "_gumbel_sample_kernel": gumbel,
    "_topk_log_softmax_kernel": log_softmax,
    "_ranks_kernel": ranks,
    "_prepare_pos_seq_lens_kernel": positions,
    "_combine_sampled_and_draft_tokens_kernel": last_tokens,
    "_get_num_sampled_and_rejected_kernel": sampled,
    "_post_update_kernel": update,
    "_gather_block_tables_kernel": block_tables,
    "_compute_slot_mappings_kernel": slots,
}
run = interpreter.InterpretedFunction.run


def run_whole(self, *args, grid, warmup, **kwargs):
    """Runs a kernel over its grid.

    If `WHOLE` has a function that supports the arguments, the whole grid runs at once. Otherwise
    Triton's interpreter runs the kernel.
    """
    whole = WHOLE.get(self.fn.__name__)
    if whole and not warmup:
        known = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **known)
        bound.apply_defaults()
        if whole(bound.arguments | {"grid": grid}):
            return
    run(self, *args, grid=grid, warmup=warmup, **kwargs)


backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)
interpreter._patch_lang = patch_once
interpreter.InterpretedFunction.run = run_whole
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
