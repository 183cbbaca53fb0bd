"""Device functions that read a program's work in `gluon_mla`: one part of a work list, for one block of 64 heads.

`plan` holds pointers: those of the list (see `work_list.WorkList`), `seq_lens` and `query_start_loc`. Tiles are one
token long, and blocks of latents hold 64 tokens.
"""

# ruff: noqa: N803, N806 - a kernel's compile-time constants are written in capitals, as Triton's users do

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_part(plan, NUM_HEADS: gl.constexpr):
    """Return this program's first tile, the tile after its last, and its first head."""
    tile_starts_ptr, _tiles_ptr, parts_ptr, _seq_lens_ptr, _query_start_loc_ptr = plan
    BLOCKS: gl.constexpr = NUM_HEADS // 64
    parts_ptr += gl.program_id(0) // BLOCKS * 2
    last_tile = gl.load(parts_ptr + 3).to(gl.int32)
    # The part may end exactly at the beginning of its last tile.
    reaches = gl.load(tile_starts_ptr + last_tile) < gl.load(parts_ptr + 2)
    return gl.load(parts_ptr + 1).to(gl.int32), last_tile + reaches.to(gl.int32), (gl.program_id(0) % BLOCKS) * 64


@gluon.jit
def load_work(plan, tile, NUM_HEADS: gl.constexpr):
    """Return (request, token, first latent, end of the latents, slot) of this program's share of a tile.

    slot: index of the partial results, -1 if the part has the whole tile.
    """
    tile_starts_ptr, tiles_ptr, parts_ptr, seq_lens_ptr, query_start_loc_ptr = plan
    part = gl.program_id(0) // (NUM_HEADS // 64)
    tile_begin = gl.load(tile_starts_ptr + tile)
    tile_end = gl.load(tile_starts_ptr + tile + 1)
    begin = gl.maximum(tile_begin, gl.load(parts_ptr + 2 * part))
    end = gl.minimum(tile_end, gl.load(parts_ptr + 2 * part + 2))
    slot = gl.where((begin == tile_begin) & (end == tile_end), -1, 2 * part + (begin == tile_begin).to(gl.int32))
    request = gl.load(tiles_ptr + 2 * tile)
    query = gl.load(tiles_ptr + 2 * tile + 1)
    query_start = gl.load(query_start_loc_ptr + request)
    query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
    # A query sees the tokens up to its own.
    length = gl.load(seq_lens_ptr + request) - query_len + query + 1
    first = (begin - tile_begin).to(gl.int32) * 64
    return request, query_start + query, first, gl.minimum((end - tile_begin).to(gl.int32) * 64, length), slot


@gluon.jit
def place_partial(slot, head, rows, NUM_HEADS: gl.constexpr):
    """Return the position of the partial results of `rows` of the block of heads that begins at `head`."""
    return (slot.to(gl.int64) * (NUM_HEADS // 64) + head // 64) * 64 + rows
