"""Figure 1 and Table 1 of the article on MXNet and Horovod, as `reigen plan` predicts them, and that to 4,096 GPUs.

    python -m benchmarks.planner_figures
    python -m benchmarks.planner_figures --pictures docs

Nothing is measured: hosts, prices and the speed of one GPU are put in, and what is known and what assumed is printed
with the tables. Figures of the article are drawn as outlines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.report import markdown
from reigen.files import write_atomically
from reigen.planner.chart import ChartSeries, draw_chart
from reigen.planner.cluster import Cluster, make_cluster
from reigen.planner.costs import Costs
from reigen.planner.models import built_in_profile
from reigen.planner.prediction import Prediction, Strategy
from reigen.planner.profile import TrainingProfile
from reigen.planner.simulator import simulate

#: GPUs of a host, and those of a job.
GPUS = 8
FIGURE_SIZES, SCALE_SIZES = (8, 16, 32, 64), (8, 64, 256, 1024, 4096)
#: ImageNet's epochs in the article, and the GPUs of its Table 1.
EPOCHS, TABLE_SIZE = 90, 64
#: What one GPU trains alone in a second: see ASSUMED.
ALONE = 750.0
#: In the text of the article: images a second with Horovod on 64 GPUs; efficiency with one server there.
SAID_HOROVOD, SAID_ONE_SERVER = 45_000.0, 0.38
HOST_PRICE, SERVER_PRICE = 24.48, 3.06

KNOWN = """\
* the article: ResNet-50 v1, ImageNet, 90 epochs; 64 GPUs are 8 p3.16xlarge with 8 V100 each; 256 images a GPU;
  float16 in forward and backward, gradients of float32; 45,000 images/s with Horovod, 44 minutes
* the article: one server: an efficiency of 38 % on 64 GPUs; two servers a worker: as efficient as Horovod; Horovod
  has the best throughput at the lowest cost
* the article: columns for 8, 16, 32 and 64 GPUs; their heights, and the figures of Table 1, are in pictures, which
  its text does not repeat
* EC2: a p3.16xlarge has a network of 25 Gbit/s and 64 virtual processors; its V100s are joined by NVLink
* MXNet's documentation: the GPUs of a host are one worker, which adds up their gradients before it pushes
"""
ASSUMED = f"""\
* one GPU alone trains {ALONE:g} images/s: then Horovod's 45,000 are {SAID_HOROVOD / 64 / ALONE:.0%} of 64 times
  that
* a message takes 30 us one way between hosts, 6 us between GPUs; 100 GB/s between the GPUs of a host
* each server is on a host of its own, with 25 Gbit/s and 72 virtual processors, for {SERVER_PRICE} USD an hour
  (on-demand price of a c5.18xlarge; that of a p3.16xlarge is {HOST_PRICE} USD; Linux, us-east-1, as of 2018: not
  looked up again)
* servers are Reigen's, not ps-lite: messages and bytes cost what `reigen.planner.costs` says by default, and
  workers push when backward is over, while MXNet's push during backward
