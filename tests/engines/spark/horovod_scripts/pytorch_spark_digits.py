"""A script for Horovod's TorchEstimator, of the kind of its MNIST example, with scikit-learn's digits."""

import argparse

import horovod.spark.torch as hvd
import numpy as np
import pyspark
import pyspark.sql.types as T  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql.functions import udf
from sklearn.datasets import load_digits
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--master")
parser.add_argument("--num-proc", type=int)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--work-dir", default="/tmp")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.conv2_drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = x.float()
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2_drop(self.conv2(x)))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=-1)


if __name__ == "__main__":
    conf = pyspark.SparkConf().setAppName("pytorch_spark_digits").set("spark.ui.enabled", "false")
    if args.master:
        conf.setMaster(args.master)
    spark = pyspark.sql.SparkSession.builder.config(conf=conf).getOrCreate()

    images, labels = load_digits(return_X_y=True)
    rows = [(Vectors.dense(image / 16.0), int(label)) for image, label in zip(images, labels, strict=True)]
    train_df = spark.createDataFrame(rows[:1500], ["features", "label"])
    test_df = spark.createDataFrame(rows[1500:], ["features", "label"])

    store = Store.create(args.work_dir)
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = lambda output, target: F.nll_loss(output, target.long())  # noqa: E731

    backend = SparkBackend(num_proc=args.num_proc, verbose=2, prefix_output_with_timestamp=True)
    torch_estimator = hvd.TorchEstimator(
        backend=backend,
        store=store,
        model=model,
        optimizer=optimizer,
        loss=loss,
        input_shapes=[[-1, 1, 8, 8]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation=0.1,
        random_seed=0,
        verbose=1,
    )
    torch_model = torch_estimator.fit(train_df).setOutputCols(["label_prob"])
    pred_df = torch_model.transform(test_df)

    argmax = udf(lambda v: float(np.argmax(v)), returnType=T.DoubleType())
    pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
    pred_df = pred_df.withColumn("label", pred_df.label.cast("double"))
    evaluator = MulticlassClassificationEvaluator(predictionCol="label_pred", labelCol="label", metricName="accuracy")
    print("Test accuracy:", evaluator.evaluate(pred_df))
    spark.stop()
