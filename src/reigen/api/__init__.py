"""Base of all frameworks: tensors seen as arrays, collectives, gradient buckets, the optimizer's logic.

Nothing here imports a framework. A new one gives a :class:`~reigen.api.adapter.TensorAdapter` and its own
classes.
"""
