"""DeepSeek-V4 as Flax NNX modules: weights in the module, everything else in and out."""
