"""Device functions that send units to slots of 16 bytes in the receive buffers of peers, and receive units.

A word is empty while all its bits are set. `put` fills an empty slot of the receiver. `take` reads a slot until no word
is empty, and empties the slot again. The data itself signals its arrival, so no flags, barriers or fences are needed.
PTX promises only that each word arrives as a whole, so `take` checks every word.

Floating-point units have four words of 32 bits. A word with all bits set is NaN, which `put` sends as another NaN.
Other units hold only two elements of 32 bits. Each element is sent in a word of 64 bits whose upper half is 0, so that
the word is never empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm_kernels.collective.policy import SLOT_BYTES

_SLOT_BYTES = gl.constexpr(SLOT_BYTES)

# An asm block handles one slot. Triton passes the slot's address once per element, and the block uses the first copy.
# Address 0 means that there is no slot. Operands: outputs, then the unit's words (only to put a unit), then addresses.
_PUT = gl.constexpr("""{
    .reg .pred valid, empty<4>;
    .reg .b32 word<4>;
    setp.ne.s64 valid, $8, 0;
    setp.eq.s32 empty0, $4, -1;
    setp.eq.s32 empty1, $5, -1;
    setp.eq.s32 empty2, $6, -1;
    setp.eq.s32 empty3, $7, -1;
    selp.b32 word0, 0x7fff7fff, $4, empty0;
    selp.b32 word1, 0x7fff7fff, $5, empty1;
    selp.b32 word2, 0x7fff7fff, $6, empty2;
    selp.b32 word3, 0x7fff7fff, $7, empty3;
    @valid st.relaxed.sys.global.v4.b32 [$8], {word0, word1, word2, word3};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
}""")
_TAKE = gl.constexpr("""{
    .reg .pred missing, empty;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.eq.s64 missing, $4, 0;
    @missing bra DONE;
    READ:
    ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
    setp.eq.s32 empty, $0, -1;
    setp.eq.or.s32 empty, $1, -1, empty;
    setp.eq.or.s32 empty, $2, -1, empty;
    setp.eq.or.s32 empty, $3, -1, empty;
    @empty bra READ;
    st.relaxed.sys.global.v4.b32 [$4], {-1, -1, -1, -1};
    DONE:
}""")
_PUT_EXACT = gl.constexpr("""{
    .reg .pred valid;
    .reg .b64 word<2>;
    setp.ne.s64 valid, $4, 0;
    mov.b64 word0, {$2, 0};
    mov.b64 word1, {$3, 0};
    @valid st.relaxed.sys.global.v2.b64 [$4], {word0, word1};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
}""")
_TAKE_EXACT = gl.constexpr("""{
    .reg .pred missing, empty;
    .reg .b32 upper<2>;
    .reg .b64 word<2>;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    setp.eq.s64 missing, $2, 0;
    @missing bra DONE;
    READ:
    ld.relaxed.sys.global.v2.b64 {word0, word1}, [$2];
    mov.b64 {$0, upper0}, word0;
    mov.b64 {$1, upper1}, word1;
    setp.eq.s32 empty, upper0, -1;
    setp.eq.or.s32 empty, upper1, -1, empty;
    @empty bra READ;
    st.relaxed.sys.global.v2.b64 [$2], {-1, -1};
    DONE:
}""")
# The number at the end of a name is the number of elements in a unit. Two elements of 2 bytes share a register.
_PUT_CONSTRAINTS_2 = gl.constexpr("=&r,=&r,r,r,l,l,~{memory}")
_PUT_CONSTRAINTS_4 = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,l,l,l,l,~{memory}")
_PUT_CONSTRAINTS_8 = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,l,l,l,l,l,l,l,l,~{memory}")
_TAKE_CONSTRAINTS_2 = gl.constexpr("=&r,=&r,l,l,~{memory}")
_TAKE_CONSTRAINTS_4 = gl.constexpr("=&r,=&r,=&r,=&r,l,l,l,l,~{memory}")
_TAKE_CONSTRAINTS_8 = gl.constexpr("=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l,~{memory}")


@gluon.jit
def find_region(addresses_ptr, receiver, sender, phase, SIZE: gl.constexpr, REGION_BYTES: gl.constexpr):
    """Return the address of this program's slots for units of rank `sender` in the buffer of rank `receiver`."""
    region = (gl.program_id(0) * 2 + phase) * SIZE + sender
    return gl.load(addresses_ptr + receiver) + region.to(gl.int64) * REGION_BYTES


