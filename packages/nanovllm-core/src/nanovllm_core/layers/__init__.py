"""The parts that models are made of, each knowing which share of itself is this rank's.

Inference only. This room must not know any architecture, file format, schedule or cache policy: it sees one batch
through a ForwardContext and calls the kernels.
"""
