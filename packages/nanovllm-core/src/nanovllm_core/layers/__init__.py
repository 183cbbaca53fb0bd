"""Layers for inference. Each layer holds its rank's share of the weights. T in shapes: number of tokens of a step."""
