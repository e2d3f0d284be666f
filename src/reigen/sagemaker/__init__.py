"""SageMaker's Python SDK, version 3: ``ModelTrainer(..., distributed=reigen.sagemaker.Distributed())``."""

from reigen.sagemaker.distributed import Distributed

__all__ = ["Distributed"]
