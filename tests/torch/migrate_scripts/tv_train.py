"""The shape of references for vision: a module of helpers, one of several optimizers, metrics of all ranks."""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.utils.data
import tv_utils as utils
from torch import nn


def train_one_epoch(model, criterion, optimizer, data_loader, args):
    model.train()
    metric_logger = utils.MetricLogger()
    for image, target in data_loader:
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        metric_logger.meters["loss"].update(loss.item(), n=image.shape[0])
    metric_logger.synchronize_between_processes()
    return metric_logger.meters["loss"].global_avg


def evaluate(model, criterion, data_loader):
    model.eval()
    metric_logger = utils.MetricLogger()
    num_processed_samples = 0
    with torch.inference_mode():
        for image, target in data_loader:
            loss = criterion(model(image), target)
            metric_logger.meters["loss"].update(loss.item(), n=image.shape[0])
            num_processed_samples += image.shape[0]
    num_processed_samples = utils.reduce_across_processes(num_processed_samples)
    metric_logger.synchronize_between_processes()
    return metric_logger.meters["loss"].global_avg, int(num_processed_samples)


def load_data(args):
    generator = torch.Generator().manual_seed(5)
    dataset = torch.utils.data.TensorDataset(
        torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    )
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        test_sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=False)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
        test_sampler = torch.utils.data.SequentialSampler(dataset)
    return dataset, train_sampler, test_sampler


def main(args):
    utils.init_distributed_mode(args)
    torch.manual_seed(11)
    dataset, train_sampler, test_sampler = load_data(args)
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler)
    data_loader_test = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    parameters = utils.set_weight_decay(model, args.weight_decay)

    opt_name = args.opt.lower()
    if opt_name.startswith("sgd"):
        optimizer = torch.optim.SGD(
            parameters,
            lr=args.lr,
            momentum=args.momentum,
            nesterov="nesterov" in opt_name,
        )
    elif opt_name == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    else:
        raise RuntimeError(f"Invalid optimizer {args.opt}. Only SGD and AdamW are supported.")
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module

    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_loss = train_one_epoch(model, criterion, optimizer, data_loader, args)
        lr_scheduler.step()
        test_loss, num_samples = evaluate(model, criterion, data_loader_test)
        checkpoint = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as output:
            utils.save_on_master(checkpoint, Path(output) / "model.pth")
    if utils.is_main_process():
        sys.stdout.write(f"RESULT {num_samples} {train_loss:.5f} {test_loss:.5f}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="sgd_nesterov")
    parser.add_argument("--lr", default=0.2, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-2, type=float)
    parser.add_argument("--clip-grad-norm", default=0.7, type=float)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=6, type=int)
    parser.add_argument("--dist-url", default="env://", type=str)
    main(parser.parse_args())
