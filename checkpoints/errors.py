"""The exception that this package raises."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, unsafe or does not fit the model; the message names the file and the tensor."""
