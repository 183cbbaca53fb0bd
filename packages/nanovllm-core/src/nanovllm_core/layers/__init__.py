"""Layers for inference. Each layer holds only its rank's share of the weights."""
