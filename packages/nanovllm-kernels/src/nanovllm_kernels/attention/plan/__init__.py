"""Plans the attention of a step: batch, gathers, work lists, tile sizes, and time estimates."""
