"""Layers for inference. Each layer holds its rank's share of the weights. T: number of tokens of the step."""
