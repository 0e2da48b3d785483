"""Learning rates as pure functions of the step."""

import math

import tensorflow as tf


def scale_rate(rate: float, *, global_batch_size: int, reference_batch_size: int, rule: str) -> float:
    """Returns the learning rate for a batch, from the one that was chosen for a reference batch.

      none:    rate
      sqrt:    rate * sqrt(global / reference), which keeps the noise of Adam's steps
      linear:  rate * global / reference, which keeps that of plain SGD

    Source: Goyal et al. 2017 (linear, https://arxiv.org/abs/1706.02677), Malladi et al. 2022 (square root for adaptive
    optimizers, https://arxiv.org/abs/2205.10287).
    """
    exponents = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
    if rule not in exponents:
        raise ValueError(f"rule={rule!r}: give one of {', '.join(exponents)}")
    return rate * (global_batch_size / reference_batch_size) ** exponents[rule]


@tf.keras.utils.register_keras_serializable("fashion_oct")
class WarmupThenDecay(tf.keras.optimizers.schedules.LearningRateSchedule):
    """LR warm-up, linear from 0, then a constant or a cosine decay to 0 at the last step.

      step < warmup_steps:  rate = peak * (step + 1) / (warmup_steps + 1)
      constant:             rate = peak
      cosine:               rate = peak * (1 + cos(pi * (step - warmup_steps) / (num_steps - warmup_steps))) / 2

    Source: Goyal et al. 2017 (warm-up, https://arxiv.org/abs/1706.02677), Loshchilov and Hutter 2017 (cosine,
    https://arxiv.org/abs/1608.03983, without restarts).

    Args:
      peak: the highest learning rate.
      num_steps: steps of the whole run, the warm-up included.
      warmup_steps: steps of the warm-up; 0 for none.
      decay: "constant" or "cosine".
    """

    def __init__(self, peak: float, num_steps: int, *, warmup_steps: int = 0, decay: str = "constant"):
        super().__init__()
        if decay not in ("constant", "cosine"):
            raise ValueError(f"decay={decay!r}: give 'constant' or 'cosine'")
        if not 0 <= warmup_steps < num_steps:
            raise ValueError(f"warmup_steps={warmup_steps}: give at least 0 and less than num_steps={num_steps}")
        self.peak, self.num_steps, self.warmup_steps, self.decay = peak, num_steps, warmup_steps, decay

    def __call__(self, step):
        """Returns the rate of `step` (counted from 0) as a float32 scalar tensor."""
        step = tf.cast(step, tf.float32)
        rate = tf.constant(self.peak, tf.float32)
        if self.decay == "cosine":
            share = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps)
            rate *= (1.0 + tf.cos(math.pi * tf.clip_by_value(share, 0.0, 1.0))) / 2.0
        if self.warmup_steps:
            rate = tf.where(step < self.warmup_steps, self.peak * (step + 1.0) / (self.warmup_steps + 1.0), rate)
        return rate

    def get_config(self):
        """Returns the arguments, so that a saved model can be loaded again."""
        return {
            "peak": self.peak,
            "num_steps": self.num_steps,
            "warmup_steps": self.warmup_steps,
            "decay": self.decay,
        }
