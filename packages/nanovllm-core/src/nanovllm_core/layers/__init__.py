"""The layers of models, for inference only. Each layer knows its rank's share of the weights."""
