"""Trainer for torch: gradients go to a key-value store, sums or updated weights come back."""
