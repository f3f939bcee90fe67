"""Makes a checkpoint of a job from what others saved: a Hugging Face folder or one of torch.distributed.checkpoint."""
