"""Training by transformers' Trainer with the code of docs/huggingface.md, in rank processes of tests."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
LENGTH, WORDS = 12, 29


@dataclass
class Task:
    """A small model, and options of the Trainer."""

    model: str
    directory: str
    #: samples of a rank's batch
    batch: int = 4
    resume: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def make_samples(model: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up; for BERT with their first word's parity as label."""
    first = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(count))
    words = (first + torch.arange(LENGTH)) % WORDS
    labels = words if model == "gpt2" else first[:, 0] % 2
    return [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]


def make_model(model: str) -> Any:
    """A model of random weights; nothing is downloaded."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    if model == "gpt2":
        zeros = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **zeros)
        )
    config = BertConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)  # fmt: skip
    return BertForSequenceClassification(config)


def load_trainer() -> Any:
    """The Trainer of the page."""
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class " in block]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    return names["ReigenTrainer"]


def train(task: Task) -> dict[str, Any]:
    """Train; returns what this rank has seen."""
    from transformers import TrainingArguments

    import reigen

    trainer_class = load_trainer()
    reigen.init()
    torch.manual_seed(0 if reigen.size() == 1 else 10 * reigen.rank())  # rank 0's weights are taken
    model = make_model(task.model)
    arguments = TrainingArguments(task.directory, **{
        "per_device_train_batch_size": task.batch, "per_device_eval_batch_size": task.batch, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "num_train_epochs": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.5, "seed": 1, **task.options})  # fmt: skip
    trainer = trainer_class(
        model, arguments, train_dataset=make_samples(task.model, 64), eval_dataset=make_samples(task.model, 32)
    )
    trainer.train(resume_from_checkpoint=True if task.resume else None)
    data = b"".join(each.detach().contiguous().numpy().tobytes() for each in model.state_dict().values())
    history = trainer.state.log_history
    return {
        "weights": hashlib.sha256(data).hexdigest(),
        "parameters": torch.cat([each.detach().flatten() for each in model.parameters()]).tolist(),
        "losses": [each["loss"] for each in history if "loss" in each],
        "norms": [float(each["grad_norm"]) for each in history if "grad_norm" in each],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "steps": trainer.state.global_step,
        "rank": reigen.rank(),
    }