* servers update the weights; nothing else uses the network; reading images takes no time
"""


def article_cluster(num_servers: int, num_hosts: int) -> Cluster:
    """Hosts of the article, and servers on hosts of their own."""
    hosts: list[dict[str, object]] = [
        {
            "name": "p3.16xlarge", "count": num_hosts, "ranks": GPUS, "processors": 64, "bandwidth": "25 Gbit/s",
            "latency": "30 us", "device_bandwidth": "100 GB/s", "price_per_hour": HOST_PRICE,
        }
    ]  # fmt: skip
    if num_servers:
        hosts.append({
            "name": "server", "count": num_servers, "ranks": 0, "servers": 1, "processors": 72,
            "bandwidth": "25 Gbit/s", "latency": "30 us", "price_per_hour": SERVER_PRICE,
        })  # fmt: skip
    return make_cluster({"hosts": hosts})


def article_profile() -> TrainingProfile:
    """ResNet-50 on one V100, as in the article."""
    return built_in_profile("resnet50", samples_per_second=ALONE, batch=256)


def predict(num_gpus: int, kind: str, profile: TrainingProfile, costs: Costs) -> Prediction:
    """Predict a way of the figure: ``hierarchical``, ``ring``, or servers ``n:1``, ``1:1``, ``2:1``."""
    hosts = num_gpus // GPUS
    servers = {"n:1": 1, "1:1": hosts, "2:1": 2 * hosts}.get(kind, 0)
    if servers:
        strategy = Strategy("servers", servers, sums_on_host=True)
    else:
        strategy = Strategy("ring" if kind == "ring" else "allreduce")
    return simulate(profile, article_cluster(servers, hosts), strategy, costs)


NAMES = {
    "hierarchical": "allreduce, hierarchical",
    "ring": "allreduce, one ring",
    "n:1": "one server",
    "1:1": "as many servers as workers",
    "2:1": "two servers a worker",
}


def predict_all(sizes: Sequence[int], costs: Costs) -> dict[str, list[Prediction]]:
    """All ways, for all numbers of GPUs."""
    profile = article_profile()
    return {kind: [predict(size, kind, profile, costs) for size in sizes] for kind in NAMES}


def draw(title: str, sizes: Sequence[int], found: Mapping[str, Sequence[Prediction]], *, with_article: bool) -> str:
    """Draw throughputs as columns and efficiencies as lines."""
    series = []
    for kind, predictions in found.items():
        columns = tuple(each.samples_per_second for each in predictions)
        series.append(ChartSeries(NAMES[kind], columns, tuple(each.efficiency for each in predictions)))
    if with_article:
        missing: tuple[None, ...] = (None,) * (len(sizes) - 1)
        one = SAID_ONE_SERVER * 64 * ALONE
        series.append(ChartSeries("the article: Horovod", (*missing, SAID_HOROVOD), is_outlined=True))
        series.append(ChartSeries("the article: one server (38 %)", (*missing, one), is_outlined=True))
    return draw_chart(title, [f"{size} GPUs" for size in sizes], series, "images/s", "scaling efficiency")


def figure_table(sizes: Sequence[int], found: Mapping[str, Sequence[Prediction]]) -> str:
    """Throughput and efficiency of every way."""
    rows = []
    for kind, predictions in found.items():
        cells = [f"{each.samples_per_second:,.0f} ({each.efficiency:.0%})" for each in predictions]
        rows.append([NAMES[kind], *cells, predictions[-1].bound])
    return markdown(["images/s (efficiency)", *(f"{size} GPUs" for size in sizes), "bound by, last column"], rows)


def cost_table(found: Mapping[str, Prediction]) -> str:
    """Cost of the whole training, as Table 1 has it."""
    rows = []
    for kind, each in found.items():
        assert each.epoch_seconds is not None
        assert each.epoch_cost is not None
        minutes = EPOCHS * each.epoch_seconds / 60
        rows.append([
            NAMES[kind], f"{each.samples_per_second:,.0f}", f"{minutes:.1f}", str(each.num_hosts),
            f"{EPOCHS * each.epoch_cost:,.2f}",
        ])  # fmt: skip
    return markdown(["64 GPUs", "images/s", "minutes", "instances", "USD"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="draw both figures there, too")
    chosen = parser.parse_args(arguments)
    costs = Costs()
    figure, scale = predict_all(FIGURE_SIZES, costs), predict_all(SCALE_SIZES, costs)
    print(figure_table(FIGURE_SIZES, figure))
    print(cost_table({kind: each[FIGURE_SIZES.index(TABLE_SIZE)] for kind, each in figure.items()}))
    print(figure_table(SCALE_SIZES, scale))
    print(f"Known:\n{KNOWN}\nAssumed:\n{ASSUMED}")
    if chosen.pictures is not None:
        drawn = draw("ResNet-50: predicted, and what the article says", FIGURE_SIZES, figure, with_article=True)
        write_atomically(chosen.pictures / "planner-figure1.svg", [drawn.encode()])
        drawn = draw("ResNet-50 up to 4,096 GPUs: predicted", SCALE_SIZES, scale, with_article=False)
        write_atomically(chosen.pictures / "planner-scale.svg", [drawn.encode()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
