"""Reads the work of a `gluon_absorbed` program: one part of a work list, for a block of 64 heads.

`plan` is a tuple of pointers: the tensors of a `WorkList`, then `seq_lens` and `query_start_loc`. A tile is one query.
A block has up to 64 latents (keys).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm_kernels.attention import triton_split_kv

# Gluon kernels cannot call functions compiled as Triton: compile the same sources as Gluon.
_load_part = gluon.jit(triton_split_kv.load_part.fn)
_load_segment = gluon.jit(triton_split_kv.load_segment.fn)
_load_tile = gluon.jit(triton_split_kv.load_tile.fn)


@gluon.jit
def load_program_tiles(plan, NUM_HEADS: gl.constexpr):
    """Return (first tile, exclusive end of the tiles, first head) of this program."""
    tile_first_blocks_ptr, _tiles_ptr, parts_ptr, _seq_lens_ptr, _query_start_loc_ptr = plan
    HEAD_BLOCKS: gl.constexpr = NUM_HEADS // 64  # Number of programs per part.
    _start, _end, first_tile, end_tile = _load_part(tile_first_blocks_ptr, parts_ptr, gl.program_id(0) // HEAD_BLOCKS)
    return first_tile, end_tile, (gl.program_id(0) % HEAD_BLOCKS) * 64


@gluon.jit
def load_tile_share(plan, tile, NUM_HEADS: gl.constexpr):
    """Return (request, token, first latent, exclusive end of latents, partial slot) of `tile` in the program's part.

    token: index of the query in the step. first latent and end: positions in the request.
    partial slot: index in the partial results, -1 if the program computes the whole tile.
    """
    tile_first_blocks_ptr, tiles_ptr, parts_ptr, seq_lens_ptr, query_start_loc_ptr = plan
    part = gl.program_id(0) // (NUM_HEADS // 64)
    part_start, part_end = gl.load(parts_ptr + 2 * part), gl.load(parts_ptr + 2 * part + 2)
    first_block, end_block, partial_slot = _load_segment(tile_first_blocks_ptr, tile, part, part_start, part_end)
    request, query, query_start, _query_len, context_len = _load_tile(
        tiles_ptr, seq_lens_ptr, query_start_loc_ptr, tile
    )
    end = gl.minimum(end_block * 64, context_len + query + 1)
    return request, query_start + query, first_block * 64, end, partial_slot


@gluon.jit
def partial_rows(partial_slot, head, rows, NUM_HEADS: gl.constexpr):
    """Return the rows of heads `head` + `rows` in slot `partial_slot` of the partial results. rows: 0 to 63."""
    return (partial_slot.to(gl.int64) * (NUM_HEADS // 64) + head // 64) * 64 + rows
