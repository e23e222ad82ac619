"""Steps as the planners of torch.distributed.checkpoint see them."""
