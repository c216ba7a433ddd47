"""Results and audits as other tools' fields and tables: FiftyOne, Spotlight, W&B, TensorBoard."""

from engram.exports.experiment_loggers import to_tensorboard, to_wandb
from engram.exports.fields import fields
from engram.exports.viewers import to_fiftyone, to_spotlight

__all__ = ["fields", "to_fiftyone", "to_spotlight", "to_tensorboard", "to_wandb"]
