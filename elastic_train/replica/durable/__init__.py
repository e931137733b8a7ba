"""The last resort: the state of the run on disk, written beside the training and read when every replica is gone."""
