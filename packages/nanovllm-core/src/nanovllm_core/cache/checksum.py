"""The checksum of cache entries outside the cache: in files, and in the memory of other engines."""

import xxhash


def checksum_of(data: memoryview) -> int:
    """The 64-bit XXH3 hash of `data`. The hash detects accidental damage, but not deliberate changes.

    Other threads run while this function hashes large data. Source: https://github.com/Cyan4973/xxHash
    """
    return xxhash.xxh3_64_intdigest(data)
