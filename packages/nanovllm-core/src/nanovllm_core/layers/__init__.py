"""Layers for inference. Each layer holds only its rank's share of the weights. T is a step's number of tokens."""
