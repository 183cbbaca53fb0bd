"""What plans the attention of a step: the batch, gathers, work lists, tile sizes, and estimates of the time."""
