"""What the weight files of a checkpoint hold, without torch: which files, names and shapes."""
