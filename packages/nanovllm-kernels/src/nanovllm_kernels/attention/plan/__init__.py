"""Plans the attention of a step, once for all layers."""