@gluon.jit
def find_chunk(chunk, units, unit_elements, part, num_elements, part_size):
    """Return (indices of a chunk's elements, whether each element exists, slot of each unit).

    units: [CHUNK_UNITS, 1], indices of units in a chunk. unit_elements: [1, PER_UNIT], indices of elements in a unit.
    The slot of a unit without elements is -1.
    """
    PER_UNIT: gl.constexpr = unit_elements.shape[1]
    unit_starts = (chunk * units.shape[0] + units) * PER_UNIT
    starts = part * part_size + unit_starts
    slots = chunk // gl.num_programs(0) * units.shape[0] + units
    slots = gl.where((unit_starts < part_size) & (starts < num_elements), slots, -1)
    # No unit crosses the end of a part: `part_size` is a multiple of PER_UNIT, or there is only one part.
    return starts + unit_elements, (slots >= 0) & (starts + unit_elements < num_elements), slots


@gluon.jit
def put(units, region, slots):
    """Send `units` [n, elements] to `slots` [n, 1] of the region at address `region`. Slot -1: send nothing."""
    PER_UNIT: gl.constexpr = units.shape[1]
    addresses = gl.where(slots >= 0, region + slots.to(gl.int64) * _SLOT_BYTES, 0)
    if PER_UNIT == 2:
        gl.inline_asm_elementwise(_PUT_EXACT, _PUT_CONSTRAINTS_2, [units, addresses], units.dtype, False, 2)
    elif PER_UNIT == 4:
        gl.inline_asm_elementwise(_PUT, _PUT_CONSTRAINTS_4, [units, addresses], units.dtype, False, 4)
    else:
        gl.inline_asm_elementwise(_PUT, _PUT_CONSTRAINTS_8, [units, addresses], units.dtype, False, 8)


@gluon.jit
def take(like, region, slots):
    """Wait for units in `slots` [n, 1] of the region at address `region`, and empty the slots. Slot -1: return zeros.

    Returns a tensor with the shape [n, elements], dtype and layout of `like`.
    """
    PER_UNIT: gl.constexpr = like.shape[1]
    zeros = gl.full(like.shape, 0, gl.int64, like.type.layout)
    addresses = zeros + gl.where(slots >= 0, region + slots.to(gl.int64) * _SLOT_BYTES, 0)
    if PER_UNIT == 2:
        units = gl.inline_asm_elementwise(_TAKE_EXACT, _TAKE_CONSTRAINTS_2, [addresses], like.dtype, False, 2)
    elif PER_UNIT == 4:
        units = gl.inline_asm_elementwise(_TAKE, _TAKE_CONSTRAINTS_4, [addresses], like.dtype, False, 4)
    else:
        units = gl.inline_asm_elementwise(_TAKE, _TAKE_CONSTRAINTS_8, [addresses], like.dtype, False, 8)
    return units


@gluon.jit
def take_sum(
    own_units, addresses_ptr, slots, phase, RANK: gl.constexpr, SIZE: gl.constexpr, REGION_BYTES: gl.constexpr
):
    """Return the float32 sum of `own_units` and of the units that all peers sent to `slots`, in rank order."""
    for sender in gl.static_range(SIZE):
        if sender == RANK:
            units = own_units
        else:
            units = take(own_units, find_region(addresses_ptr, RANK, sender, phase, SIZE, REGION_BYTES), slots)
        if sender == 0:
            sums = units.to(gl.float32)
        else:
            sums += units.to(gl.float32)
    return sums
