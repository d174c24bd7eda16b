"""Trains dsjax-nano, the embedded model: corpus, tokenizer, baselines, training and evaluation."""
