"""Adds up the residual streams of fake ranks, which do not communicate."""

from collections.abc import Sequence

from torch import Tensor

from nanovllm_core.layers.residual import ResidualStream


def add_up(streams: Sequence[ResidualStream]) -> Tensor:
    total = streams[0].residual
    for stream in streams:
        assert (stream.partial is None) == (len(streams) == 1)
        if stream.partial is not None:
            total = total + stream.partial
    return total
