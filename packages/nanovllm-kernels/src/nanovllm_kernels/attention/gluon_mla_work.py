"""Which piece of work is what, in `gluon_mla`: whose token, which of its heads and latents, and where its results wait.

`plan` is everywhere: how many pieces there are, lengths of requests, where their queries begin, the counts and the
owners that the kernel was given, how many requests there are, and into how many splits a chunk's latents are cut.
This room must not know who computes what of a piece of work, nor of shared memory.
"""

# ruff: noqa: N803, N806 - a kernel's compile-time constants are written in capitals, as Triton's users do

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_work(plan, work, NUM_HEADS: gl.constexpr, CHUNKS: gl.constexpr):
    """Of a piece of work: the request, the token and its first head, which of the latents it is of, none if there is
    nothing to do, and whether these are all.
    """
    _num_work, seq_lens_ptr, query_start_loc_ptr, counts_ptr, owners_ptr, num_reqs, num_splits = plan
    BLOCKS: gl.constexpr = NUM_HEADS // 64
    unit = work // BLOCKS
    head = (work % BLOCKS) * 64
    if CHUNKS:
        token = unit // num_splits
        split = unit % num_splits
        request = _find_request(query_start_loc_ptr, num_reqs, token)
        query_start = gl.load(query_start_loc_ptr + request)
        query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
        context = gl.load(seq_lens_ptr + request) - query_len
        # Decodes have their units, and prompts that are whole in the step are attended to plainly.
        length = gl.where((query_len > 1) & (context > 0), context + token - query_start + 1, 0)
        parts = num_splits
    else:
        request = gl.load(owners_ptr + unit)
        token = gl.load(query_start_loc_ptr + request)
        length = gl.load(seq_lens_ptr + request)
        first_unit = gl.load(counts_ptr + request)
        parts = gl.load(counts_ptr + request + 1) - first_unit
        split = unit - first_unit
    # All alike but the last, that no program is left with a long one.
    part_len = gl.cdiv(gl.cdiv(length, 64), parts) * 64
    begin = split * part_len
    return request, token, head, begin, gl.minimum(begin + part_len, length), parts == 1


@gluon.jit
def place_partial(plan, work, heads, NUM_HEADS: gl.constexpr, CHUNKS: gl.constexpr):
    """Where the partial results of `heads`, counted from a piece of work's first, are."""
    BLOCKS: gl.constexpr = NUM_HEADS // 64
    unit = work // BLOCKS
    heads += (work % BLOCKS) * 64
    if CHUNKS:
        num_splits = plan[6]
        return ((unit // num_splits).to(gl.int64) * NUM_HEADS + heads) * num_splits + unit % num_splits
    return unit.to(gl.int64) * NUM_HEADS + heads


@gluon.jit
def _find_request(query_start_loc_ptr, num_reqs, token):
    """The last request that begins at or before `token`."""
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = gl.load(query_start_loc_ptr + middle)
        low = gl.where(begins <= token, middle, low)
        high = gl.where(begins <= token, high, middle - 1)
    return low
