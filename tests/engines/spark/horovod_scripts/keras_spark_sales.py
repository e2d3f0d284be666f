"""A script for Horovod's KerasEstimator, of the kind of its Rossmann example, with made-up sales of stores.

What differs from a script for Keras 2: keras.ops in the place of keras.backend.
"""

import argparse

import horovod.spark.keras as hvd
import keras
import numpy as np
import pyspark
import pyspark.sql.functions as F  # noqa: N812
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from keras.layers import Concatenate, Dense, Dropout, Embedding, Flatten, Input
from pyspark.ml.feature import StringIndexer

parser = argparse.ArgumentParser()
parser.add_argument("--master")
parser.add_argument("--num-proc", type=int)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--work-dir", default="/tmp")
args = parser.parse_args()

categorical_cols = ["Store", "DayOfWeek", "StateIndex"]
continuous_cols = ["CompetitionDistance", "Promo"]
all_cols = categorical_cols + continuous_cols


def exp_rmspe(y_true, y_pred):
    pct = keras.ops.square((keras.ops.exp(y_true) - keras.ops.exp(y_pred)) / keras.ops.exp(y_true))
    return keras.ops.sqrt(keras.ops.mean(pct))


def act_sigmoid_scaled(x):
    return keras.ops.sigmoid(x) * 10.0


CUSTOM_OBJECTS = {"exp_rmspe": exp_rmspe, "act_sigmoid_scaled": act_sigmoid_scaled}

if __name__ == "__main__":
    conf = pyspark.SparkConf().setAppName("keras_spark_sales").set("spark.ui.enabled", "false")
    if args.master:
        conf.setMaster(args.master)
    spark = pyspark.sql.SparkSession.builder.config(conf=conf).getOrCreate()

    rng = np.random.default_rng(0)
    rows = []
    for number in range(1200):
        store, day, state = int(rng.integers(8)), int(rng.integers(7)), "ABC"[rng.integers(3)]
        distance, promo = float(rng.random()), int(rng.integers(2))
        sales = 7 + 0.1 * store - 0.15 * day + 0.5 * promo + 0.3 * distance + {"A": 0.0, "B": 0.2, "C": -0.2}[state]
        rows.append((store, day, state, distance, promo, float(np.exp(sales)), number >= 1000))
    columns = ["Store", "DayOfWeek", "State", "CompetitionDistance", "Promo", "Sales", "Validation"]
    df = spark.createDataFrame(rows, columns)
    indexer = StringIndexer(inputCol="State", outputCol="StateIndex").fit(df)
    df = indexer.transform(df)
    train_df = df.withColumn("Sales", F.log(df.Sales))
    test_df = df.filter("Validation").drop("Sales")

    sizes = {"Store": 8, "DayOfWeek": 7, "StateIndex": 3}
    inputs = {col: Input(shape=(1,), name=col) for col in all_cols}
    embeddings = [Flatten()(Embedding(sizes[col], 4, name="emb_" + col)(inputs[col])) for col in categorical_cols]
    x = Concatenate()([*embeddings, *(inputs[col] for col in continuous_cols)])
    x = Dense(32, activation="relu")(x)
    x = Dropout(0.05)(x)
    output = Dense(1, activation=act_sigmoid_scaled)(x)
    model = keras.Model([inputs[col] for col in all_cols], output)

    ckpt_callback = keras.callbacks.ModelCheckpoint(
        "checkpoint.keras", monitor="val_exp_rmspe", mode="min", save_best_only=True
    )
    store = Store.create(args.work_dir)
    backend = SparkBackend(num_proc=args.num_proc)
    keras_estimator = hvd.KerasEstimator(
        backend=backend,
        store=store,
        model=model,
        optimizer=keras.optimizers.Adam(learning_rate=0.005),
        loss="mae",
        metrics=[exp_rmspe],
        custom_objects=CUSTOM_OBJECTS,
        feature_cols=all_cols,
        label_cols=["Sales"],
        validation="Validation",
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2,
        random_seed=1,
        checkpoint_callback=ckpt_callback,
    )
    keras_model = keras_estimator.fit(train_df).setOutputCols(["Sales_output"])
    history = keras_model.getHistory()
    best_val_rmspe = min(history["val_exp_rmspe"])
    print("Best RMSPE:", best_val_rmspe)

    pred_df = keras_model.transform(test_df)
    pred_df = pred_df.withColumn("Sales_pred", F.exp(pred_df.Sales_output))
    truth = df.filter("Validation").select("Store", "DayOfWeek", "CompetitionDistance", "Sales")
    joined = pred_df.join(truth, ["Store", "DayOfWeek", "CompetitionDistance"])
    error = joined.select(F.sqrt(F.avg(F.pow((F.col("Sales") - F.col("Sales_pred")) / F.col("Sales"), 2)))).first()[0]
    print("Test RMSPE:", error)
    spark.stop()
