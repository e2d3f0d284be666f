"""Which tests run which Python blocks of the documentation: every block is in one program, or its page says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """Blocks of a page that run one after the other, as one program.

    What a page leaves to its reader (a model, data, the job that is there already) comes from ``given_NAME`` of
    ``tests/docs/names_GROUP.py``; where there is a function ``check_NAME``, it gets what the blocks have made.
    """

    page: str
    name: str
    #: numbers of the page's Python blocks
    blocks: tuple[int, ...] = (0,)
    #: what a page says and a test cannot have: sizes, addresses
    replaced: Mapping[str, str] = field(default_factory=dict)


#: Programs that run in the same processes, by group; LAUNCHERS says how these are started.
PROGRAMS: dict[str, tuple[Program, ...]] = {
    "torch": (
        Program("docs/numpy.md", "numpy"),
        Program("README.md", "readme"),
        Program("docs/index.md", "index"),
        Program("docs/torch.md", "torch"),
        Program("docs/torch.md", "uneven", (2,)),
        Program("docs/tutorials/first-job.md", "first_job"),
        Program("docs/timeline.md", "timeline", (0,), {'"/tmp/': 'directory + "/'}),
        Program("docs/shared-parameters.md", "shared_parameters"),
        Program("docs/compression.md", "compression", (1,)),
        Program("docs/metrics.md", "metrics"),
        Program("docs/gpu.md", "gpu"),
        Program("docs/tutorials/gpus.md", "gpus", (0, 1)),
        Program("docs/elastic.md", "elastic_run", (0, 1)),
        Program("docs/elastic-steps.md", "elastic_job", (0,), {'"job.pt"': 'directory + "/job.pt"'}),
    ),
    "servers": (
        Program("docs/kv.md", "kv", (0,)),
        Program("docs/kv-failures.md", "kv_elastic", (0,)),
        Program("docs/kv-failures.md", "sample_leases", (1,)),
        Program("docs/optim.md", "optim"),
        Program("docs/compression.md", "compression", (0,)),
        Program("docs/trainer.md", "trainer", (0,)),
        Program("docs/trainer.md", "trainer_clips", (1,)),
        Program("docs/trainer.md", "trainer_groups", (2,)),
        Program("docs/trainer.md", "trainer_sparse", (3,)),
        Program("docs/tutorials/parameter-servers.md", "tutorial"),
    ),
    "elastic": (Program("docs/elastic-tutorial.md", "history"),),
    "alone": (
        Program("docs/launchers.md", "launcher"),
        Program("docs/torch.md", "function", (1,)),
    ),
    "jax": (Program("docs/jax.md", "jax"), Program("docs/elastic-steps.md", "elastic", (1,))),
    "keras": (Program("docs/keras.md", "keras"), Program("docs/elastic-steps.md", "elastic", (2,))),
    "tensorflow": (Program("docs/tensorflow.md", "tensorflow"),),
    "mxnet": (Program("docs/mxnet.md", "mxnet"), Program("docs/mxnet.md", "elastic", (1,))),
    "dask": (
        Program("docs/dask.md", "dask", (0,), {'"scheduler:8786"': "cluster", "num_proc=4": "num_proc=2"}),
    ),
    "ray": (
        Program(
            "docs/ray.md", "ray", (0,),
            {"num_workers=8": "num_workers=2", "num_hosts=2": "num_hosts=1", "_per_host=4": "_per_host=2"},
        ),
        Program("docs/ray.md", "ray_train", (1,), {"num_workers=4": "num_workers=2"}),
        Program("docs/ray.md", "ray_elastic", (2,), {"max_workers=8": "max_workers=2"}),
    ),
    "spark": (
        Program(
            "docs/spark.md", "spark", (0, 1),
            {"num_proc=8": "num_proc=2", "num_processes=8": "num_processes=2", "Distributor(8,": "Distributor(2,",
             '"/shared': 'directory + "'},
        ),
        Program("docs/spark.md", "spark_elastic", (2,), {"=4, max_num_proc=8": "=1, max_num_proc=2"}),
        Program("docs/yarn.md", "yarn", (0,), {"num_proc=8": "num_proc=2"}),
        Program("docs/spark-estimators.md", "estimator", (0,), {"=4,": "=2,", '"hdfs://name:8020/dir"': "directory"}),
    ),
    "integrations": (
        Program("docs/lightning.md", "lightning"),
        Program("docs/lightning.md", "fabric", (1,)),
        Program("docs/metrics.md", "tensorboard", (1,)),
    ),
}  # fmt: skip
#: Options of `reigen run` for each group; None: one process, without a launcher.
LAUNCHERS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(PROGRAMS, ("-np", "2")),
    "servers": ("-np", "2", "-s", "2"),
    "elastic": ("-np", "2", "--min-np", "1"),
    **dict.fromkeys(("alone", "dask", "ray", "spark"), None),
}
#: Blocks that another test runs: parts of the tutorial's program, and a test.
ELSEWHERE = {
    ("docs/tutorials/first-job.md", 1): "tests/docs/test_docs_first_job.py",
    ("docs/tutorials/first-job.md", 2): "tests/docs/test_docs_first_job.py",
    ("docs/launchers.md", 1): "tests/conformance/test_launchers.py",
    ("docs/huggingface.md", 0): "tests/integrations/test_huggingface.py",
    ("CONTRIBUTING.md", 0): "tests/docs/test_docs_programs.py",
}
